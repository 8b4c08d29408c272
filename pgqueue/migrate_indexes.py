"""Indexes on tables that are in use: built beside the work, before the transaction of their revision.

A plain CREATE INDEX keeps every enqueue and claim waiting until it is done. CONCURRENTLY does not, but runs in no
transaction, and where it is interrupted it leaves an index that is not valid: never read, written all the same, and in
the way of the next try by its name. So a revision declares such indexes, in `INDEXES`, and has them made where they are
missing in its `upgrade`; and whoever migrates a schema that holds a queue builds them first, and begins anew what was
left unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

import psycopg

from pgqueue.errors import SchemaError
from pgqueue.migrate_connection import connect, describe

Indexes = Mapping[str, str]
"""By name: ``CREATE INDEX {concurrently} name ON {schema}.table (…)``."""

_VALID = """
    SELECT i.indisvalid
    FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s
"""


def make_missing(indexes: Indexes, schema: str) -> Iterator[str]:
    """The statements of a revision's `upgrade`: they lock no table where the index was built before."""
    for name, definition in indexes.items():
        made = definition.replace("{concurrently} ", "").replace("{schema}", f'"{schema}"')
        missing = f"to_regclass('\"{schema}\".{name}') IS NULL"
        yield f"DO $do$ BEGIN IF {missing} THEN {made}; END IF; END $do$"


def build_beside(dsn: str, schema: str, indexes: Indexes, patience: float) -> bool:
    """Build what is missing or not valid while others work, each for as long as it takes; False where nothing is.

    It waits for the transactions that were open when it began, at most `patience` seconds for each of them. Raises what the
    driver raises, with a part that is not valid left behind, and SchemaError where an index is not valid in the end.
    """
    if not indexes:
        return False
    built = False
    with closing(connect(dsn)) as connection:
        connection.autocommit = True
        _without_limits(connection, patience)
        for name, definition in indexes.items():
            valid = _is_valid(connection, schema, name)
            if valid is False:
                connection.execute(f'DROP INDEX CONCURRENTLY "{schema}".{name}'.encode())
            if not valid:
                built = True
                made = definition.replace("{concurrently}", "CONCURRENTLY").replace("{schema}", f'"{schema}"')
                connection.execute(made.encode())
            if not _is_valid(connection, schema, name):
                raise SchemaError(f"index {schema}.{name} in {describe(dsn)} could not be built: run it again")
    return built


def _is_valid(connection: psycopg.Connection, schema: str, name: str) -> bool | None:
    """None: there is no such index."""
    row = connection.execute(_VALID, (schema, name)).fetchone()
    return None if row is None else bool(row[0])


def _without_limits(connection: psycopg.Connection, patience: float) -> None:
    """A role's statement_timeout would end a long build halfway. Behind a pooler nothing is set: others get the session."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    if row is None or row[0] != connection.info.backend_pid:
        return
    milliseconds = max(1, int(patience * 1000))
    connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{milliseconds}ms",))
    connection.execute("SELECT set_config('statement_timeout', '0', false)")

"""Roles of least privilege: a worker, a producer and a reader, beside the owner, who is whoever migrates.

They are group roles without login: grant membership to your own. All that they may do is written in ``sql/roles.sql``.
One run is one transaction; it takes away what is not written there, so running it again after an upgrade of pgqueue is
all there is to keep them current.
"""

from __future__ import annotations

from dataclasses import dataclass

from pgqueue.config import SCHEMA_PATTERN, validate_schema
from pgqueue.errors import ConfigurationError, SchemaError
from pgqueue.migrate import current, take_turn
from pgqueue.migrate_connection import describe, transaction, translated_errors
from pgqueue.sql import blocks
from pgqueue.tables import VERSION_TABLE, tables

KINDS = ("worker", "producer", "reader")
PATIENCE = 60.0
"""Seconds that a migration under way is waited for."""
_SEQUENCES_AND_FUNCTIONS = (
    *("job_id_seq", "lease_tie_seq", "message_id_seq"),
    *("archive_roll", "topic_roll", "payload_merge", "unique_follow", "unique_expire"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolesResult:
    """The names of all three roles, and of those that this run made."""

    names: tuple[str, ...]
    made: tuple[str, ...]


def names(schema: str = "pgqueue", prefix: str | None = None) -> tuple[str, ...]:
    """``<prefix>_worker``, ``_producer`` and ``_reader``; the prefix is the schema's name unless given.

    ConfigurationError for a prefix that is no plain lower-case identifier of at most 40 characters.
    """
    chosen = validate_schema(schema) if prefix is None else prefix
    if not SCHEMA_PATTERN.fullmatch(chosen) or chosen.startswith("pg_"):
        raise ConfigurationError(
            "the prefix of the roles: use lower-case letters, digits and underscores, at most 40, not pg_ at the start"
        )
    return tuple(f"{chosen}_{kind}" for kind in KINDS)


def script(schema: str = "pgqueue", *, prefix: str | None = None, with_payloads: bool = False) -> str:
    """The SQL that `create` runs, in one transaction; no connection is made. ConfigurationError as in `names`.

    For those who may not do it from Python: ``psql -v ON_ERROR_STOP=1 -f``, as the owner of the schema.
    """
    body = ";\n".join(_statements(schema, names(schema, prefix), with_payloads))
    return f"BEGIN;\n{body};\nCOMMIT;\n"


def check(dsn: str, *, schema: str = "pgqueue", prefix: str | None = None) -> None:
    """SchemaError when this role may not do what `create` does; changes nothing. Otherwise raises as `create`.

    Objects that are not there yet are no objection: whoever makes them owns them.
    """
    _missing_roles(dsn, schema, names(schema, prefix))


def create(dsn: str, *, schema: str = "pgqueue", prefix: str | None = None, with_payloads: bool = False) -> RolesResult:
    """Make the roles that are missing, and give all three exactly what they need in `schema`; again as often as you like.

    `with_payloads`: the reader may also see arguments, headers, errors and reasons. An existing role of one of these
    names is used as it is. Raises SchemaError when the schema holds no queue or a right is lacking, DatabaseUnavailable,
    ConfigurationError as in `names`. Nothing is changed then.
    """
    wanted = names(schema, prefix)
    if current(dsn, schema=schema) is None:
        raise SchemaError(f"schema {schema!r} in {describe(dsn)} holds no queue yet: run `pgqueue migrate`")
    made = _missing_roles(dsn, schema, wanted)
    with translated_errors(dsn, schema), transaction(dsn) as connection:
        take_turn(connection, dsn, schema, PATIENCE)
        for statement in _statements(schema, wanted, with_payloads):
            connection.exec_driver_sql(statement)
    return RolesResult(names=wanted, made=made)


def _missing_roles(dsn: str, schema: str, wanted: tuple[str, ...]) -> tuple[str, ...]:
    objects = [*tables(schema).__dataclass_fields__, VERSION_TABLE, *_SEQUENCES_AND_FUNCTIONS]
    params = {"roles": list(wanted), "schema": validate_schema(schema), "objects": objects}
    with translated_errors(dsn, schema), transaction(dsn, read_only=True) as connection:
        row = connection.exec_driver_sql(blocks("roles.sql")["roles_check"], params).one()
    role, may_make, missing, foreign = row
    head = f"role {role} in {describe(dsn)}"
    if foreign:
        what = ", ".join(f"{schema}.{name}" if name != "schema" else f"schema {schema}" for name in foreign[:3])
        raise SchemaError(f"{head} does not own {what}: only the role that migrates can grant; nothing was changed.")
    if missing and not may_make:
        statements = "; ".join(f"CREATE ROLE {name} NOLOGIN" for name in missing)
        raise SchemaError(
            f"{head} may not make roles (it lacks CREATEROLE), nothing was changed: have {statements} run, then run it again"
        )
    return tuple(name for name in wanted if name in missing)


def _statements(schema: str, wanted: tuple[str, ...], with_payloads: bool) -> list[str]:
    text = blocks("roles.sql")
    placed = {"{schema}": f'"{validate_schema(schema)}"'}
    placed |= {f"{{{kind}}}": f'"{name}"' for kind, name in zip(KINDS, wanted, strict=True)}
    statements = [text["role_create"].replace("{name}", name).replace("{role}", f'"{name}"') for name in wanted]
    for block in ("roles_revoke", "roles_grant", *(["payloads_grant"] if with_payloads else [])):
        filled = text[block]
        for placeholder, value in placed.items():
            filled = filled.replace(placeholder, value)
        statements += filled.split(";\n")
    return statements

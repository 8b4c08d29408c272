"""Making, changing and checking the schema: Alembic behind five functions, one transaction and one lock.

A run holds a transaction-level advisory lock from its first statement and commits everything at once: of several
processes that start together one applies and the others find nothing to do; a run that is killed leaves nothing. No
state of the session is used, so a pooler in transaction mode may stand in between. The host's own Alembic, its
`alembic_version` and its logging are never touched.

A migration waits for other sessions' table locks only DDL_PATIENCE seconds at a time, because every enqueue and claim
queues up behind that wait; then it rolls back, pauses, and tries again until `lock_timeout` is over.
"""

from __future__ import annotations

import enum
import io
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg.errors import LockNotAvailable
from sqlalchemy.exc import DBAPIError

from pgqueue.catalog import catalog_listing, differences
from pgqueue.config import validate_schema, validate_seconds
from pgqueue.errors import ConfigurationError, SchemaError
from pgqueue.migrate_connection import TableLocked, describe, transaction, translated_errors
from pgqueue.tables import VERSION_TABLE
from pgqueue.version import __version__

if TYPE_CHECKING:
    from sqlalchemy import Connection

DDL_PATIENCE = 2.0
PAUSE = 0.5
BASE = "base"

_alembic_is_not_thread_safe = threading.Lock()


class SchemaState(enum.StrEnum):
    """How a schema relates to this version of pgqueue."""

    CURRENT = "current"
    MISSING = "missing"
    BEHIND = "behind"
    AHEAD = "ahead"
    DRIFTED = "drifted"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationResult:
    """The revision before and after a run; None is an empty schema."""

    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What `check` found; `sentence` says what, where, and what to do about it."""

    state: SchemaState
    sentence: str


def upgrade(
    dsn: str, *, schema: str = "pgqueue", revision: str = "head", lock_timeout: float = 60.0
) -> MigrationResult:
    """Bring `schema` up to `revision`, creating it when it is missing; never down. Many processes may do so at once.

    `lock_timeout` seconds bound the wait for another migration and for locks on our tables. Raises DatabaseUnavailable
    when no server answers or it accepts no writes, SchemaError when rights are lacking, a wait was too long or the
    schema is newer than this package, ConfigurationError for an unknown revision or an unusable schema name. Nothing is
    changed then.
    """
    return _migrate(dsn, schema, revision, lock_timeout, may_go_down=False)


def to(dsn: str, revision: str, *, schema: str = "pgqueue", lock_timeout: float = 60.0) -> MigrationResult:
    """Bring `schema` to exactly `revision`, up or down; "base" removes everything, with all jobs. Raises as `upgrade`.

    At "base" the schema itself goes too when it is empty, belongs to this role and this role could make it again.
    """
    return _migrate(dsn, schema, revision, lock_timeout, may_go_down=True)


def script(schema: str = "pgqueue", revision: str = "head") -> str:
    """The SQL that takes a database without `schema` to `revision`, in one transaction; no connection is made.

    For those who may not migrate from Python: ``psql -v ON_ERROR_STOP=1 -f``. ConfigurationError as in `upgrade`.
    """
    if _place(revision, _known()) == 0:
        return ""
    text = io.StringIO()
    config = _config(schema, output=text)
    config.attributes["prologue"] = (lock_statement(schema), _create_schema_statement(schema))
    with _alembic_is_not_thread_safe:
        command.upgrade(config, revision, sql=True)
    return text.getvalue()


def heads() -> tuple[str, ...]:
    """The newest revision this package knows; one, unless somebody forked the history."""
    return tuple(_scripts().get_heads())


def current(dsn: str, *, schema: str = "pgqueue") -> str | None:
    """The revision of `schema`, None when it holds no queue. DatabaseUnavailable, or SchemaError without the rights."""
    validate_schema(schema)
    with translated_errors(dsn, schema), transaction(dsn, read_only=True) as connection:
        return _read_version(connection, schema)


def check(dsn: str, schema: str = "pgqueue") -> CheckResult:
    """Compare `schema` with what this package needs; changes nothing. Raises as `current` does.

    Drift is looked for only at the newest revision, against the listing that is shipped beside the migrations.
    """
    validate_schema(schema)
    with translated_errors(dsn, schema), transaction(dsn, read_only=True) as connection:
        found = _read_version(connection, schema)
        listing = catalog_listing(connection, schema)
    where, known, head = f"schema {schema!r} in {describe(dsn)}", _known(), ", ".join(heads())
    if found is None:
        return CheckResult(state=SchemaState.MISSING, sentence=f"{where} holds no queue yet: run `pgqueue migrate`.")
    if found not in known:
        return CheckResult(state=SchemaState.AHEAD, sentence=_ahead(where, found))
    if found != known[-1]:
        sentence = f"{where} is at revision {found}, this pgqueue needs {head}: run `pgqueue migrate`."
        return CheckResult(state=SchemaState.BEHIND, sentence=sentence)
    drift = differences((migrations_path() / "schema.txt").read_text(encoding="utf-8"), listing)
    if drift:
        named = "; ".join(drift[:3]) + (f"; and {len(drift) - 3} more" if len(drift) > 3 else "")
        sentence = (
            f"{where} was changed by hand since revision {found}: {named}. Put it back as migrations/schema.txt has it."
        )
        return CheckResult(state=SchemaState.DRIFTED, sentence=sentence)
    return CheckResult(state=SchemaState.CURRENT, sentence=f"{where} is up to date (revision {found}).")


def migrations_path() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "migrations"
    return installed if (installed / "env.py").exists() else package.parent / "migrations"


def _migrate(dsn: str, schema: str, revision: str, lock_timeout: float, *, may_go_down: bool) -> MigrationResult:
    validate_schema(schema)
    target = _place(revision, _known())
    deadline = time.monotonic() + validate_seconds("lock_timeout", lock_timeout)
    while True:
        try:
            with translated_errors(dsn, schema), transaction(dsn) as connection:
                _take_turn(connection, dsn, schema, deadline - time.monotonic())
                return _run(connection, dsn, schema, target, may_go_down=may_go_down)
        except TableLocked as error:
            if time.monotonic() + PAUSE >= deadline:
                where = f"schema {schema!r} in {describe(dsn)}"
                blocked = f"other sessions held locks on its tables for {lock_timeout:g} s"
                advice = "End the sessions that pg_locks shows, and run it again."
                raise SchemaError(f"{where}: {blocked}; nothing was changed. {advice}") from error
            time.sleep(PAUSE)


def _take_turn(connection: Connection, dsn: str, schema: str, patience: float) -> None:
    """Wait until no other migration of this schema runs; the lock ends with the transaction, whatever happens."""
    _set_lock_timeout(connection, patience)
    # A role's statement_timeout is meant for its queries; it would end this wait, or the build of an index, halfway.
    connection.exec_driver_sql("SELECT set_config('statement_timeout', '0', true)")
    try:
        connection.exec_driver_sql(lock_statement(schema))
    except DBAPIError as error:
        if isinstance(error.orig, LockNotAvailable):
            message = f"another migration of schema {schema!r} in {describe(dsn)} is still running"
            raise SchemaError(
                f"{message} after {max(patience, 0):.0f} s; nothing was changed. Run it again later."
            ) from error
        raise
    _set_lock_timeout(connection, min(DDL_PATIENCE, patience))


def _run(connection: Connection, dsn: str, schema: str, target: int, *, may_go_down: bool) -> MigrationResult:
    known = _known()
    before = _read_version(connection, schema)
    if before is not None and before not in known:
        raise SchemaError(_ahead(f"schema {schema!r} in {describe(dsn)}", before))
    place = known.index(before) + 1 if before else 0
    if target == place or (target < place and not may_go_down):
        return MigrationResult(before=before, after=before)
    config = _config(schema)
    config.attributes["connection"] = connection
    if target > place:
        connection.exec_driver_sql(_create_schema_statement(schema))
    with _alembic_is_not_thread_safe:
        if target > place:
            command.upgrade(config, known[target - 1])
        else:
            command.downgrade(config, known[target - 1] if target else BASE)
    if target == 0:
        connection.exec_driver_sql(f'DROP TABLE "{schema}".{VERSION_TABLE}')
        connection.exec_driver_sql(_drop_schema_statement(schema))
    return MigrationResult(before=before, after=known[target - 1] if target else None)


def _read_version(connection: Connection, schema: str) -> str | None:
    found = (
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"
    )
    if connection.exec_driver_sql(found, (schema, VERSION_TABLE)).first() is None:
        return None
    rows = connection.exec_driver_sql(f'SELECT version_num FROM "{schema}".{VERSION_TABLE}').scalars().all()  # noqa: S608 - a validated name
    if len(rows) > 1:
        raise SchemaError(
            f"{schema}.{VERSION_TABLE} holds {len(rows)} revisions instead of one: {', '.join(sorted(rows))}"
        )
    return str(rows[0]) if rows else None


def _known() -> list[str]:
    """Every revision of this package, oldest first."""
    return [entry.revision for entry in _scripts().walk_revisions()][::-1]


def _place(revision: str, known: list[str]) -> int:
    """How many revisions are applied at `revision`."""
    if revision in (BASE, "head"):
        return 0 if revision == BASE else len(known)
    if revision not in known:
        raise ConfigurationError(f"there is no revision {revision!r}; known are {BASE}, {', '.join(known)} and head")
    return known.index(revision) + 1


def _ahead(where: str, found: str) -> str:
    newest = f"pgqueue {__version__}, which knows {', '.join(heads())}"
    return f"{where} is at revision {found}, newer than this {newest}: upgrade the package."


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(migrations_path()))


def _config(schema: str, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = validate_schema(schema)
    return config


def _set_lock_timeout(connection: Connection, seconds: float) -> None:
    milliseconds = max(1, int(seconds * 1000))  # 0 would mean for ever
    connection.exec_driver_sql("SELECT set_config('lock_timeout', %s, true)", (f"{milliseconds}ms",))


def lock_statement(schema: str) -> str:
    """Waits until no other migration of `schema` runs; the lock ends with the transaction."""
    return f"SELECT pg_advisory_xact_lock(hashtextextended('pgqueue migrate {schema}', 0))"


def _create_schema_statement(schema: str) -> str:
    """CREATE SCHEMA, unless it is there: IF NOT EXISTS would ask for CREATE on the database even then."""
    missing = f"NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{schema}')"
    return f'DO $do$ BEGIN IF {missing} THEN CREATE SCHEMA "{schema}"; END IF; END $do$'


def _drop_schema_statement(schema: str) -> str:
    """DROP SCHEMA where the next run could make it again and nothing else is in it."""
    ours = (
        f"SELECT FROM pg_namespace WHERE nspname = '{schema}' AND nspname <> 'public'"
        " AND pg_has_role(nspowner, 'USAGE') AND has_database_privilege(current_database(), 'CREATE')"
    )
    keep = "EXCEPTION WHEN dependent_objects_still_exist THEN NULL;"
    return f'DO $do$ BEGIN IF EXISTS ({ours}) THEN DROP SCHEMA "{schema}"; END IF; {keep} END $do$'

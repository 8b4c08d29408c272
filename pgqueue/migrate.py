"""Making, changing and checking the schema: Alembic behind five functions, one transaction and one lock.

A run holds a transaction-level advisory lock from its first statement and commits everything at once: of several
processes that start together one applies and the others find nothing to do; a run that is killed leaves nothing. Where a
revision has indexes to be built beside the work, a transaction ends before it, and the next one holds the lock while they
are built. No state of the session is used, so a pooler in transaction mode may stand in between. The host's own Alembic,
its `alembic_version` and its logging are never touched.

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

from pgqueue.catalog import catalog_listing, differences
from pgqueue.config import validate_schema, validate_seconds
from pgqueue.errors import ConfigurationError, SchemaError
from pgqueue.migrate_connection import TableLocked, describe, transaction, translated_errors
from pgqueue.migrate_indexes import Indexes, build_beside
from pgqueue.tables import VERSION_TABLE
from pgqueue.version import __version__, runs_on

if TYPE_CHECKING:
    from sqlalchemy import Connection

DDL_PATIENCE = 0.5
"""Below the second after which PostgreSQL looks for deadlocks: a migration gives way before a worker is made its victim."""
PAUSE = 1.0
TURN = 0.1
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
    """What `check` found; `sentence` says what, where, and what to do about it.

    `fits`: this version runs on it. Beside CURRENT, that is a schema AHEAD whose migration allows it.
    """

    state: SchemaState
    sentence: str
    fits: bool = False


def upgrade(
    dsn: str, *, schema: str = "pgqueue", revision: str = "head", lock_timeout: float = 60.0
) -> MigrationResult:
    """Bring `schema` up to `revision`, creating it when it is missing; never down. Many processes may do so at once.

    `lock_timeout` seconds bound the wait for another migration and for locks on our tables; an index that is built beside
    the work takes its time. A newer schema on which this version still runs is left as it is. Raises DatabaseUnavailable
    when no server answers or it accepts no writes, SchemaError when rights are lacking, a wait was too long or the
    schema is too new for this package, ConfigurationError for an unknown revision or an unusable schema name. The schema
    is then at a revision, the first one or a later one, and the next run goes on from there.
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


def step(schema: str, before: str | None, after: str | None) -> str:
    """The SQL from one revision to another, up or down, None being no queue: for those who run it in a transaction of their
    own, under the lock. ConfigurationError as in `upgrade`."""
    text = io.StringIO()
    config = _config(schema, output=text)
    config.attributes["transaction"] = False
    config.attributes["prologue"] = () if before else (_create_schema_statement(schema),)
    places = [_place(revision or BASE, _known()) for revision in (before, after)]
    move = command.upgrade if places[0] < places[1] else command.downgrade
    with _alembic_is_not_thread_safe:
        move(config, f"{before or BASE}:{after or BASE}", sql=True)
    if after is None:
        text.write(f'DROP TABLE "{schema}".{VERSION_TABLE};\n\n{_drop_schema_statement(schema)};\n')
    return text.getvalue()


def revisions() -> list[str]:
    """Every revision of this package, oldest first."""
    return _known()


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
        note = None if found is None or found in _known() else _read_note(connection, schema)
        listing = catalog_listing(connection, schema)
    where, known, head = f"schema {schema!r} in {describe(dsn)}", _known(), ", ".join(heads())
    if found is None:
        return CheckResult(state=SchemaState.MISSING, sentence=f"{where} holds no queue yet: run `pgqueue migrate`.")
    if found not in known:
        if runs_on(found, note):
            sentence = (
                f"{where} is at revision {found}, newer than {_this()}, which still runs on it: upgrade the package."
            )
            return CheckResult(state=SchemaState.AHEAD, sentence=sentence, fits=True)
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
    sentence = f"{where} is up to date (revision {found})."
    return CheckResult(state=SchemaState.CURRENT, sentence=sentence, fits=True)


def migrations_path() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "migrations"
    return installed if (installed / "env.py").exists() else package.parent / "migrations"


def _migrate(dsn: str, schema: str, revision: str, lock_timeout: float, *, may_go_down: bool) -> MigrationResult:
    validate_schema(schema)
    target = _place(revision, _known())
    run = _Run(dsn, schema, target, may_go_down, validate_seconds("lock_timeout", lock_timeout))
    while True:
        try:
            with translated_errors(dsn, schema), transaction(dsn) as connection:
                take_turn(connection, dsn, schema, run.patience())
                _set_lock_timeout(connection, min(DDL_PATIENCE, run.patience()))
                done = run.go_on(connection)
        except TableLocked as error:
            if run.patience() <= PAUSE:
                where = f"schema {schema!r} in {describe(dsn)}"
                blocked = f"other sessions held locks on its tables for {lock_timeout:g} s"
                advice = "End the sessions that pg_locks shows, and run it again."
                raise SchemaError(f"{where}: {blocked}; {run.state()}. {advice}") from error
            time.sleep(PAUSE)
            continue
        run.went_on(done)
        if done.after == done.before or _place(done.after or BASE, _known()) == target:
            return MigrationResult(before=run.done[0].before, after=done.after)


def take_turn(connection: Connection, dsn: str, schema: str, patience: float) -> None:
    """Wait until no other migration of this schema runs, at most `patience` seconds; then SchemaError.

    The lock ends with the transaction, whatever happens.
    """
    connection.exec_driver_sql(_WITHOUT_LIMITS)
    end = time.monotonic() + patience
    # Asked again and again: whoever waits inside a statement holds a snapshot, and whoever has the lock may build an index
    # beside the work, which waits for old snapshots. Neither would ever go on.
    while not connection.exec_driver_sql(lock_statement(schema, wait=False)).scalar_one():
        if time.monotonic() >= end:
            message = f"another migration of schema {schema!r} in {describe(dsn)} is still running"
            raise SchemaError(f"{message} after {max(patience, 0):.0f} s; nothing was changed. Run it again later.")
        time.sleep(TURN)


class _Run:
    """One call of `upgrade` or `to`: in one transaction, or in one up to each revision whose indexes are built before it."""

    def __init__(self, dsn: str, schema: str, target: int, may_go_down: bool, lock_timeout: float) -> None:
        self.dsn = dsn
        self.schema = schema
        self.target = target
        self.may_go_down = may_go_down
        self.lock_timeout = lock_timeout
        self.done: list[MigrationResult] = []
        self._begin_patience()

    def patience(self) -> float:
        """Seconds for which others may still be waited for."""
        return max(0.0, self._deadline - time.monotonic())

    def went_on(self, done: MigrationResult) -> None:
        """One transaction is committed."""
        self.done.append(done)
        self._begin_patience()

    def go_on(self, connection: Connection) -> MigrationResult:
        """As far as one transaction goes; nothing more is to be done when `after` is `before`."""
        known = _known()
        before = _read_version(connection, self.schema)
        if before is not None and before not in known:
            if not self.may_go_down and runs_on(before, _read_note(connection, self.schema)):
                return MigrationResult(before=before, after=before)
            raise SchemaError(_ahead(f"schema {self.schema!r} in {describe(self.dsn)}", before))
        place = known.index(before) + 1 if before else 0
        if self.target == place or (self.target < place and not self.may_go_down):
            return MigrationResult(before=before, after=before)
        end = self._end(known, place)
        if 0 < place < end:
            # No snapshot is held meanwhile: READ COMMITTED, and no statement runs.
            self._build(indexes_of(known[place]))
        _apply(connection, self.schema, known[end - 1] if end else BASE, up=end > place)
        return MigrationResult(before=before, after=known[end - 1] if end else None)

    def _build(self, indexes: Indexes) -> None:
        if build_beside(self.dsn, self.schema, indexes, self.patience()):
            self._begin_patience()

    def _begin_patience(self) -> None:
        """What was done took its time, and was not waiting."""
        self._deadline = time.monotonic() + self.lock_timeout

    def _end(self, known: list[str], place: int) -> int:
        """How far this transaction goes. A new schema has nobody who could be kept waiting."""
        if place == 0:
            return self.target
        stops = [later for later in range(place + 1, self.target) if indexes_of(known[later])]
        return min(stops, default=self.target)

    def state(self) -> str:
        """What there is after a failure."""
        return f"it is at revision {self.done[-1].after} now" if self.done else "nothing was changed"


def _apply(connection: Connection, schema: str, revision: str, *, up: bool) -> None:
    config = _config(schema)
    config.attributes["connection"] = connection
    if up:
        connection.exec_driver_sql(_create_schema_statement(schema))
    with _alembic_is_not_thread_safe:
        (command.upgrade if up else command.downgrade)(config, revision)
    if revision == BASE:
        connection.exec_driver_sql(f'DROP TABLE "{schema}".{VERSION_TABLE}')
        connection.exec_driver_sql(_drop_schema_statement(schema))


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


def _read_note(connection: Connection, schema: str) -> str | None:
    """What the last migration has said about older workers."""
    note = f"SELECT obj_description(to_regclass('\"{schema}\".{VERSION_TABLE}'), 'pg_class')"
    said: str | None = connection.exec_driver_sql(note).scalar_one()
    return said


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


def indexes_of(revision: str) -> Indexes:
    """What is built beside the work before this revision."""
    script = _scripts().get_revision(revision)
    found: Indexes = getattr(script.module, "INDEXES", {}) if script else {}
    return found


def _ahead(where: str, found: str) -> str:
    return f"{where} is at revision {found}, newer than {_this()}: upgrade the package."


def _this() -> str:
    return f"this pgqueue {__version__}, which knows {', '.join(heads())}"


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(migrations_path()))


def _config(schema: str, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(migrations_path()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["schema"] = validate_schema(schema)
    return config


# A role's timeouts are meant for its queries; they would end a wait, or the build of an index, halfway.
_WITHOUT_LIMITS = """
    SELECT set_config(name, '0', true) FROM pg_settings
    WHERE name IN ('statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')
"""


def _set_lock_timeout(connection: Connection, seconds: float) -> None:
    milliseconds = max(1, int(seconds * 1000))  # 0 would mean for ever
    connection.exec_driver_sql("SELECT set_config('lock_timeout', %s, true)", (f"{milliseconds}ms",))


def lock_statement(schema: str, *, wait: bool = True) -> str:
    """Waits until no other migration of `schema` runs, or says whether none does; the lock ends with the transaction."""
    function = "pg_advisory_xact_lock" if wait else "pg_try_advisory_xact_lock"
    return f"SELECT {function}(hashtextextended('pgqueue migrate {schema}', 0))"


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

"""A clock that the tests move, and the queue's schema in a throw-away database obeys.

The statements ask for `clock_timestamp()`, and run as they are. In the throw-away database a function of that name stands
in the search path before the built-in one, for every session of it, those of worker processes too; what was bound to the
built-in one when the schema was made (defaults, and functions with a path of their own) is bound anew. The time lies in two
sequences, which no transaction hides and no rollback undoes.

Left on the real clock: the tokens of leases, which only have to grow.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg
from psycopg import sql

from pgqueue.config import validate_schema
from pgqueue.errors import ConfigurationError, PgQueueError

SCHEMA = "pgqueue_testing"
NO_CLOCK = (
    "this session does not obey the clock: it was opened before the clock was installed, or has a search_path of its own; "
    "ask for the fixture pgqueue_clock first, and leave the search_path alone"
)
PATH: Final = '"$user", public, pgqueue_testing, pg_catalog'
NOWHERE = (
    "this database has no clock of its own: name the fixture pgqueue_clock among the parameters of the test, or call "
    "install_clock"
)
NOT_INSTALLED = (
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedFunction,
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TICK = timedelta(microseconds=1)
_MAKE: Final = """
CREATE SCHEMA IF NOT EXISTS pgqueue_testing;
CREATE SEQUENCE IF NOT EXISTS pgqueue_testing.frozen MINVALUE -9000000000000000000;
CREATE SEQUENCE IF NOT EXISTS pgqueue_testing.shift MINVALUE -9000000000000000000;
SELECT setval('pgqueue_testing.frozen', 0, false), setval('pgqueue_testing.shift', 0);
CREATE OR REPLACE FUNCTION pgqueue_testing.clock_timestamp() RETURNS timestamptz
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    SELECT CASE WHEN f.is_called THEN 'epoch'::timestamptz + f.last_value * interval '1 microsecond'
                ELSE pg_catalog.clock_timestamp() + s.last_value * interval '1 microsecond' END
    FROM pgqueue_testing.frozen AS f, pgqueue_testing.shift AS s
$body$;
GRANT USAGE ON SCHEMA pgqueue_testing TO PUBLIC;
"""
_DEFAULTS: Final = """
SELECT c.relname, a.attname, pg_get_expr(d.adbin, d.adrelid)
FROM pg_attrdef AS d
JOIN pg_class AS c ON c.oid = d.adrelid
JOIN pg_attribute AS a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
WHERE c.relnamespace = %s::regnamespace AND pg_get_expr(d.adbin, d.adrelid) LIKE '%%clock_timestamp()%%'
  AND pg_get_expr(d.adbin, d.adrelid) NOT LIKE '%%nextval%%'
"""
_FUNCTIONS: Final = """
SELECT p.oid::regprocedure::text, setting
FROM pg_proc AS p, unnest(p.proconfig) AS setting
WHERE p.pronamespace = %s::regnamespace AND setting LIKE 'search_path=%%' AND setting NOT LIKE '%%pgqueue_testing%%'
"""
_STATES = {
    "frozen": "SELECT last_value, is_called FROM pgqueue_testing.frozen",
    "shift": "SELECT last_value, is_called FROM pgqueue_testing.shift",
}
_NOW = "SELECT pgqueue_testing.clock_timestamp()"
_OBEYS = "SELECT to_regprocedure('clock_timestamp()') = to_regprocedure('pgqueue_testing.clock_timestamp()')"


def install_clock(url: str, *, schema: str = "pgqueue") -> Clock:
    """Make the queue in `schema` of the throw-away database at `url` obey a clock; the role must own both.

    Sessions that are open obey from their next connection on. Never in a database that is to be kept: nothing takes this
    back. `pgqueue migrate --check` then reports the changed defaults.
    """
    validate_schema(schema)
    with psycopg.connect(url) as connection:
        database = connection.info.dbname
        connection.execute(_MAKE)
        # pg_catalog is named, so that it comes last: of two functions that fit equally the first in the path is taken.
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET search_path = {}").format(sql.Identifier(database), sql.SQL(PATH))
        )
        _bind(connection, schema)
    return Clock(url)


def _bind(connection: psycopg.Connection[Any], schema: str) -> None:
    """Bind what is bound to the built-in function to ours."""
    defaults = connection.execute(_DEFAULTS, [schema]).fetchall()  # as they read while the built-in one is found
    for function, _ in connection.execute(_FUNCTIONS, [schema]).fetchall():
        connection.execute(f"ALTER FUNCTION {function} SET search_path = pgqueue_testing, pg_catalog, pg_temp".encode())
    connection.execute("SET LOCAL search_path = pgqueue_testing, pg_catalog")
    for table, column, default in defaults:
        where = sql.SQL("ALTER TABLE {}.{} ALTER COLUMN {} SET DEFAULT ").format(
            *map(sql.Identifier, (schema, table, column))
        )
        expression = default.replace("pg_catalog.clock_timestamp()", "clock_timestamp()")
        connection.execute(where + sql.SQL(expression))


class Clock:
    """The time that the queue in one throw-away database sees. It runs, until it is frozen.

    The clock of Python is another: what a test computes times with must be moved along, or be `now()` of this one.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.Connection[Any] | None = None

    def now(self) -> datetime:
        """The time as the queue sees it, in UTC."""
        now: datetime = self._ask(_NOW)
        return now.astimezone(UTC)

    def freeze(self, at: datetime | None = None) -> datetime:
        """Stop the clock `at` that moment, or now; the moment. ConfigurationError for a datetime without a time zone."""
        moment = self.now() if at is None else at
        if not isinstance(moment, datetime) or moment.utcoffset() is None:
            raise ConfigurationError(
                "the clock is set to a datetime with a time zone: a naive one means another time elsewhere"
            )
        self._ask("SELECT setval('pgqueue_testing.frozen', %s)", (moment - EPOCH) // TICK)
        return moment.astimezone(UTC)

    def move(
        self, by: timedelta | None = None, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> datetime:
        """Move the clock, frozen or not; the moment after it. Backwards with negative numbers: what was done stays done."""
        step = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds) + (by or timedelta())
        frozen, called = self._state("frozen")
        if called:
            self._ask("SELECT setval('pgqueue_testing.frozen', %s)", frozen + step // TICK)
        else:
            self._ask("SELECT setval('pgqueue_testing.shift', %s)", self._state("shift")[0] + step // TICK)
        return self.now()

    def thaw(self) -> None:
        """Let it run again, from the moment at which it stands."""
        frozen, called = self._state("frozen")
        if called:
            real = self._ask("SELECT pg_catalog.clock_timestamp()")
            self._ask("SELECT setval('pgqueue_testing.shift', %s)", frozen - (real - EPOCH) // TICK)
            self._ask("SELECT setval('pgqueue_testing.frozen', 0, false)")

    def reset(self) -> None:
        """Back to the real time."""
        self._ask("SELECT setval('pgqueue_testing.shift', 0)")
        self._ask("SELECT setval('pgqueue_testing.frozen', 0, false)")

    def check(self, connection: psycopg.Connection[Any]) -> None:
        """PgQueueError unless this session obeys the clock."""
        row = connection.execute(_OBEYS).fetchone()
        if row is None or not row[0]:
            raise PgQueueError(NO_CLOCK)

    def close(self) -> None:
        """Close the connection by which the clock is set; the next use opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _state(self, sequence: str) -> tuple[int, bool]:
        row = self._row(_STATES[sequence])
        return int(row[0]), bool(row[1])

    def _ask(self, statement: str, *params: Any) -> Any:
        return self._row(statement, *params)[0]

    def _row(self, statement: str, *params: Any) -> tuple[Any, ...]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self._url, autocommit=True)
        try:
            row: tuple[Any, ...] | None = self._connection.execute(statement.encode(), params or None).fetchone()
        except NOT_INSTALLED as error:
            raise PgQueueError(NOWHERE) from error
        if row is None:
            raise PgQueueError(NOWHERE)
        return row

"""The checks of `pgqueue doctor`, in order: a check that fails may make those after it pointless."""

from __future__ import annotations

import dataclasses
import enum
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from psycopg import sql

from pgqueue.cli import check_queries as queries
from pgqueue.cli.errors import sentence
from pgqueue.cli.host import as_typed
from pgqueue.client import PgQueue
from pgqueue.config import Settings
from pgqueue.drivers.pool import choose_preparing, connect_options, describe, unavailable
from pgqueue.errors import PgQueueError

OLDEST_SERVER = 140000
OLD_TRANSACTION, CLOCK_DIFFERENCE = 300.0, 2.0
DEAF_AFTER = 2.0
MANY_DEAD_ROWS = 50_000
FEW_CONNECTIONS = 15


class Level(enum.StrEnum):
    """FAIL: does not work. WARN: works, but somebody should look."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report."""

    check: str
    level: Level = Level.OK
    found: str
    advice: str = ""


Connection = psycopg.Connection[Any]


def examine(settings: Settings) -> Iterator[Finding]:
    """All findings; ends early where nothing more can be asked."""
    try:
        with unavailable(settings):
            connection = psycopg.connect(str(settings.database_url), **connect_options(settings))
    except PgQueueError as error:
        advice = "check the URL, that the server runs, and that it lets this role in"
        yield Finding(check="connection", level=Level.FAIL, found=sentence(error), advice=advice)
        return
    with connection:
        yield from _server(connection, settings)
        schema = _schema(settings)
        yield schema
        pooled = choose_preparing(connection, settings)
        yield _pooler(settings, pooled)
        yield _notifications(connection, settings, pooled)
        yield _old_transactions(connection)
        yield _clock(connection)
        if schema.level is not Level.FAIL:
            for check in (_rights, _row_security, _dead_rows, _expired_leases):
                yield _guarded(check, connection, settings)
            yield from _workers(settings)


def _guarded(check: Callable[[Connection, str], Finding], connection: Connection, settings: Settings) -> Finding:
    try:
        return check(connection, settings.schema)
    except psycopg.Error as error:
        name = check.__name__.strip("_").replace("_", " ")
        return Finding(
            check=name, level=Level.FAIL, found=sentence(error), advice="grant this role the rights it lacks"
        )


def _ask(connection: Connection, query: sql.SQL | sql.Composed, *params: Any) -> list[tuple[Any, ...]]:
    return connection.execute(query, params or None).fetchall()


def _server(connection: Connection, settings: Settings) -> Iterator[Finding]:
    (version, number, standby, read_only, most, used) = _ask(connection, queries.SERVER)[0]
    where = describe(settings.database_url)
    if int(number) < OLDEST_SERVER:
        advice = "upgrade the server to PostgreSQL 14 or newer"
        yield Finding(check="server", level=Level.FAIL, found=f"PostgreSQL {version}, {where}", advice=advice)
    else:
        yield Finding(check="server", found=f"PostgreSQL {version}, {where}")
    if standby or read_only:
        found = "the server is a standby" if standby else "transactions are read-only by default"
        advice = (
            "connect to the primary" if standby else "reset default_transaction_read_only for this role and database"
        )
        yield Finding(check="writes", level=Level.FAIL, found=found, advice=advice)
    else:
        yield Finding(check="writes", found="the server accepts writes")
    scarce = int(most) - int(used) < FEW_CONNECTIONS
    yield Finding(
        check="connections",
        level=Level.WARN if scarce else Level.OK,
        found=f"{used} of {most} in use",
        advice=f"a worker needs about 7 and up to {settings.pool_size} for tasks that enqueue: raise max_connections"
        if scarce
        else "",
    )


def _schema(settings: Settings) -> Finding:
    from pgqueue import migrate

    try:
        result = migrate.check(str(settings.database_url), settings.schema)
    except PgQueueError as error:
        return Finding(check="schema", level=Level.FAIL, found=sentence(error))
    usable = result.fits or result.state is migrate.SchemaState.DRIFTED
    level = Level.OK if result.state is migrate.SchemaState.CURRENT else Level.WARN if usable else Level.FAIL
    return Finding(check="schema", level=level, found=as_typed(result.sentence))


def _rights(connection: Connection, schema: str) -> Finding:
    missing = [f"{right} on {kind} {name}" for kind, name, right in _ask(connection, queries.RIGHTS, schema)]
    if not missing:
        return Finding(check="rights", found="this role may do all that a worker does")
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return Finding(
        check="rights",
        level=Level.FAIL,
        found=f"this role lacks {', '.join(missing[:5])}{more}",
        advice=f"as the owner of schema {schema}, GRANT it to this role",
    )


def _row_security(connection: Connection, schema: str) -> Finding:
    hidden = [name for (name,) in _ask(connection, queries.ROW_SECURITY, schema)]
    if not hidden:
        return Finding(check="row security", found="no policy hides rows from this role")
    advice = "rows may be invisible without an error: exempt this role, or switch row security off on these tables"
    return Finding(check="row security", level=Level.WARN, found=f"active on {', '.join(hidden)}", advice=advice)


def _pooler(settings: Settings, pooled: bool) -> Finding:
    if not pooled:
        return Finding(check="pooler", found="none between this process and the server")
    if settings.prepare:
        advice = "right for PgBouncer 1.21 or newer with max_prepared_statements: otherwise set PGQUEUE_PREPARE=off"
        return Finding(check="pooler", level=Level.WARN, found="statements are prepared through it", advice=advice)
    return Finding(check="pooler", found="there is one, so statements are not prepared")


def _notifications(connection: Connection, settings: Settings, pooled: bool) -> Finding:
    if not settings.notify:
        return Finding(check="notifications", found="switched off: workers look every poll interval")
    if pooled and not settings.listen_url:
        found = "workers do not listen through a pooler: they look every poll interval"
        advice = "set PGQUEUE_LISTEN_URL to the server itself, or to a pooler in session mode"
        return Finding(check="notifications", level=Level.WARN, found=found, advice=advice)
    word = f"doctor {uuid.uuid4().hex}"
    try:
        url = settings.listen_url or str(settings.database_url)
        with psycopg.connect(url, **connect_options(settings, url)) as ears:
            ears.execute(sql.SQL("LISTEN {}").format(sql.Identifier(settings.schema)))
            sent = time.monotonic()
            connection.execute("SELECT pg_notify(%s, %s)", (settings.schema, word))
            while (left := sent + DEAF_AFTER - time.monotonic()) > 0:
                if any(heard.payload == word for heard in ears.notifies(timeout=left, stop_after=1)):
                    took = (time.monotonic() - sent) * 1000
                    return Finding(check="notifications", found=f"a NOTIFY arrived after {took:.0f} ms")
    except psycopg.Error as error:
        advice = "check listen_url: workers cannot listen, and look every poll interval only"
        return Finding(check="notifications", level=Level.WARN, found=sentence(error), advice=advice)
    return Finding(
        check="notifications",
        level=Level.WARN,
        found=f"a NOTIFY was not heard within {DEAF_AFTER:g} s",
        advice="behind PgBouncer in transaction mode LISTEN is deaf: set PGQUEUE_LISTEN_URL to the server itself",
    )


def _old_transactions(connection: Connection) -> Finding:
    row = _ask(connection, queries.OLD_TRANSACTIONS)[0]
    kind, age = row if row[1] is not None else ("transaction", 0.0)
    if age < OLD_TRANSACTION:
        return Finding(check="old transactions", found=f"the oldest is {age:.0f} s old")
    advice = "dead rows cannot be vacuumed while it is open: find it in pg_stat_activity, pg_prepared_xacts and end it"
    return Finding(check="old transactions", level=Level.WARN, found=f"a {kind} is {age:.0f} s old", advice=advice)


def _clock(connection: Connection) -> Finding:
    before = time.time()
    server = float(_ask(connection, queries.CLOCK)[0][0])
    ahead = (before + time.time()) / 2 - server
    if abs(ahead) < CLOCK_DIFFERENCE:
        return Finding(check="clock", found=f"this machine and the server differ by {abs(ahead):.2f} s")
    direction = "ahead of" if ahead > 0 else "behind"
    advice = "leases follow the server, but run_at is computed here: synchronise the clocks"
    found = f"this machine is {abs(ahead):.1f} s {direction} the server"
    return Finding(check="clock", level=Level.WARN, found=found, advice=advice)


def _dead_rows(connection: Connection, schema: str) -> Finding:
    rows = {name: (int(dead), int(live)) for name, dead, live in _ask(connection, queries.DEAD_ROWS, schema)}
    bad = [name for name, (dead, live) in rows.items() if dead > MANY_DEAD_ROWS and dead > live]
    found = ", ".join(f"{name} {dead} dead of {dead + live}" for name, (dead, live) in sorted(rows.items()))
    if not bad:
        return Finding(check="dead rows", found=found or "none")
    advice = "look for old transactions, and let autovacuum work on these tables"
    return Finding(check="dead rows", level=Level.WARN, found=found, advice=advice)


def _expired_leases(connection: Connection, schema: str) -> Finding:
    rows = _ask(connection, queries.EXPIRED_LEASES.format(schema=sql.Identifier(schema)))
    if not rows:
        return Finding(check="expired leases", found="none")
    found = ", ".join(f"queue {queue}: {count}" for queue, count in rows)
    advice = "no worker serves these queues, so nobody takes their jobs back: start one"
    return Finding(check="expired leases", level=Level.WARN, found=found, advice=advice)


def _workers(settings: Settings) -> Iterator[Finding]:
    try:
        with PgQueue(**dataclasses.asdict(settings)) as pq:
            workers, queues = pq.workers(), pq.status()
    except (PgQueueError, psycopg.Error) as error:
        yield Finding(check="workers", level=Level.FAIL, found=sentence(error))
        return
    silent = [worker for worker in workers if worker.silent > worker.lease_seconds]
    found = f"{len(workers) - len(silent)} alive, {len(silent)} silent for longer than their lease"
    advice = "silent: " + ", ".join(f"{worker.name} on {worker.hostname}" for worker in silent[:5]) if silent else ""
    yield Finding(check="workers", level=Level.WARN if silent else Level.OK, found=found, advice=advice)
    served = {name for worker in workers if worker not in silent for name in worker.queues}
    idle = [row.queue for row in queues if row.ready and row.paused_at is None and row.queue not in served]
    if idle:
        advice = "start a worker for them, or check its --queues"
        yield Finding(
            check="queues", level=Level.WARN, found=f"ready jobs, no worker: {', '.join(idle)}", advice=advice
        )
    else:
        yield Finding(check="queues", found="every queue with ready jobs is served or paused")

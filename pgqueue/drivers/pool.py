"""The queue's own connections: opened at first use, one set per process."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pgqueue.config import Settings
from pgqueue.drivers.address import unreadable
from pgqueue.drivers.execute import AsyncConnection, SyncConnection, first_line
from pgqueue.errors import ConfigurationError, DatabaseUnavailable

APPLICATION = "pgqueue"
PREPARE_AFTER = 5
"""A statement is prepared once it has run that many times on a connection."""
WAITED = "none became free or could be opened in {:g} s"
PROACTOR = (
    "asynchronous connections do not work in the ProactorEventLoop, which asyncio takes on Windows by itself: "
    "use asyncio.Runner(loop_factory=asyncio.SelectorEventLoop)"
)
OTHER_LOOP = (
    "this AsyncPgQueue is in use in another event loop, which still runs: an event loop has its own AsyncPgQueue, or closes "
    "the one that it shares before the next begins (await pq.close())"
)
TRY_AGAIN = 0.5
"""Seconds between attempts to connect while somebody waits. The pool's own pause doubles up to minutes, and the first to ask
after a failover would wait for its end."""


def database_url(settings: Settings) -> str:
    """The configured URL; ConfigurationError says how to configure one."""
    if not settings.database_url:
        raise ConfigurationError("no database is configured: pass a URL to PgQueue(…) or set PGQUEUE_DATABASE_URL")
    return settings.database_url


def connect_options(settings: Settings, url: str | None = None) -> dict[str, Any]:
    """How a connection of our own to `url` (the configured one by default) is opened: autocommit, and no session state that
    a pooler would leak. What the URL says itself is left to it.

    Not prepared as long as nobody knows whether a pooler is in between: see `choose_preparing`.
    """
    given = _parameters(url or settings.database_url)
    name = {} if "fallback_application_name" in given else {"fallback_application_name": APPLICATION}
    ours: dict[str, Any] = {
        **name,
        **liveness(url or settings.database_url),
        **primary_only(url or settings.database_url),
    }
    prepared = PREPARE_AFTER if settings.prepare else None
    seconds = str(given.get("connect_timeout", ""))
    timeout = int(seconds) if seconds.isdecimal() and int(seconds) else int(settings.connect_timeout)
    return {"autocommit": True, "prepare_threshold": prepared, "connect_timeout": max(2, timeout), **ours}


def liveness(url: str | None) -> dict[str, int]:
    """The options by which a connection notices, in half a minute, that the machine at its other end is gone without a word.
    What the URL says itself is left to it."""
    given = _parameters(url)
    ours = {
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        # Keepalives are not sent while data waits for its acknowledgement: without this, a statement that was on its way to
        # a machine that lost power waits for a quarter of an hour.
        "tcp_user_timeout": 30_000,
    }
    return {name: value for name, value in ours.items() if name not in given}


def primary_only(url: str | None) -> dict[str, str]:
    """The option that makes a URL of several hosts lead to the one that accepts writes, unless the URL has a wish itself."""
    given = _parameters(url)
    if hosts(url) < 2 or "target_session_attrs" in given or "PGTARGETSESSIONATTRS" in os.environ:
        return {}
    return {"target_session_attrs": "read-write"}


def hosts(url: str | None) -> int:
    """How many hosts a URL names; each of them may take `connect_timeout`."""
    given = _parameters(url)
    named = given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or ""
    return str(named).count(",") + 1


def _parameters(url: str | None) -> dict[str, Any]:
    try:
        return psycopg.conninfo.conninfo_to_dict(url or "")
    except psycopg.ProgrammingError:
        return {}  # connecting says it


_SESSION = "SELECT pg_backend_pid()"


def choose_preparing(connection: SyncConnection, settings: Settings) -> bool:
    """True if a pooler stands between; where none does, statements are prepared from now on, unless `prepare` is set.

    A pooler makes up the number of the session that it announces. In transaction mode a name that was prepared may stand,
    in the next transaction's session, for another client's statement: it would be run in place of ours.
    """
    row = connection.execute(_SESSION, prepare=False).fetchone()
    return _chosen(connection, settings, row)


async def choose_preparing_async(connection: AsyncConnection, settings: Settings) -> bool:
    """The same on an async connection."""
    row = await (await connection.execute(_SESSION, prepare=False)).fetchone()
    return _chosen(connection, settings, row)


def _chosen(connection: SyncConnection | AsyncConnection, settings: Settings, row: tuple[Any, ...] | None) -> bool:
    pooled = row is None or row[0] != connection.info.backend_pid
    if settings.prepare is None and not pooled:
        connection.prepare_threshold = PREPARE_AFTER
    return pooled


class unavailable:  # noqa: N801 - used as a function is
    """Turn "no server" into DatabaseUnavailable, with the address and without the password."""

    __slots__ = ("settings",)

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PoolTimeout):
            where = describe(self.settings.database_url)
            raise DatabaseUnavailable(f"no connection to {where} within its time: {error}") from error
        if isinstance(error, psycopg.OperationalError):
            where = describe(self.settings.database_url)
            raise DatabaseUnavailable(f"cannot connect to {where}: {first_line(error)}") from error
        if isinstance(error, psycopg.ProgrammingError):
            # libpq repeats pieces of what it cannot read, and one of them may be the password.
            raise ConfigurationError(unreadable(self.settings.database_url)) from error


def describe(url: str | None) -> str:
    """Host, port, database and user of a URL: all that may be shown of it."""
    try:
        parts = psycopg.conninfo.conninfo_to_dict(url or "")
    except psycopg.ProgrammingError:
        return "the configured database"
    shown = [f"{key}={parts[key]}" for key in ("host", "port", "dbname", "user") if parts.get(key)]
    return f"the database ({', '.join(shown)})" if shown else "the database"


def _looks_closed(connection: Any) -> bool:
    # Nothing is ever sent to an idle connection but its end: if the socket can be read, it was closed by the server.
    try:
        if not hasattr(select, "poll"):  # Windows, where `select` takes any descriptor
            return bool(select.select([connection.fileno()], [], [], 0)[0])
        poller = select.poll()
        poller.register(connection.fileno(), select.POLLIN | select.POLLHUP)
        return bool(poller.poll(0))
    except (psycopg.OperationalError, OSError, ValueError):
        return True


_pools: weakref.WeakSet[SyncPool] = weakref.WeakSet()


def _forget_pools() -> None:
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


class _Lent:
    """A connection of a pool, given back at the end of the block. A class, since every enqueue comes through here."""

    __slots__ = ("_connection", "_pool", "_settings")

    def __init__(self, pool: ConnectionPool[SyncConnection], settings: Settings) -> None:
        self._pool = pool
        self._settings = settings

    def __enter__(self) -> SyncConnection:
        with unavailable(self._settings):
            self._connection = _borrow(self._pool)
        return self._connection

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DatabaseUnavailable):
            self._connection.close()  # a server that accepts no writes is not asked again over the same connection
        self._pool.putconn(self._connection)


class SyncPool:
    """Connections for sync callers; safe over threads and forks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._pool: ConnectionPool[SyncConnection] | None = None
        self._pid = 0
        _pools.add(self)

    def forget(self) -> None:
        """In a forked child: the lock may be held by a thread that is not here, and the sockets are the parent's."""
        self._lock = threading.Lock()
        self._pool = None

    def connection(self) -> _Lent:
        """A connection in autocommit, for the time of a block; DatabaseUnavailable when none can be had."""
        return _Lent(self._opened(), self.settings)

    def _opened(self) -> ConnectionPool[SyncConnection]:
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                url = database_url(self.settings)
                with unavailable(self.settings):
                    psycopg.connect(url, **connect_options(self.settings)).close()
                self._pool = ConnectionPool(
                    url,
                    kwargs=connect_options(self.settings),
                    min_size=0,
                    max_size=self.settings.pool_size,
                    timeout=patience(self.settings),
                    reconnect_timeout=TRY_AGAIN,
                    configure=self._configure,
                    open=True,
                )
                self._pid = os.getpid()
            return self._pool

    def _configure(self, connection: SyncConnection) -> None:
        if self.settings.prepare is None:
            choose_preparing(connection, self.settings)

    def close(self) -> None:
        """Close every connection; the next use opens a new pool."""
        with self._lock:
            if self._pool is not None and self._pid == os.getpid():
                self._pool.close()
            self._pool = None


def patience(settings: Settings) -> float:
    """Seconds that a caller waits for a connection: every host but one may take its time without an answer."""
    before = hosts(settings.database_url) - 1
    return settings.connect_timeout + before * float(connect_options(settings)["connect_timeout"])


def _borrow(pool: ConnectionPool[SyncConnection]) -> SyncConnection:
    """A connection that is not known to be dead. After a restart of the server all that lie in the pool are: they are thrown
    out one after the other, where the pool itself would pause longer and longer between them."""
    end = time.monotonic() + pool.timeout
    while True:
        left = end - time.monotonic()
        try:
            connection = pool.getconn(max(0.01, min(left, TRY_AGAIN)))
        except PoolTimeout:
            if left <= TRY_AGAIN:
                raise PoolTimeout(WAITED.format(pool.timeout)) from None
            continue  # and make the pool try again, if it gave up meanwhile
        if not _looks_closed(connection) or _answers(connection):
            return connection
        connection.close()
        pool.putconn(connection)


def _answers(connection: SyncConnection) -> bool:
    try:
        ConnectionPool.check_connection(connection)
    except psycopg.Error:
        return False
    return True


def is_proactor(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this is the loop that asyncio takes on Windows by itself: psycopg cannot wait for its sockets there."""
    proactor = getattr(asyncio, "ProactorEventLoop", None)
    return proactor is not None and isinstance(loop, proactor)


class AsyncPool:
    """The same for async callers. It belongs to the event loop of its first use, and once that is closed to the next one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pool: AsyncConnectionPool[AsyncConnection] | None = None
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """A connection in autocommit; DatabaseUnavailable when none can be had."""
        pool = await self._opened()
        with unavailable(self.settings):
            connection = await _borrow_async(pool)
        try:
            yield connection
        except DatabaseUnavailable:
            await connection.close()
            raise
        finally:
            await pool.putconn(connection)

    async def _opened(self) -> AsyncConnectionPool[AsyncConnection]:
        if self._pool is None or not self._is_ours():
            url = database_url(self.settings)
            if is_proactor(asyncio.get_running_loop()):
                raise ConfigurationError(PROACTOR)
            with unavailable(self.settings):
                await (await psycopg.AsyncConnection.connect(url, **connect_options(self.settings))).close()
            if self._pool is not None and self._is_ours():
                return self._pool
            self._pool = AsyncConnectionPool(
                url,
                kwargs=connect_options(self.settings),
                min_size=0,
                max_size=self.settings.pool_size,
                timeout=patience(self.settings),
                reconnect_timeout=TRY_AGAIN,
                configure=self._configure,
                open=False,
            )
            self._pid, self._loop = os.getpid(), asyncio.get_running_loop()
            await self._pool.open()
        return self._pool

    def _is_ours(self) -> bool:
        """Whether the pool can be used: what a process before a fork or a loop that has ended left behind cannot."""
        loop = self._loop
        if self._pid != os.getpid() or loop is None or loop.is_closed():
            return False
        if loop is not asyncio.get_running_loop():
            raise ConfigurationError(OTHER_LOOP)
        return True

    async def _configure(self, connection: AsyncConnection) -> None:
        if self.settings.prepare is None:
            await choose_preparing_async(connection, self.settings)

    async def close(self) -> None:
        """Close every connection; the next use opens a new pool."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid() and self._loop is asyncio.get_running_loop():
            await pool.close()


async def _borrow_async(pool: AsyncConnectionPool[AsyncConnection]) -> AsyncConnection:
    """The same as `_borrow`."""
    end = time.monotonic() + pool.timeout
    while True:
        left = end - time.monotonic()
        try:
            connection = await pool.getconn(max(0.01, min(left, TRY_AGAIN)))
        except PoolTimeout:
            if left <= TRY_AGAIN:
                raise PoolTimeout(WAITED.format(pool.timeout)) from None
            continue
        if not _looks_closed(connection) or await _answers_async(connection):
            return connection
        await connection.close()
        await pool.putconn(connection)


async def _answers_async(connection: AsyncConnection) -> bool:
    try:
        await AsyncConnectionPool.check_connection(connection)
    except psycopg.Error:
        return False
    return True

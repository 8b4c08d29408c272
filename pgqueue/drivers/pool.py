"""The queue's own connections: opened at first use, one set per process."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pgqueue.config import Settings
from pgqueue.drivers.execute import AsyncConnection, SyncConnection, first_line
from pgqueue.errors import ConfigurationError, DatabaseUnavailable

APPLICATION = "pgqueue"
UNREADABLE = "the database URL cannot be read: it is neither a postgresql:// URL nor key=value pairs"


def database_url(settings: Settings) -> str:
    """The configured URL; ConfigurationError says how to configure one."""
    if not settings.database_url:
        raise ConfigurationError("no database is configured: pass a URL to PgQueue(…) or set PGQUEUE_DATABASE_URL")
    return settings.database_url


def connect_options(settings: Settings) -> dict[str, Any]:
    """How every connection of our own is opened: autocommit, and no session state that a pooler would leak."""
    return {
        "autocommit": True,
        "prepare_threshold": 5 if settings.prepare else None,
        "connect_timeout": max(2, int(settings.connect_timeout)),
        "fallback_application_name": APPLICATION,
        "keepalives_idle": 15,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }


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
            raise ConfigurationError(UNREADABLE) from error


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
            self._connection = self._pool.getconn()
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
                    timeout=self.settings.connect_timeout,
                    check=_check,
                    open=True,
                )
                self._pid = os.getpid()
            return self._pool

    def close(self) -> None:
        """Close every connection; the next use opens a new pool."""
        with self._lock:
            if self._pool is not None and self._pid == os.getpid():
                self._pool.close()
            self._pool = None


def _check(connection: SyncConnection) -> None:
    if _looks_closed(connection):
        ConnectionPool.check_connection(connection)


class AsyncPool:
    """The same for async callers; bound to the event loop of its first use."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._pool: AsyncConnectionPool[AsyncConnection] | None = None
        self._pid = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """A connection in autocommit; DatabaseUnavailable when none can be had."""
        pool = await self._opened()
        with unavailable(self.settings):
            connection = await pool.getconn()
        try:
            yield connection
        except DatabaseUnavailable:
            await connection.close()
            raise
        finally:
            await pool.putconn(connection)

    async def _opened(self) -> AsyncConnectionPool[AsyncConnection]:
        if self._pool is None or self._pid != os.getpid():
            url = database_url(self.settings)
            with unavailable(self.settings):
                await (await psycopg.AsyncConnection.connect(url, **connect_options(self.settings))).close()
            if self._pool is not None and self._pid == os.getpid():
                return self._pool
            self._pool = AsyncConnectionPool(
                url,
                kwargs=connect_options(self.settings),
                min_size=0,
                max_size=self.settings.pool_size,
                timeout=self.settings.connect_timeout,
                check=_check_async,
                open=False,
            )
            self._pid = os.getpid()
            await self._pool.open()
        return self._pool

    async def close(self) -> None:
        """Close every connection; the next use opens a new pool."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            await pool.close()


async def _check_async(connection: AsyncConnection) -> None:
    if _looks_closed(connection):
        await AsyncConnectionPool.check_connection(connection)

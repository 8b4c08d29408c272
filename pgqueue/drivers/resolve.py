"""From the connection that a caller owns to the psycopg connection beneath it.

Recognised by where their classes come from, so that neither SQLAlchemy nor Django is imported here. The raw connection is
taken, because Django's cursors and SQLAlchemy's text paths would bind every parameter as text.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import psycopg

from pgqueue.drivers.execute import AsyncConnection, Foreign, SyncConnection
from pgqueue.drivers.on_asyncpg import OnAsyncpg
from pgqueue.errors import UnsupportedConnection

ACCEPTED = (
    "a psycopg 3 connection or cursor, a SQLAlchemy Connection or Session (on the psycopg driver; async ones also on "
    "asyncpg), or a Django database connection"
)


def sync_connection(using: Any) -> SyncConnection:
    """The psycopg connection beneath `using`, inside its transaction; UnsupportedConnection says what would do."""
    if isinstance(using, psycopg.Cursor):
        using = using.connection
    if isinstance(using, psycopg.Connection):
        return using
    raw = _from_sqlalchemy(using) if _is_sqlalchemy(using) else _from_django(using)
    if isinstance(raw, psycopg.Connection):
        return raw
    if isinstance(using, psycopg.AsyncConnection) or _is_async_sqlalchemy(using):
        raise UnsupportedConnection(f"{_name(using)} is asynchronous: call this on an AsyncPgQueue and await it")
    raise UnsupportedConnection(_refusal(using, raw))


async def async_connection(using: Any) -> AsyncConnection | Foreign:
    """The same for async connections: psycopg's, SQLAlchemy's AsyncConnection and AsyncSession, also on asyncpg."""
    if isinstance(using, psycopg.AsyncCursor):
        using = using.connection
    if isinstance(using, psycopg.AsyncConnection):
        return using
    raw: Any = None
    if _is_async_sqlalchemy(using):
        _check_dialect(using, "asyncpg")
        target = await using.connection() if hasattr(using, "get_bind") else using
        if not target.in_transaction():
            await target.begin()
        if _closed_block(target.sync_connection):
            await target.exec_driver_sql("")
        fairy = await target.get_raw_connection()
        raw = fairy.driver_connection
        if target.dialect.driver == "asyncpg":
            return OnAsyncpg(target, fairy.dbapi_connection, raw)
    if isinstance(raw, psycopg.AsyncConnection):
        return raw
    raise _refused_async(using, raw)


def check_sync(using: Any) -> None:
    """Refuse what sync_connection refuses, as far as that can be told without connecting."""
    if _is_sqlalchemy(using):
        _check_dialect(using)
        return
    wrapper = _django_wrapper(using)
    if wrapper is None:
        sync_connection(using)  # psycopg's, or nothing that would do
    elif wrapper.Database is not psycopg:
        raise UnsupportedConnection(_refusal(using, wrapper.connection))


def check_async(using: Any) -> None:
    """The same for async_connection."""
    if isinstance(using, (psycopg.AsyncConnection, psycopg.AsyncCursor)):
        return
    if not _is_async_sqlalchemy(using):
        raise _refused_async(using, None)
    _check_dialect(using, "asyncpg")


def _from_sqlalchemy(using: Any) -> Any:
    _check_dialect(using)
    target = using.connection() if hasattr(using, "get_bind") else using
    # Only a transaction that SQLAlchemy knows of is committed by its commit().
    if not target.in_transaction():
        target.begin()
    _check_block(target)
    return target.connection.driver_connection


def _check_block(connection: Any) -> None:
    """Refuse, in SQLAlchemy's own words, a block whose savepoint was rolled back by hand, as its own statements would be."""
    if _closed_block(connection):
        connection.exec_driver_sql("")


def _closed_block(connection: Any) -> bool:
    manager = getattr(connection, "_trans_context_manager", None)
    return manager is not None and not manager._transaction_is_active()


def _check_dialect(target: Any, *others: str) -> None:
    """Refuse a driver that will not do before a transaction is begun on it."""
    dialect = _bind_of(target).dialect
    if dialect.is_async and _is_sqlalchemy(target):
        raise UnsupportedConnection(
            f"{_name(target)} is the inside of an async engine, as in run_sync(): enqueue outside of that, on an "
            "AsyncPgQueue with the AsyncSession or AsyncConnection, in the same transaction"
        )
    if dialect.driver not in ("psycopg", "psycopg_async", *others):
        raise UnsupportedConnection(
            f"using= got {_name(target)} on {dialect.name}+{dialect.driver}, and pgqueue needs the psycopg driver: "
            "make the engine with a URL that begins with postgresql+psycopg://"
        )


def _bind_of(target: Any) -> Any:
    if not hasattr(target, "get_bind"):
        return target
    try:
        return target.get_bind()
    except sys.modules["sqlalchemy.exc"].UnboundExecutionError:
        raise UnsupportedConnection(
            f"using= got a {type(target).__name__} that has several databases, or none: pass the connection of the one with "
            'the queue, such as session.connection(bind_arguments={"mapper": Photo})'
        ) from None


def _is_sqlalchemy(using: Any) -> bool:
    return _defined_in(using, "sqlalchemy", {"Connection", "Session", "scoped_session"})


def _is_factory(using: Any) -> bool:
    return _defined_in(using, "sqlalchemy", {"Engine", "AsyncEngine", "sessionmaker", "async_sessionmaker"})


def _is_async_sqlalchemy(using: Any) -> bool:
    return _defined_in(using, "sqlalchemy.ext.asyncio", {"AsyncConnection", "AsyncSession", "async_scoped_session"})


def _defined_in(using: Any, package: str, names: set[str]) -> bool:
    return any(
        cls.__name__ in names and (cls.__module__ == package or cls.__module__.startswith(f"{package}."))
        for cls in type(using).__mro__
    )


def _from_django(using: Any) -> Any:
    wrapper = _django_wrapper(using)
    if wrapper is None:
        return None
    # Opening a cursor is what makes Django look whether the connection is still usable (CONN_HEALTH_CHECKS).
    wrapper.cursor().close()
    return wrapper.connection


def note_failure(using: Any, error: BaseException) -> None:
    """Tell the owner of a connection that this error happened on it, which happened beneath its eyes.

    Django looks at it before the next request. SQLAlchemy discards one that is dead; otherwise the rollback of its caller
    would fail, and hide the error. It also discards one on which a statement was interrupted (a cancellation, Ctrl-C), as it
    does for its own: otherwise a commit would become a rollback without a word.
    """
    wrapper = _django_wrapper(using)
    if wrapper is not None:
        wrapper.errors_occurred = True
    if _is_sqlalchemy(using):
        with suppress(Exception):  # nothing that goes wrong here may hide that error
            connection = using.connection() if hasattr(using, "get_bind") else using
            if not connection.invalidated and (_interrupted(error) or connection.connection.driver_connection.closed):
                connection.invalidate()


async def note_failure_async(using: Any, error: BaseException) -> None:
    """The same for async connections."""
    if _is_async_sqlalchemy(using):
        with suppress(Exception):
            connection = await using.connection() if hasattr(using, "get_bind") else using
            if connection.invalidated:  # on asyncpg SQLAlchemy has seen the error itself
                return
            if _interrupted(error) or (await connection.get_raw_connection()).driver_connection.closed:
                await connection.invalidate()


def _interrupted(error: BaseException) -> bool:
    return not isinstance(error, Exception)


def _django_wrapper(using: Any) -> Any:
    """The wrapper of Django behind `using`; `django.db.connection` is a proxy, so its alias is looked up."""
    base = sys.modules.get("django.db.backends.base.base")
    if base is None:
        return None
    if isinstance(using, base.BaseDatabaseWrapper):
        return using
    if type(using).__module__ == "django.utils.connection" and hasattr(using, "alias"):
        return sys.modules["django.db"].connections[using.alias]
    return None


def _refused_async(using: Any, raw: Any) -> UnsupportedConnection:
    if isinstance(using, psycopg.Connection) or _is_sqlalchemy(using) or _django_wrapper(using) is not None:
        return UnsupportedConnection(f"{_name(using)} is synchronous: call this on a PgQueue, without await")
    return UnsupportedConnection(_refusal(using, raw))


def _refusal(using: Any, raw: Any) -> str:
    if _is_factory(using):
        return (
            f"using= got {_name(using)}, which has no transaction of its own: pass a connection or session that you got "
            "from it, and commit that"
        )
    beneath = f" (driver connection: {_name(raw)})" if raw is not None and raw is not using else ""
    return f"using= got {_name(using)}{beneath}, which pgqueue cannot enqueue through: pass {ACCEPTED}"


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

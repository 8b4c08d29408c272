"""From the connection that a caller owns to the psycopg connection beneath it.

Recognised by where their classes come from, so that neither SQLAlchemy nor Django is imported here. The raw connection is
taken, because Django's cursors and SQLAlchemy's text paths would bind every parameter as text.
"""

from __future__ import annotations

import sys
from typing import Any

import psycopg

from pgqueue.drivers.execute import AsyncConnection, SyncConnection
from pgqueue.errors import UnsupportedConnection

ACCEPTED = (
    "a psycopg 3 connection or cursor, a SQLAlchemy Connection or Session (sync or async, on the psycopg driver), "
    "or a Django database connection"
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


async def async_connection(using: Any) -> AsyncConnection:
    """The same for async connections: psycopg's, SQLAlchemy's AsyncConnection and AsyncSession."""
    if isinstance(using, psycopg.AsyncCursor):
        using = using.connection
    if isinstance(using, psycopg.AsyncConnection):
        return using
    raw: Any = None
    if _is_async_sqlalchemy(using):
        target = using() if type(using).__name__ == "async_scoped_session" else using
        _check_dialect(target)
        if hasattr(target, "get_bind"):
            target = await target.connection()
        if not target.in_transaction():
            await target.begin()
        raw = (await target.get_raw_connection()).driver_connection
    if isinstance(raw, psycopg.AsyncConnection):
        return raw
    if isinstance(using, psycopg.Connection) or _is_sqlalchemy(using) or _django_wrapper(using) is not None:
        raise UnsupportedConnection(f"{_name(using)} is synchronous: call this on a PgQueue, without await")
    raise UnsupportedConnection(_refusal(using, raw))


def _from_sqlalchemy(using: Any) -> Any:
    target = using() if type(using).__name__ == "scoped_session" else using
    _check_dialect(target)
    if hasattr(target, "get_bind"):
        target = target.connection()
    # Only a transaction that SQLAlchemy knows of is committed by its commit().
    if not target.in_transaction():
        target.begin()
    return target.connection.driver_connection


def _check_dialect(target: Any) -> None:
    """Refuse another driver before a transaction is begun on it."""
    dialect = (target.get_bind() if hasattr(target, "get_bind") else target).dialect
    if dialect.driver not in ("psycopg", "psycopg_async"):
        raise UnsupportedConnection(
            f"using= got {_name(target)} on {dialect.name}+{dialect.driver}, and pgqueue needs the psycopg driver: "
            "make the engine with a URL that begins with postgresql+psycopg://"
        )


def _is_sqlalchemy(using: Any) -> bool:
    return _defined_in(using, "sqlalchemy", {"Connection", "Session", "scoped_session"})


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


def note_failure(using: Any) -> None:
    """Tell Django that an error happened on its connection, so that it is looked at before the next request."""
    wrapper = _django_wrapper(using)
    if wrapper is not None:
        wrapper.errors_occurred = True


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


def _refusal(using: Any, raw: Any) -> str:
    beneath = f" (driver connection: {_name(raw)})" if raw is not None and raw is not using else ""
    return f"using= got {_name(using)}{beneath}, which pgqueue cannot enqueue through: pass {ACCEPTED}"


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"

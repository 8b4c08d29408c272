"""Every kind of connection that a caller may own, behind one interface, so that one suite runs over all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

import pgqueue


class Caller:
    """A caller's connection in a transaction of its own, and a queue of the matching colour."""

    def __init__(self, database: str, using: Any, *, asynchronous: bool) -> None:
        self.using = using
        self.asynchronous = asynchronous
        self.queue: Any = pgqueue.AsyncPgQueue(database) if asynchronous else pgqueue.PgQueue(database)

    async def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the queue inside the caller's transaction."""
        return await settled(getattr(self.queue, method)(*args, using=self.using, **kwargs))

    async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """The same for a method of a task."""
        return await settled(function(*args, using=self.using, **kwargs))

    async def commit(self) -> None:
        await settled(self.using.commit())

    async def rollback(self) -> None:
        await settled(self.using.rollback())

    async def execute(self, statement: str) -> Any:
        """A statement of the caller's own."""
        if isinstance(self.using, (psycopg.Connection, psycopg.AsyncConnection)):
            return await settled(self.using.execute(statement.encode()))
        return await settled(self.using.execute(sqlalchemy.text(statement)))

    async def close(self) -> None:
        await settled(self.queue.close())


class DjangoCaller(Caller):
    async def commit(self) -> None:
        self.using.commit()

    async def rollback(self) -> None:
        self.using.rollback()

    async def execute(self, statement: str) -> Any:
        with self.using.cursor() as cursor:
            cursor.execute(statement)


async def settled(value: Any) -> Any:
    return await value if hasattr(value, "__await__") else value


def sqlalchemy_url(database: str, driver: str = "psycopg") -> Any:
    parts = psycopg.conninfo.conninfo_to_dict(database)
    host = str(parts.get("host", ""))
    socket = host.startswith("/")
    return sqlalchemy.URL.create(
        f"postgresql+{driver}",
        username=str(parts["user"]) if "user" in parts else None,
        password=str(parts["password"]) if "password" in parts else None,
        host=None if socket else host,
        port=int(parts["port"]) if "port" in parts else None,
        database=str(parts["dbname"]),
        query={"host": host} if socket else {},
    )


def django_connection(database: str) -> Any:
    from django.conf import settings
    from django.db.utils import ConnectionHandler

    if not settings.configured:
        settings.configure(USE_TZ=True)
    parts = psycopg.conninfo.conninfo_to_dict(database)
    return ConnectionHandler(
        {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts["dbname"],
                "USER": parts.get("user", ""),
                "PASSWORD": parts.get("password", ""),
                "HOST": parts.get("host", ""),
                "PORT": parts.get("port", ""),
            }
        }
    )["default"]


@asynccontextmanager
async def open_caller(kind: str, database: str) -> AsyncIterator[Caller]:
    opener = OPENERS[kind]
    async with opener(database) as caller:
        try:
            yield caller
        finally:
            await caller.close()


@asynccontextmanager
async def _psycopg(database: str) -> AsyncIterator[Caller]:
    with psycopg.connect(database) as connection:
        yield Caller(database, connection, asynchronous=False)


@asynccontextmanager
async def _psycopg_dict_rows(database: str) -> AsyncIterator[Caller]:
    with psycopg.connect(database, row_factory=psycopg.rows.dict_row) as connection:
        yield Caller(database, connection, asynchronous=False)


@asynccontextmanager
async def _psycopg_async(database: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(database) as connection:
        yield Caller(database, connection, asynchronous=True)


@asynccontextmanager
async def _sa_connection(database: str) -> AsyncIterator[Caller]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(database))
    with engine.connect() as connection:
        yield Caller(database, connection, asynchronous=False)
    engine.dispose()


@asynccontextmanager
async def _sa_session(database: str) -> AsyncIterator[Caller]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(database))
    with orm.Session(engine) as session:
        yield Caller(database, session, asynchronous=False)
    engine.dispose()


@asynccontextmanager
async def _sa_scoped_session(database: str) -> AsyncIterator[Caller]:
    engine = sqlalchemy.create_engine(sqlalchemy_url(database))
    scoped = orm.scoped_session(orm.sessionmaker(engine))
    yield Caller(database, scoped, asynchronous=False)
    scoped.remove()
    engine.dispose()


@asynccontextmanager
async def _sa_async_connection(database: str) -> AsyncIterator[Caller]:
    engine = sa_async.create_async_engine(sqlalchemy_url(database))
    async with engine.connect() as connection:
        yield Caller(database, connection, asynchronous=True)
    await engine.dispose()


@asynccontextmanager
async def _sa_async_connection_on_asyncpg(database: str) -> AsyncIterator[Caller]:
    engine = sa_async.create_async_engine(sqlalchemy_url(database, "asyncpg"))
    async with engine.connect() as connection:
        yield Caller(database, connection, asynchronous=True)
    await engine.dispose()


@asynccontextmanager
async def _sa_async_session_on_asyncpg(database: str) -> AsyncIterator[Caller]:
    engine = sa_async.create_async_engine(sqlalchemy_url(database, "asyncpg"))
    async with sa_async.AsyncSession(engine) as session:
        yield Caller(database, session, asynchronous=True)
    await engine.dispose()


@asynccontextmanager
async def _sa_async_session(database: str) -> AsyncIterator[Caller]:
    engine = sa_async.create_async_engine(sqlalchemy_url(database))
    async with sa_async.AsyncSession(engine) as session:
        yield Caller(database, session, asynchronous=True)
    await engine.dispose()


@asynccontextmanager
async def _django(database: str) -> AsyncIterator[Caller]:
    import os

    # Django refuses its ORM in a thread with a running event loop; this loop is only the suite's.
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"
    connection = django_connection(database)
    connection.ensure_connection()
    connection.set_autocommit(False)
    yield DjangoCaller(database, connection, asynchronous=False)
    connection.close()


OPENERS = {
    "psycopg": _psycopg,
    "psycopg with dict rows": _psycopg_dict_rows,
    "psycopg async": _psycopg_async,
    "SQLAlchemy Connection": _sa_connection,
    "SQLAlchemy Session": _sa_session,
    "SQLAlchemy scoped_session": _sa_scoped_session,
    "SQLAlchemy AsyncConnection": _sa_async_connection,
    "SQLAlchemy AsyncSession": _sa_async_session,
    "SQLAlchemy AsyncConnection on asyncpg": _sa_async_connection_on_asyncpg,
    "SQLAlchemy AsyncSession on asyncpg": _sa_async_session_on_asyncpg,
    "Django": _django,
}

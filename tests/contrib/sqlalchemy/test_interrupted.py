"""Enqueues that are interrupted, or begun in a block that is over, on connections of SQLAlchemy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm, text
from sqlalchemy.exc import InvalidRequestError, PendingRollbackError
from sqlalchemy.ext import asyncio as sa_async

import pgqueue
from tests.callers import sqlalchemy_url
from tests.waiting import wait_until

Admin = psycopg.Connection[Any]
PATIENCE = 30.0


@pytest.fixture
def engine(database: str) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(sqlalchemy_url(database))
    yield made
    made.dispose()


@pytest.fixture(params=["psycopg", "asyncpg"])
async def async_engine(request: pytest.FixtureRequest, database: str) -> AsyncIterator[sa_async.AsyncEngine]:
    made = sa_async.create_async_engine(sqlalchemy_url(database, request.param))
    yield made
    await made.dispose()


def blocked(admin: Admin) -> bool:
    row = admin.execute(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND database = "
        "(SELECT oid FROM pg_database WHERE datname = current_database()) OR (locktype = 'transactionid' AND NOT granted)"
    ).fetchone()
    return row is not None and row[0] > 0


async def test_a_commit_after_a_cancelled_enqueue_fails_instead_of_losing_the_business_rows(
    database: str, admin: Admin, async_engine: sa_async.AsyncEngine
) -> None:
    admin.execute("CREATE TABLE business (note text)")
    with pgqueue.PgQueue(database) as other, psycopg.connect(database) as holder:
        other.enqueue("work", queue="q", unique_key="held", using=holder)
        async with pgqueue.AsyncPgQueue(database) as pq, sa_async.AsyncSession(async_engine) as session:
            await session.execute(text("INSERT INTO business VALUES ('paid')"))
            enqueue = asyncio.create_task(pq.enqueue("work", queue="q", unique_key="held", using=session))
            await asyncio.to_thread(wait_until, lambda: blocked(admin), PATIENCE, "it waits for the key")
            enqueue.cancel()
            with pytest.raises(asyncio.CancelledError):
                await enqueue
            with pytest.raises(PendingRollbackError):
                await session.commit()
            await session.rollback()
            await session.execute(text("INSERT INTO business VALUES ('paid again')"))
            await session.commit()
        holder.rollback()
    assert admin.execute("SELECT note FROM business").fetchall() == [("paid again",)]
    assert admin.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)


def test_a_commit_after_an_interrupted_enqueue_fails_instead_of_losing_the_business_rows(
    pq: pgqueue.PgQueue, admin: Admin, engine: sqlalchemy.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.execute("CREATE TABLE business (note text)")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with orm.Session(engine) as session:
        session.execute(text("INSERT INTO business VALUES ('paid')"))
        with monkeypatch.context() as patched:
            patched.setattr("pgqueue.client.run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pq.enqueue("work", queue="q", using=session)
        with pytest.raises(PendingRollbackError):
            session.commit()
        session.rollback()
        pq.enqueue("work", queue="q", using=session)
        session.commit()
    assert admin.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (1,)


def test_a_refused_enqueue_leaves_the_connection_as_it_is(
    pq: pgqueue.PgQueue, admin: Admin, engine: sqlalchemy.Engine
) -> None:
    with orm.Session(engine) as session:
        before = session.connection().connection.driver_connection
        with pytest.raises(pgqueue.PayloadError):
            pq.enqueue("work", [object()], queue="q", using=session)
        pq.enqueue("work", queue="q", using=session)
        assert session.connection().connection.driver_connection is before
        session.commit()
    assert admin.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (1,)


def test_a_block_whose_savepoint_was_rolled_back_takes_no_job(
    pq: pgqueue.PgQueue, admin: Admin, engine: sqlalchemy.Engine
) -> None:
    with engine.connect() as connection, connection.begin():
        with connection.begin_nested() as savepoint:
            savepoint.rollback()
            with pytest.raises(InvalidRequestError, match="closed transaction"):
                pq.enqueue("work", queue="q", using=connection)
        pq.enqueue("work", [1], queue="q", using=connection)
    assert admin.execute("SELECT args::text FROM pgqueue.job").fetchall() == [("[1]",)]


async def test_the_same_in_an_event_loop(database: str, admin: Admin, async_engine: sa_async.AsyncEngine) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq, async_engine.connect() as connection, connection.begin():
        async with connection.begin_nested() as savepoint:
            await savepoint.rollback()
            with pytest.raises(InvalidRequestError, match="closed transaction"):
                await pq.enqueue("work", queue="q", using=connection)
        await pq.enqueue("work", [1], queue="q", using=connection)
    assert admin.execute("SELECT args::text FROM pgqueue.job").fetchall() == [("[1]",)]

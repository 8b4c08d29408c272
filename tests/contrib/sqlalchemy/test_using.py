"""`using=` with everything that SQLAlchemy calls a connection or a session, and with what looks like one."""

from __future__ import annotations

import asyncio
import inspect
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import event, orm, text
from sqlalchemy.ext import asyncio as sa_async
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import pgqueue
from pgqueue.ops import Op, Step
from pgqueue.tables import tables
from tests.callers import sqlalchemy_url
from tests.workers import running, wait_for_count

Admin = psycopg.Connection[Any]
NO_JOB, ONE_JOB = [], [("[1]",)]


class Base(DeclarativeBase):
    """The models' base class."""


class Upload(Base):
    """A business row."""

    __tablename__ = "upload"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Elsewhere(DeclarativeBase):
    """Models of another database."""


class Visit(Elsewhere):
    """A row that is not beside the queue."""

    __tablename__ = "visit"

    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(database: str) -> Iterator[sqlalchemy.Engine]:
    made = sqlalchemy.create_engine(sqlalchemy_url(database))
    Base.metadata.create_all(made)
    yield made
    made.dispose()


@pytest.fixture
async def async_engine(database: str, engine: sqlalchemy.Engine) -> AsyncIterator[sa_async.AsyncEngine]:
    made = sa_async.create_async_engine(sqlalchemy_url(database))
    yield made
    await made.dispose()


@pytest.fixture(params=["psycopg", "asyncpg"])
async def either_engine(
    request: pytest.FixtureRequest, database: str, engine: sqlalchemy.Engine
) -> AsyncIterator[sa_async.AsyncEngine]:
    made = sa_async.create_async_engine(sqlalchemy_url(database, request.param))
    yield made
    await made.dispose()


@pytest.fixture
async def apq(database: str) -> AsyncIterator[pgqueue.AsyncPgQueue]:
    async with pgqueue.AsyncPgQueue(database) as queue:
        yield queue


def jobs(admin: Admin) -> list[tuple[Any, ...]]:
    return admin.execute("SELECT args::text FROM pgqueue.job ORDER BY id").fetchall()


def test_a_savepoint_takes_its_jobs_with_it(pq: pgqueue.PgQueue, engine: sqlalchemy.Engine, admin: Admin) -> None:
    task = pq.task(name="work")(lambda number: None)
    with orm.Session(engine) as session:
        task.enqueue(1, using=session)
        with session.begin_nested() as savepoint:
            task.enqueue(2, using=session)
            savepoint.rollback()
        session.commit()
    assert jobs(admin) == ONE_JOB


def test_a_session_inside_of_an_outer_transaction_enqueues_nothing_that_stays(
    pq: pgqueue.PgQueue, engine: sqlalchemy.Engine, admin: Admin
) -> None:
    """As in the tests of an application: its commits are savepoints, and at the end all is rolled back."""
    task = pq.task(name="work")(lambda number: None)
    with engine.connect() as connection:
        outer = connection.begin()
        with orm.Session(connection, join_transaction_mode="create_savepoint") as session:
            task.enqueue(1, using=session)
            session.commit()
            task.enqueue(2, using=session)
            session.rollback()
            assert session.execute(text("SELECT args::text FROM pgqueue.job")).fetchall() == ONE_JOB
        outer.rollback()
    assert jobs(admin) == NO_JOB


def test_an_orm_event_enqueues_in_the_transaction_of_the_flush(
    pq: pgqueue.PgQueue, engine: sqlalchemy.Engine, admin: Admin
) -> None:
    task = pq.task(name="work")(lambda number: None)

    def after_insert(mapper: Any, connection: sqlalchemy.Connection, upload: Upload) -> None:
        task.enqueue(upload.id, using=connection)

    event.listen(Upload, "after_insert", after_insert)
    try:
        with orm.Session(engine) as session:
            session.add(Upload(name="kept"))
            session.commit()
            session.add(Upload(name="not kept"))
            session.flush()
            session.rollback()
    finally:
        event.remove(Upload, "after_insert", after_insert)
    assert jobs(admin) == ONE_JOB


async def test_an_async_scoped_session_stands_for_the_session_of_its_task(
    apq: pgqueue.AsyncPgQueue, either_engine: sa_async.AsyncEngine, admin: Admin
) -> None:
    task = apq.task(name="work")(lambda number: None)
    scoped = sa_async.async_scoped_session(sa_async.async_sessionmaker(either_engine), asyncio.current_task)

    async def one(number: int, commits: bool) -> None:
        scoped.add(Upload(name=str(number)))
        await task.enqueue(number, using=scoped)
        await (scoped.commit() if commits else scoped.rollback())
        await scoped.remove()

    await asyncio.gather(one(1, True), one(2, False))
    assert jobs(admin) == ONE_JOB
    assert admin.execute("SELECT name FROM upload").fetchall() == [("1",)]


async def test_options_bind_a_connection_so_that_the_arguments_stay_checked(
    pq: pgqueue.PgQueue,
    apq: pgqueue.AsyncPgQueue,
    engine: sqlalchemy.Engine,
    async_engine: sa_async.AsyncEngine,
    admin: Admin,
) -> None:
    plain, coroutine = pq.task(name="plain")(lambda number: None), apq.task(name="other")(lambda number: None)
    with orm.Session(engine) as session:
        bound = plain.options(using=session)
        bound.enqueue(1)
        bound.options(priority=5).enqueue_many([(2,)])
        with pytest.raises(pgqueue.ArgumentsDoNotBind):
            bound.enqueue(1, note="none")
        assert jobs(admin) == NO_JOB
        session.commit()
    async with sa_async.AsyncSession(async_engine) as session:
        await coroutine.options(using=session).options(priority=7).enqueue(3)
        await session.rollback()
        await coroutine.options(using=session, priority=7).enqueue_many([(4,)])
        with pytest.raises(pgqueue.ArgumentsDoNotBind):
            await coroutine.options(using=session).enqueue()
        await session.commit()
    assert jobs(admin) == [("[1]",), ("[2]",), ("[4]",)]
    assert admin.execute("SELECT priority FROM pgqueue.job ORDER BY id").fetchall() == [(0,), (5,), (7,)]


async def test_what_has_no_transaction_or_another_driver_is_refused_with_what_to_do(
    pq: pgqueue.PgQueue,
    apq: pgqueue.AsyncPgQueue,
    engine: sqlalchemy.Engine,
    async_engine: sa_async.AsyncEngine,
    database: str,
) -> None:
    several = orm.Session(binds={Visit: engine})
    on_sqlite = sqlalchemy.create_engine("sqlite://")
    for using, said in (
        (engine, "Engine, which has no transaction of its own: pass a connection or session that you got from it"),
        (orm.sessionmaker(engine), "sessionmaker, which has no transaction of its own"),
        (several, r'pass the connection .* such as session\.connection\(bind_arguments={"mapper": Photo}\)'),
        (
            orm.Session(on_sqlite),
            r"on sqlite\+pysqlite, and .* the psycopg driver: .* begins with postgresql\+psycopg://",
        ),
        (sa_async.AsyncSession(async_engine), "is asynchronous: call this on an AsyncPgQueue and await it"),
    ):
        with pytest.raises(pgqueue.UnsupportedConnection, match=said):
            pq.enqueue("anything", using=using)
    for using, said in (
        (async_engine, "AsyncEngine, which has no transaction of its own"),
        (sa_async.async_sessionmaker(async_engine), "async_sessionmaker, which has no transaction of its own"),
        (orm.Session(engine), "is synchronous: call this on a PgQueue, without await"),
    ):
        with pytest.raises(pgqueue.UnsupportedConnection, match=said):
            await apq.enqueue("anything", using=using)
    several.close()
    on_sqlite.dispose()


async def test_the_inside_of_an_async_session_is_refused_and_its_transaction_goes_on(
    pq: pgqueue.PgQueue, apq: pgqueue.AsyncPgQueue, either_engine: sa_async.AsyncEngine, admin: Admin
) -> None:
    async with sa_async.AsyncSession(either_engine) as session:
        with pytest.raises(pgqueue.UnsupportedConnection, match=r"as in run_sync\(\): enqueue outside of that"):
            await session.run_sync(lambda inner: pq.enqueue("work", [0], using=inner))
        await apq.enqueue("work", [1], using=session)
        await session.commit()
    assert jobs(admin) == ONE_JOB


def test_a_session_on_psycopg2_is_refused_before_it_connects(
    pq: pgqueue.PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for psycopg2, of which SQLAlchemy asks nothing more until it connects."""
    names = ("psycopg2", "psycopg2.extras", "psycopg2.extensions")
    driver, extras, extensions = (ModuleType(name) for name in names)
    vars(driver).update(paramstyle="pyformat", __version__="2.9.10", extras=extras, extensions=extensions)
    for name, module in zip(names, (driver, extras, extensions), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    session = orm.Session(sqlalchemy.create_engine("postgresql+psycopg2://nobody@/nothing"))
    for using in (session, orm.scoped_session(lambda: session)):
        with pytest.raises(
            pgqueue.UnsupportedConnection, match=r"on postgresql\+psycopg2, .* begins with postgresql\+psycopg://"
        ):
            pq.enqueue("anything", using=using)
    assert not session.in_transaction()


def test_a_session_of_several_databases_enqueues_by_the_connection_of_one(
    pq: pgqueue.PgQueue, engine: sqlalchemy.Engine, admin: Admin
) -> None:
    with orm.Session(binds={Upload: engine}) as session:
        session.add(Upload(name="x"))
        session.flush()
        pq.enqueue("work", [1], using=session.connection(bind_arguments={"mapper": Upload}))
        session.commit()
    assert jobs(admin) == ONE_JOB


def test_a_connection_that_dies_under_an_enqueue_is_discarded_and_its_session_can_go_on(
    pq: pgqueue.PgQueue, engine: sqlalchemy.Engine, admin: Admin
) -> None:
    with orm.Session(engine) as session:
        pid = session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            pq.enqueue("work", [0], using=session)
        session.rollback()
        pq.enqueue("work", [1], using=session)
        session.commit()
    assert jobs(admin) == ONE_JOB


async def test_an_async_connection_that_dies_under_an_enqueue_is_discarded_as_well(
    apq: pgqueue.AsyncPgQueue, either_engine: sa_async.AsyncEngine, admin: Admin
) -> None:
    async with sa_async.AsyncSession(either_engine) as session:
        pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(psycopg.OperationalError):
            await apq.enqueue("work", [0], using=session)
        await session.rollback()
        await apq.enqueue("work", [1], using=session)
        await session.commit()
    assert jobs(admin) == ONE_JOB


async def test_the_queues_tables_are_queried_and_joined_in_a_session_of_the_application(
    pq: pgqueue.PgQueue, engine: sqlalchemy.Engine, async_engine: sa_async.AsyncEngine
) -> None:
    job = tables().job
    with orm.Session(engine) as session:
        session.add_all([Upload(name="waits"), Upload(name="has none")])
        session.flush()
        job_id = pq.enqueue("work", [1], headers={"upload": 1}, using=session)
        query = (
            sqlalchemy.select(Upload.name, job.c.id, job.c.args)
            .outerjoin(job, job.c.headers["upload"].as_integer() == Upload.id)
            .order_by(Upload.id)
        )
        assert session.execute(query).all() == [("waits", job_id, [1]), ("has none", None, None)]
        session.commit()
    async with sa_async.AsyncSession(async_engine) as session:
        assert [row.id for row in await session.execute(query)] == [job_id, None]


SECRET = "hunter2-of-the-payload"


def _of_a_wrong_type() -> Op[None]:
    yield Step("job_hasten", {"queue": "q", "ids": [SECRET]})


async def test_errors_on_asyncpg_are_those_of_psycopg_and_show_no_payload(
    database: str, engine: sqlalchemy.Engine, admin: Admin
) -> None:
    made = sa_async.create_async_engine(sqlalchemy_url(database, "asyncpg"))
    admin.execute("ALTER TABLE pgqueue.job ADD CONSTRAINT few CHECK (priority < 5)")
    async with pgqueue.AsyncPgQueue(database) as apq, sa_async.AsyncSession(made) as session:
        with pytest.raises(psycopg.errors.CheckViolation) as refused:
            await apq.enqueue("work", [SECRET], priority=5, using=session)
        await session.rollback()
        with pytest.raises(psycopg.DataError, match=r"invalid input for query argument \$2") as unsent:
            await apq.run(_of_a_wrong_type(), using=session)  # which asyncpg itself refuses
        await session.rollback()
        other = pgqueue.AsyncPgQueue(database, schema="nowhere")
        with pytest.raises(pgqueue.SchemaError, match="run `pgqueue migrate`"):
            await other.enqueue("work", [SECRET], using=session)
        await session.rollback()
        await apq.enqueue("work", [1], using=session)
        await session.commit()
    shown = "".join(traceback.format_exception(refused.value))
    assert "violates check constraint" in shown
    assert SECRET not in shown
    assert SECRET not in "".join(traceback.format_exception(unsent.value))
    assert jobs(admin) == ONE_JOB
    await made.dispose()


async def test_a_bulk_on_an_asyncpg_engine_in_autocommit_is_all_or_nothing(database: str, admin: Admin) -> None:
    made = sa_async.create_async_engine(sqlalchemy_url(database, "asyncpg"), isolation_level="AUTOCOMMIT")
    async with pgqueue.AsyncPgQueue(database) as apq, made.connect() as connection:
        task = apq.task(name="work")(lambda number: None)
        admin.execute("ALTER TABLE pgqueue.job ADD CONSTRAINT few CHECK (args->>0 <> '5000')")
        with pytest.raises(psycopg.errors.CheckViolation):
            await task.enqueue_many(((number,) for number in range(6000)), using=connection)
        assert jobs(admin) == NO_JOB
        assert len(await task.enqueue_many(((number,) for number in range(3000)), using=connection)) == 3000
        assert len(jobs(admin)) == 3000
    await made.dispose()


async def test_a_job_completes_itself_in_a_session_on_asyncpg(database: str, admin: Admin) -> None:
    made = sa_async.create_async_engine(sqlalchemy_url(database, "asyncpg"), poolclass=sqlalchemy.NullPool)
    pq = pgqueue.PgQueue(database)

    @pq.task(name="book", queue="q", max_attempts=1)
    async def book(commits: bool) -> None:
        async with sa_async.AsyncSession(made) as session:
            async with pgqueue.current_job().transaction(using=session):
                await session.execute(text("CREATE TABLE IF NOT EXISTS booked AS SELECT 1 AS one"))
            if commits:
                await session.commit()

    book.enqueue(False)
    book.enqueue(True)
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed' AND args->>0 = 'true'")
        wait_for_count(admin, 1, "dead_letter", "args->>0 = 'false'")
    assert admin.execute("SELECT one FROM booked").fetchall() == [(1,)]
    pq.close()


LATER = datetime(2300, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45)))


async def test_every_method_that_takes_a_connection_runs_in_an_async_session_of_either_driver(
    apq: pgqueue.AsyncPgQueue, either_engine: sa_async.AsyncEngine, admin: Admin
) -> None:
    """What psycopg and asyncpg make of a parameter differs by its type, so each has its turn: and none of it stays."""
    called: set[str] = set()
    task = apq.task(name="work", queue="q", max_attempts=1)(lambda number: None)
    async with sa_async.AsyncSession(either_engine) as session:

        async def do(method: str, *args: Any, **kwargs: Any) -> Any:
            called.add(method)
            return await getattr(apq, method)(*args, using=session, **kwargs)

        one = await do("enqueue", "work", [1], queue="q", priority=3, headers={"é": 1}, timeout=2, max_attempts=1)
        at = await do("enqueue", "work", [2], queue="q", run_at=LATER, expires_in=timedelta(days=1), unique_key="u")
        again = {"queue": "q", "run_at": LATER, "unique_key": "u", "on_conflict": "replace", "unique_for": 60}
        assert await do("enqueue", "work", [3], **again) == at
        for lane in ({"ordering_key": "o"}, {"fairness_key": "f"}, {"concurrency_key": "c", "concurrency_limit": 2}):
            await do("enqueue", "work", [4], queue="lanes", delay=0.5, **lane)
        assert len(await task.options(using=session, unique_key=str).enqueue_many([(5,), (6,), (5,)])) == 3
        stored = await session.execute(sqlalchemy.select(tables().job.c.run_at).where(tables().job.c.id == at))
        assert stored.scalar_one() == LATER

        first, *others = await do("claim", ["q", "lanes"], limit=9, lease=60.5)
        assert first.id == one
        assert len(others) == 2
        await do("extend", others, 90)
        await do("snooze", others[0], timedelta(hours=1))
        await do("release", others[1])
        await do("fail", first, ValueError("é"))
        assert await do("redrive", task="work") == [one]
        await do("complete", await do("claim", "q"))
        assert await do("purge", queue="q", older_than=0.5) == 0
        assert await do("cancel", [at]) == {at: "cancelled"}
        assert await do("promote", "q") == []
        assert await do("expire", "q") == []
        assert (await do("rescue", "q")).dead == []
        assert (await do("cancel_all", queue="lanes")).cancelled == 3

        assert await do("add_schedule", "nightly", "work", "0 3 * * *", tz="Europe/Berlin", args=[7], grace=5)
        await do("change_schedule", "nightly", every=timedelta(minutes=5))
        await do("pause_schedule", "nightly")
        await do("resume_schedule", "nightly")
        assert isinstance(await do("run_schedule", "nightly"), int)
        await do("remove_schedule", "nightly")

        await do("limit_queue", "q", running=3, rate=2, per=60, burst=5)
        await do("limit_key", "q", "c", 4)
        assert [limit.queue for limit in await do("limits")] == ["q"]
        assert await do("unlimit_queue", "q")

        await do("keep_topic", "news", count=10, age=timedelta(days=1))
        assert await do("subscribe", "news", "work", group="g", ordered=True, start="beginning", timeout=2.5, queue="q")
        assert (await do("publish", "news", [8], key="k", headers={"a": "b"})).message_id
        assert len((await do("publish_many", "news", [(9,), {"number": 10}])).message_ids) == 2
        await do("reset_subscription", "news", "g", datetime.now(UTC))
        await do("unsubscribe", "news", "g")
        await session.rollback()
    methods = inspect.getmembers(pgqueue.AsyncPgQueue, inspect.iscoroutinefunction)
    assert called == {name for name, method in methods if "using" in inspect.signature(method).parameters} - {"run"}
    for table in ("job", "archive", "dead_letter", "schedule", "topic", "subscription", "message", "unique_window"):
        assert admin.execute(f"SELECT count(*) FROM pgqueue.{table}".encode()).fetchall() == [(0,)], table

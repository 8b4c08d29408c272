"""pgqueue.testing.run_jobs: a worker in the thread of the test, on its own connections or in the caller's transaction."""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

import pgqueue
from pgqueue.testing import TooManyJobs, assert_enqueued, bound, enqueued_jobs, run_jobs, run_jobs_async
from tests.callers import sqlalchemy_url
from tests.workers import count


@pytest.fixture
def using(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in a transaction that is rolled back."""
    with psycopg.connect(database) as connection:
        yield connection
        connection.rollback()


@pytest.mark.parametrize("inside", [False, True], ids=["committed", "in the caller's transaction"])
def test_jobs_run_until_nothing_is_left(
    inside: bool, pq: pgqueue.PgQueue, using: psycopg.Connection[Any], admin: psycopg.Connection[Any]
) -> None:
    seen: list[Any] = []

    @pq.task(queue="numbers")
    def down(number: int, *, who: str = "me") -> int:
        seen.append((number, who, threading.get_ident(), pgqueue.current_job().attempt))
        if number:
            down.enqueue(number - 1)  # without using: in the transaction of run_jobs all the same
        return number

    given = using if inside else None
    down.enqueue(2, who="you", using=given)
    ran = run_jobs(pq, using=given)
    here = threading.get_ident()
    assert seen == [(2, "you", here, 1), (1, "me", here, 1), (0, "me", here, 1)]
    assert [(one.task, one.args, one.outcome, one.result) for one in ran] == [
        (down.name, [2], "completed", 2),
        (down.name, [1], "completed", 1),
        (down.name, [0], "completed", 0),
    ]
    assert ran[0].kwargs == {"who": "you"}
    assert run_jobs(pq, using=given) == []
    assert count(admin, "archive") == (0 if inside else 3)
    assert count(admin, "job") == count(admin, "lease") == 0
    using.rollback()
    assert count(admin, "archive") == (0 if inside else 3)


def test_what_a_handler_raises_is_raised_after_its_outcome_is_written(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    @pq.task(max_attempts=2, retry=pgqueue.Fixed(3600))
    def fail() -> None:
        raise ZeroDivisionError("nothing to share")

    job_id = fail.enqueue()
    with pytest.raises(ZeroDivisionError, match="nothing to share") as caught:
        run_jobs(pq)
    assert f"raised in job {job_id} of task {fail.name}, attempt 1; outcome: retry" in caught.value.__notes__
    [job] = enqueued_jobs(fail)
    assert (job.state, job.attempt) == ("scheduled", 1)
    assert run_jobs(pq) == []
    admin.execute("UPDATE pgqueue.job SET run_at = '2020-01-01'")
    [ran] = run_jobs(pq, raise_errors=False)
    assert (ran.outcome, ran.attempt, type(ran.error)) == ("dead", 2, ZeroDivisionError)
    assert count(admin, "dead_letter") == 1


def test_signals_are_answers_and_raised_by_nobody(pq: pgqueue.PgQueue) -> None:
    @pq.task
    def steer(how: str) -> None:
        raise {
            "retry": pgqueue.Retry(delay=60),
            "snooze": pgqueue.Snooze(60),
            "discard": pgqueue.Discard(),
            "dead": pgqueue.DeadLetter("no"),
        }[how]

    for how in ("retry", "snooze", "discard", "dead"):
        steer.enqueue(how)
    assert [(one.args, one.outcome) for one in run_jobs(pq)] == [
        ([how], how) for how in ("retry", "snooze", "discard", "dead")
    ]


def test_ctrl_c_is_never_swallowed(pq: pgqueue.PgQueue) -> None:
    @pq.task
    def interrupted() -> None:
        raise KeyboardInterrupt

    interrupted.enqueue()
    with pytest.raises(KeyboardInterrupt):
        run_jobs(pq, raise_errors=False)


def test_jobs_that_enqueue_themselves_for_ever_are_ended(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    @pq.task(name="again")
    def again() -> None:
        again.enqueue()

    @pq.task
    def snoozer() -> None:
        raise pgqueue.Snooze(0)

    again.enqueue()
    with pytest.raises(TooManyJobs, match=r"5 jobs ran and more are ready.*again"):
        run_jobs(pq, limit=5)
    # What was claimed and not run was given back.
    assert count(admin, "job", "position IS NOT NULL AND lease_id IS NULL AND attempt = 0") == 1
    pq.cancel_all(everything=True)
    snoozer.enqueue()
    with pytest.raises(TooManyJobs):
        run_jobs(pq, limit=10)


@pytest.mark.parametrize("inside", [False, True])
def test_the_handler_sees_what_it_sees_in_a_worker(
    inside: bool, pq: pgqueue.PgQueue, using: psycopg.Connection[Any]
) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
    forgotten: contextvars.ContextVar[str] = contextvars.ContextVar("forgotten", default="nothing")
    around: list[str] = []

    class Loud(pgqueue.Middleware):
        def run(self, job: pgqueue.CurrentJob, proceed: Any) -> Any:
            around.append(job.task)
            return proceed()

    pq.middleware(pgqueue.CopyContext({"tenant": tenant}))
    pq.middleware(Loud())
    given = using if inside else None

    @pq.task(name="look", keep_result=True)
    def look(pair: Any) -> Any:
        current = pgqueue.current_job()
        current.progress(50, "half")
        assert pq.progress(current.id) == pytest.approx(pq.progress(current.id))
        current.extend(60)
        # As in a worker, only what travels in headers is set.
        return [pair, tenant.get(), forgotten.get(), current.served_by is pq]

    tenant.set("acme")
    forgotten.set("in the test")
    job_id = look.enqueue([1, 2], using=given)
    [ran] = run_jobs(pq, using=given)
    assert ran.result == [[1, 2], "acme", "nothing", True]
    assert around == ["look"]
    with bound(pq, using) if inside else pq:
        result = pq.result(job_id)
        assert result is not None
        assert result.value == ran.result
    with pytest.raises(pgqueue.PgQueueError):
        pgqueue.current_job()


def test_async_tasks_and_batches_run_as_well(pq: pgqueue.PgQueue) -> None:
    seen: list[Any] = []

    @pq.task(timeout=0.05)
    async def slow() -> None:
        import asyncio

        await asyncio.sleep(10)

    @pq.task
    async def quick(word: str) -> str:
        return word.upper()

    @pq.task(batch=2)
    def together(jobs: pgqueue.Batch) -> None:
        seen.append([job.args[0] for job in jobs])
        for job in jobs:
            if job.args[0] == 3:
                job.fail("three is too much")

    @pq.task(batch=10)
    async def together_async(jobs: pgqueue.Batch) -> None:
        seen.append([job.kwargs for job in jobs])

    quick.enqueue("a")
    together.enqueue_many([(1,), (2,), (3,)])
    together_async.enqueue_many([{"x": 1}, {"x": 2}])
    ran = run_jobs(pq, raise_errors=False)
    assert seen == [[1, 2], [3], [{"x": 1}, {"x": 2}]]
    assert [one.outcome for one in ran] == ["completed"] * 3 + ["retry", "completed", "completed"]
    assert ran[0].result == "A"
    slow.enqueue()
    with pytest.raises(TimeoutError):
        run_jobs(pq)


async def test_a_sync_queue_with_async_tasks_is_run_in_the_loop_that_runs(pq: pgqueue.PgQueue) -> None:
    @pq.task
    async def hello() -> str:
        return "hello"

    hello.enqueue()
    with pytest.raises(pgqueue.ConfigurationError, match="await run_jobs_async"):
        run_jobs(pq)
    pq.rescue("default")
    pq.cancel_all(everything=True)
    hello.enqueue()
    with pq:
        assert [one.result for one in await run_jobs_async(pq)][-1:] == ["hello"]


async def test_an_async_queue_runs_its_jobs(database: str) -> None:
    apq = pgqueue.AsyncPgQueue(database)

    @apq.task
    async def parent(number: int) -> None:
        pgqueue.current_job().extend(60)
        pgqueue.current_job().progress(10)
        await child.enqueue(number + 1)

    @apq.task
    def child(number: int) -> int:
        return number

    async with apq:
        await parent.enqueue(1)
        with pytest.raises(pgqueue.ConfigurationError, match="run_jobs_async"):
            run_jobs(apq)  # type: ignore[arg-type]
        ran = await run_jobs_async(apq)
        assert [(one.task, one.args) for one in ran] == [(parent.name, [1]), (child.name, [2])]


@pytest.mark.parametrize("driver", ["psycopg alone", "psycopg"])
async def test_an_async_queue_runs_its_jobs_in_the_callers_transaction(
    driver: str, database: str, admin: psycopg.Connection[Any]
) -> None:
    apq = pgqueue.AsyncPgQueue(database)

    @apq.task(ordering_key="one")
    async def parent(number: int) -> None:
        await child.enqueue(number + 1)

    @apq.task(unique_key="one")
    async def child(number: int) -> int:
        async with pgqueue.current_job().transaction():
            pass
        return number

    async def body(connection: Any) -> None:
        await parent.enqueue(1, using=connection)
        ran = await run_jobs_async(apq, using=connection)
        assert [(one.args, one.outcome) for one in ran] == [([1], "completed"), ([2], "completed")]
        await connection.rollback()

    if driver == "psycopg alone":
        async with await psycopg.AsyncConnection.connect(database) as connection:
            await body(connection)
    else:
        engine = sa_async.create_async_engine(sqlalchemy_url(database, driver))
        async with sa_async.AsyncSession(engine) as session:
            await body(session)
        await engine.dispose()
    assert count(admin, "job") + count(admin, "archive") == 0
    await apq.close()


async def test_asyncpg_is_refused_before_anything_happens(database: str) -> None:
    apq = pgqueue.AsyncPgQueue(database)
    engine = sa_async.create_async_engine(sqlalchemy_url(database, "asyncpg"))
    async with sa_async.AsyncSession(engine) as session:
        with pytest.raises(pgqueue.ConfigurationError, match="driver psycopg"):
            await run_jobs_async(apq, using=session)
    await engine.dispose()
    await apq.close()


def test_lanes_limits_and_unique_keys_work_in_the_callers_transaction(
    pq: pgqueue.PgQueue, using: psycopg.Connection[Any], admin: psycopg.Connection[Any]
) -> None:
    pq.declare_limit("narrow", running=1)
    order: list[int] = []

    @pq.task(queue="narrow", ordering_key="line")
    def step(number: int) -> None:
        order.append(number)

    @pq.task(unique_key="only", on_conflict="replace")
    def only(number: int) -> None:
        order.append(number)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            step.enqueue(number, using=using)
            only.enqueue(number + 10, using=using)
        ran = run_jobs(pq, using=using)
    assert sorted(order) == [0, 1, 2, 12]
    assert [number for number in order if number < 10] == [0, 1, 2]
    assert len(ran) == 4
    # A debugger may hold the test up for as long as it likes.
    assert using.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("0",)
    using.rollback()
    assert count(admin, "job") + count(admin, "archive") + count(admin, "queue") == 0


def test_an_error_of_the_database_in_a_handler_does_not_end_the_callers_transaction(
    pq: pgqueue.PgQueue, using: psycopg.Connection[Any]
) -> None:
    @pq.task(retry=pgqueue.Fixed(3600))
    def broken() -> None:
        using.execute("SELECT 1 / 0")

    @pq.task
    def fine() -> None: ...

    broken.enqueue(using=using)
    fine.enqueue(using=using)
    ran = run_jobs(pq, using=using, raise_errors=False)
    assert [one.outcome for one in ran] == ["retry", "completed"]
    assert_enqueued(broken, using=using)


def test_a_handler_that_ends_the_callers_transaction_is_told_so(
    pq: pgqueue.PgQueue, using: psycopg.Connection[Any]
) -> None:
    @pq.task
    def ends() -> None:
        using.rollback()

    ends.enqueue(using=using)
    with pytest.raises(pgqueue.PgQueueError, match="create_savepoint"):
        run_jobs(pq, using=using)


def test_a_session_of_sqlalchemy_that_commits_savepoints_shares_the_transaction(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    admin.execute("CREATE TABLE public.letter (id serial PRIMARY KEY, word text)")
    engine = sqlalchemy.create_engine(sqlalchemy_url(database))
    with engine.connect() as connection, connection.begin() as outer:
        session = orm.Session(bind=connection, join_transaction_mode="create_savepoint")

        @pq.task
        def write(word: str) -> None:
            with pgqueue.current_job().transaction(session):
                session.execute(sqlalchemy.text("INSERT INTO letter (word) VALUES (:word)"), {"word": word})
            session.commit()

        write.enqueue("hello", using=session)
        session.commit()
        [ran] = run_jobs(pq, using=session)
        assert ran.outcome == "completed"
        assert session.execute(sqlalchemy.text("SELECT word FROM letter")).scalars().all() == ["hello"]
        session.close()
        outer.rollback()
    engine.dispose()
    assert admin.execute("SELECT count(*) FROM letter").fetchone() == (0,)
    assert count(admin, "job") + count(admin, "archive") == 0


@pytest.mark.parametrize("inside", [False, True])
def test_a_transaction_block_of_the_handler_completes_its_job(
    inside: bool, pq: pgqueue.PgQueue, using: psycopg.Connection[Any], admin: psycopg.Connection[Any]
) -> None:
    admin.execute("CREATE TABLE public.letter (word text)")
    given = using if inside else None

    @pq.task
    def write(word: str) -> None:
        with pgqueue.current_job().transaction() as connection:
            connection.execute("INSERT INTO public.letter VALUES (%s)", [word])

    @pq.task
    def by_hand() -> None:
        pq.complete(pgqueue.current_job().job)

    write.enqueue("hello", using=given)
    by_hand.enqueue(using=given)
    assert [one.outcome for one in run_jobs(pq, using=given)] == ["completed", "settled"]
    assert count(admin, "archive") == (0 if inside else 2)


def test_a_queue_that_is_bound_does_everything_in_that_transaction(
    pq: pgqueue.PgQueue, using: psycopg.Connection[Any], admin: psycopg.Connection[Any]
) -> None:
    @pq.task(unique_key="one", on_conflict="raise")
    def work() -> None: ...

    with bound(pq, using):
        job_id = work.enqueue()
        with pytest.raises(pgqueue.DuplicateJob):
            work.enqueue()
        assert [job.id for job in pq.jobs()] == [job_id]
        [claimed] = pq.claim("default")
        pq.release(claimed)
        assert [one.id for one in run_jobs(pq)] == [job_id]
        assert count(admin, "job") == 0
    using.rollback()
    assert pq.jobs() == []
    with (
        psycopg.connect(pq.settings.database_url or "", autocommit=True) as automatic,
        bound(pq, automatic),
        pytest.raises(pgqueue.ConfigurationError, match="autocommit"),
    ):
        work.enqueue()


def test_an_unknown_task_is_a_failed_attempt_as_in_a_worker(pq: pgqueue.PgQueue) -> None:
    pq.enqueue("nobody.knows", queue="strange")
    with pytest.raises(pgqueue.UnknownTask, match=r"nobody\.knows"):
        run_jobs(pq)
    [job] = enqueued_jobs(pq)
    assert job.state == "scheduled"


def test_only_the_queues_that_are_named_are_run(pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work() -> None: ...

    work.options(queue="a").enqueue()
    work.options(queue="b").enqueue()
    assert [one.queue for one in run_jobs(pq, queues=["b"])] == ["b"]
    assert [one.queue for one in run_jobs(pq, queues="a")] == ["a"]


def test_subscriptions_of_the_code_get_what_is_published(pq: pgqueue.PgQueue) -> None:
    seen: list[Any] = []

    @pq.subscriber("orders", group="mail")
    @pq.task
    def on_order(number: int) -> None:
        seen.append(number)

    assert run_jobs(pq) == []  # a worker that starts writes the subscription
    pq.keep_topic("orders", age=3600)
    pq.publish("orders", [7])
    run_jobs(pq)
    assert seen == [7]
    pq.reset_subscription("orders", "mail")
    run_jobs(pq)
    assert seen == [7, 7]


def test_bulk_topics_and_operators_work_where_a_queue_is_bound(
    pq: pgqueue.PgQueue, using: psycopg.Connection[Any], admin: psycopg.Connection[Any]
) -> None:
    seen: list[int] = []

    @pq.task(queue="many", batch=100)
    def many(jobs: pgqueue.Batch) -> None:
        seen.extend(job.args[0] for job in jobs)

    @pq.subscriber("news")
    @pq.task
    def read(number: int) -> None:
        seen.append(number)

    with bound(pq, using):
        assert len(many.enqueue_many((number,) for number in range(3000))) == 3000
        assert len(run_jobs(pq, limit=3000)) == 3000
        assert seen == list(range(3000))
        pq.keep_topic("news", age=60)
        pq.publish_many("news", [(1,), (2,)])
        assert len(run_jobs(pq)) == 2
        pq.pause("many")
        many.enqueue(1)
        assert run_jobs(pq) == []
        assert pq.cancel_all(queue="many").cancelled == 1
        pq.resume("many")
        with pytest.raises(pgqueue.UnknownTopic):
            pq.publish("old news", [1], key="x")
            pq.reset_subscription("old news", "nobody")
    using.rollback()
    for table in ("job", "archive", "topic", "subscription", "lease", "queue"):
        assert count(admin, table) == 0, table


async def test_an_async_queue_is_bound_as_well(database: str, admin: psycopg.Connection[Any]) -> None:
    apq = pgqueue.AsyncPgQueue(database)

    @apq.task(unique_key="k", on_conflict="raise")
    async def work() -> None: ...

    async with await psycopg.AsyncConnection.connect(database) as connection:
        with bound(apq, connection):
            await work.enqueue()
            with pytest.raises(pgqueue.DuplicateJob):
                await work.enqueue()
            assert len(await run_jobs_async(apq)) == 1
            await work.enqueue()
            [job] = await apq.claim("default")
            await apq.complete(job)
        await connection.rollback()
    assert count(admin, "archive") == 0
    await apq.close()


def test_superseding_jobs_follow_and_leases_that_are_lost_are_told(
    pq: pgqueue.PgQueue, using: psycopg.Connection[Any]
) -> None:
    seen: list[Any] = []

    @pq.task(unique_key="picture", on_conflict="supersede")
    def show(number: int) -> None:
        if number == 1:
            show.enqueue(2)
        seen.append(number)

    @pq.task
    def stolen() -> None:
        with psycopg.connect(pq.settings.database_url or "", autocommit=True) as thief:
            thief.execute("UPDATE pgqueue.lease SET expires_at = '2020-01-01'")
        pq.rescue("default")
        seen.append(pq.claim("default", limit=1)[0].attempt)

    show.enqueue(1, using=using)
    assert [one.args for one in run_jobs(pq, using=using)] == [[1], [2]]
    using.rollback()
    stolen.enqueue()
    with pytest.raises(pgqueue.LeaseLost):
        run_jobs(pq)
    assert seen == [1, 2, 2]

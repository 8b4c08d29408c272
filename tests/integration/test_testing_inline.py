"""pgqueue.testing.inline: an enqueue runs its job at once, with what production would accept and nothing else."""

from __future__ import annotations

import threading
from datetime import date
from typing import Any

import pytest

import pgqueue
from pgqueue.testing import TooManyJobs, enqueued_jobs, inline, run_jobs

NOWHERE = "postgresql://nobody@/nothing?host=/nowhere"


def test_an_enqueue_runs_at_once_in_this_thread_without_a_database() -> None:
    pq = pgqueue.PgQueue(NOWHERE)
    seen: list[Any] = []

    @pq.task
    def outer(numbers: list[int], **options: Any) -> int:
        seen.append((numbers, options, threading.get_ident(), pgqueue.current_job().attempt))
        pgqueue.current_job().progress(50)
        inner.options(delay=3600).enqueue(1)
        return 7

    @pq.task
    async def inner(number: int) -> None:
        seen.append(number)

    numbers = [1, 2]
    with inline(pq) as ran:
        job_id = outer.enqueue(numbers, deep={"a": None})
        assert seen == [([1, 2], {"deep": {"a": None}}, threading.get_ident(), 1), 1]
        assert seen[0][0] is not numbers
        assert [(one.id, one.outcome, one.result) for one in ran] == [(-2, "completed", None), (job_id, "completed", 7)]
        pq.enqueue(outer.name, [[]], priority=3)
        assert outer.enqueue_many([([],), ([],)]) == [-5, -6]
        assert len(ran) == 8
    with pytest.raises(pgqueue.DatabaseUnavailable):
        outer.enqueue([])


def test_what_production_refuses_is_refused_before_anything_runs() -> None:
    pq = pgqueue.PgQueue(NOWHERE, max_payload_bytes=100)
    seen: list[Any] = []

    @pq.task
    def work(value: Any) -> None:
        seen.append(value)

    class No(pgqueue.Middleware):
        def enqueue(self, call: pgqueue.EnqueueCall) -> None:
            if call.headers.get("no"):
                raise PermissionError

    pq.middleware(No())
    with inline(pq):
        for bad in (object(), date(2030, 1, 2), (1, 2), float("nan"), "x" * 200, {1: 2}, 2**70):
            with pytest.raises(pgqueue.PayloadError):
                work.enqueue(bad)
        with pytest.raises(pgqueue.ArgumentsDoNotBind):
            work.enqueue()  # type: ignore[call-arg]
        with pytest.raises(PermissionError):
            work.options(headers={"no": True}).enqueue(1)
        with pytest.raises(pgqueue.PayloadError):
            work.enqueue_many([(1,), (object(),)])
    assert seen == []


@pytest.mark.parametrize(
    "option", [{"unique_key": str}, {"ordering_key": "k"}, {"unique_key": str, "on_conflict": "merge"}]
)
def test_jobs_with_keys_run_as_well(option: dict[str, Any]) -> None:
    pq = pgqueue.PgQueue(NOWHERE)
    seen: list[int] = []

    @pq.task(**option)
    def work(number: int) -> None:
        seen.append(number)

    with inline(pq):
        assert work.enqueue(1) == -1
        assert work.enqueue_many([(2,), (3,)]) == [-2, -3]
    assert seen == [1, 2, 3]


def test_errors_are_raised_signals_are_not_and_middleware_is_around() -> None:
    pq = pgqueue.PgQueue(NOWHERE)
    around: list[Any] = []

    class Around(pgqueue.Middleware):
        def run(self, job: pgqueue.CurrentJob, proceed: Any) -> Any:
            around.append(job.headers)
            return proceed()

    @pq.task(headers={"from": "afar"})
    def work(how: str) -> None:
        if how == "error":
            raise ZeroDivisionError
        raise pgqueue.Snooze(5)

    pq.middleware(Around())
    with inline(pq) as ran:
        with pytest.raises(ZeroDivisionError):
            work.enqueue("error")
        work.enqueue("snooze")
    assert [one.outcome for one in ran] == ["retry", "snooze"]
    assert around == [{"from": "afar"}] * 2
    with inline(pq, raise_errors=False) as ran:
        work.enqueue("error")
    assert [type(one.error) for one in ran] == [ZeroDivisionError]


def test_batches_run_one_by_one_and_endless_jobs_end() -> None:
    pq = pgqueue.PgQueue(NOWHERE)
    seen: list[int] = []

    @pq.task(batch=10)
    def together(jobs: pgqueue.Batch) -> None:
        seen.append(len(jobs))

    @pq.task
    def again() -> None:
        again.enqueue()

    @pq.task
    def single() -> None: ...

    with inline(pq, limit=100):
        together.enqueue_many([(1,), (2,)])
        with pytest.raises(TooManyJobs, match="deep"):
            again.enqueue()
        with pytest.raises(TooManyJobs, match="limit="):
            single.enqueue_many([()] * 200)
    assert seen == [1, 1]


def test_a_transaction_block_is_that_of_the_caller_or_refused(pq: pgqueue.PgQueue, database: str) -> None:
    import psycopg

    with psycopg.connect(database) as connection:

        @pq.task
        def work(own: bool) -> None:
            with pgqueue.current_job().transaction(None if own else connection) as given:
                given.execute("SELECT 1")

        with inline(pq) as ran:
            work.enqueue(False)
            with pytest.raises(pgqueue.PgQueueError, match="run_jobs"):
                work.enqueue(True)
            assert [one.outcome for one in ran] == ["completed", "retry"]
            with pytest.raises(pgqueue.PgQueueError, match="inline mode"):
                enqueued_jobs(pq)


def test_what_is_no_enqueue_is_refused_and_the_configured_database_never_hears_of_it(
    pq: pgqueue.PgQueue, database: str
) -> None:
    import psycopg

    seen: list[int] = []

    @pq.subscriber("news")
    @pq.task
    def work(number: int) -> None:
        seen.append(number)

    pq.keep_topic("news", age=60)
    real = [work.enqueue(number) for number in range(3)]
    before = pq.jobs()
    with psycopg.connect(database) as connection:
        for using in ({}, {"using": connection}):
            with inline(pq) as ran:
                mine = work.enqueue(7, **using)  # type: ignore[call-arg]
                assert mine < 0 < min(real)
                for call in (
                    lambda mine=mine, using=using: pq.cancel(mine, **using),
                    lambda using=using: pq.cancel(real, **using),
                    lambda using=using: pq.cancel_all(everything=True, **using),
                    lambda using=using: pq.publish("news", [1], **using),
                    lambda using=using: pq.publish_many("news", [(1,)], **using),
                    lambda using=using: pq.claim("default", **using),
                    lambda mine=mine: pq.wait(mine, 0),
                    lambda mine=mine: pq.result(mine),
                    lambda: pq.pause("default"),
                    lambda: pq.status(),
                    lambda: run_jobs(pq),
                ):
                    with pytest.raises(pgqueue.PgQueueError, match="only an enqueue does something there"):
                        call()
                assert work.enqueue_many([]) == []
            assert len(ran) == 1
    assert seen == [7, 7]
    assert pq.jobs() == before
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM pgqueue.message").fetchone() == (0,)


async def test_an_async_queue_refuses_the_same() -> None:
    apq = pgqueue.AsyncPgQueue(NOWHERE)
    with inline(apq):
        for call in (apq.cancel(1), apq.publish("news", [1]), apq.wait(-1), apq.status()):
            with pytest.raises(pgqueue.PgQueueError, match="only an enqueue does something there"):
                await call


def test_a_connection_that_production_refuses_is_refused_without_connecting() -> None:
    import sqlalchemy
    from sqlalchemy import orm

    pq = pgqueue.PgQueue(NOWHERE)
    seen: list[int] = []

    @pq.task
    def work(number: int) -> None:
        seen.append(number)

    engine = sqlalchemy.create_engine("postgresql+psycopg://nobody@/nothing?host=/nowhere")
    lite = sqlalchemy.create_engine("sqlite://")
    with inline(pq):
        for bad in (object(), "postgresql://", 7, engine, orm.sessionmaker(engine), orm.Session(lite), orm.Session()):
            with pytest.raises(pgqueue.UnsupportedConnection):
                work.options(using=bad).enqueue(1)
        assert seen == []
        with orm.Session(engine) as session:
            work.options(using=session).enqueue(2)
    assert seen == [2]


async def test_so_is_one_of_the_other_colour(database: str) -> None:
    import psycopg
    from sqlalchemy.ext import asyncio as of_sqlalchemy

    pq, apq = pgqueue.PgQueue(NOWHERE), pgqueue.AsyncPgQueue(NOWHERE)
    engine = of_sqlalchemy.create_async_engine("postgresql+asyncpg://nobody@/nothing?host=/nowhere")
    async with await psycopg.AsyncConnection.connect(database) as connection:
        with psycopg.connect(database) as plain, inline(pq), inline(apq, raise_errors=False) as ran:
            with pytest.raises(pgqueue.UnsupportedConnection, match="asynchronous"):
                pq.enqueue("unknown", using=connection, queue="q")
            for bad in (plain, object(), engine):
                with pytest.raises(pgqueue.UnsupportedConnection):
                    await apq.enqueue("unknown", using=bad, queue="q")
            for good in (connection, of_sqlalchemy.AsyncSession(engine)):
                await apq.enqueue("unknown", using=good, queue="q")
    assert len(ran) == 2


async def test_async_queues_run_inline_in_their_loop(database: str) -> None:
    apq = pgqueue.AsyncPgQueue(NOWHERE)
    seen: list[int] = []

    @apq.task
    async def work(number: int) -> None:
        seen.append(number)
        if number:
            await work.enqueue(number - 1)

    @apq.task
    def plain(number: int) -> None:
        seen.append(number)

    with inline(apq) as ran:
        await work.enqueue(2)
        await plain.enqueue_many([(7,), (8,)])
    assert seen == [2, 1, 0, 7, 8]
    assert len(ran) == 5
    pq = pgqueue.PgQueue(NOWHERE)

    @pq.task
    async def stranded() -> None: ...

    with inline(pq), pytest.raises(pgqueue.ConfigurationError, match="event loop"):
        stranded.enqueue()


def test_a_flask_extension_is_inline_pointed_and_bound_in_the_current_application(database: str) -> None:
    import flask
    import psycopg

    from pgqueue.contrib.flask import PgQueue
    from pgqueue.testing import assert_enqueued, bound, pointed, run_jobs

    extension = PgQueue()
    app = flask.Flask("shop")
    app.config.update(PGQUEUE_DATABASE_URL=NOWHERE)
    extension.init_app(app)

    @extension.task
    def work() -> str:
        return flask.current_app.name

    with app.app_context(), inline(extension) as ran:
        work.enqueue()
        assert [one.result for one in ran] == ["shop"]
    with app.app_context(), pointed(extension, database), psycopg.connect(database) as connection:
        with bound(extension, connection):
            work.enqueue()
            assert_enqueued(work)
            assert [one.result for one in run_jobs(extension)] == ["shop"]
            work.enqueue()
        connection.rollback()
        assert enqueued_jobs(extension) == []
        work.enqueue()
        assert [one.outcome for one in run_jobs(extension)] == ["completed"]
    with app.app_context(), pytest.raises(pgqueue.DatabaseUnavailable):
        work.enqueue()

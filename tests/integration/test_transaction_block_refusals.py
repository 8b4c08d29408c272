"""Transaction blocks and the circuit, what a block refuses, and what handlers may do beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import psycopg
import pytest

import pgqueue
from tests.callers import sqlalchemy_url
from tests.integration.test_transaction_block import ONCE, Admin, notes, write
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization")


@pytest.fixture(autouse=True)
def business(admin: Admin) -> None:
    admin.execute("CREATE TABLE business (note text)")


def test_completed_blocks_do_not_look_like_failures_to_the_breaker(pq: pgqueue.PgQueue, admin: Admin) -> None:
    @pq.task(name="work", queue="q")
    def work(number: int) -> None:
        with pgqueue.current_job().transaction() as connection:
            write(connection, str(number))

    work.enqueue_many([(number,) for number in range(30)])
    with running(pq, breaker_failures=3, unfit_failures=3) as watched:
        wait_for_count(admin, 30, "archive", "state = 'completed'")
        assert not watched.seen(pgqueue.EventName.TASK_CIRCUIT_OPENED)
        assert not watched.seen(pgqueue.EventName.JOB_FAILED)
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
    assert len(notes(admin)) == 30


def test_blocks_that_are_never_committed_open_the_circuit(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        with psycopg.connect(database) as connection:
            with pgqueue.current_job().transaction(using=connection):
                write(connection)
            connection.rollback()

    work.enqueue_many([() for _ in range(10)])
    with running(pq, breaker_failures=3, concurrency=1) as watched:
        watched.wait_for(pgqueue.EventName.TASK_CIRCUIT_OPENED, task="work", reason="pgqueue.errors.TaskError")


def in_a_handler(pq: pgqueue.PgQueue, body: Callable[[pgqueue.CurrentJob], None]) -> BaseException | None:
    """What this raises inside a handler, whose job is discarded afterwards."""
    raised: list[BaseException | None] = []

    @pq.task(name="work", queue="q")
    def work() -> None:
        try:
            body(pgqueue.current_job())
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    work.enqueue()
    with running(pq):
        return wait_until(lambda: raised, PATIENCE, "the handler has ended")[0]


def test_blocks_do_not_nest(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(job: pgqueue.CurrentJob) -> None:
        with job.transaction() as connection:
            write(connection)
            with job.transaction():
                pass

    error = in_a_handler(pq, body)
    assert type(error) is pgqueue.PgQueueError
    assert "do not nest" in str(error)
    assert notes(admin) == []


def test_a_handler_has_one_block(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(job: pgqueue.CurrentJob) -> None:
        with job.transaction() as connection:
            write(connection, "first")
        with job.transaction() as connection:
            write(connection, "second")

    error = in_a_handler(pq, body)
    assert type(error) is pgqueue.PgQueueError
    assert "one transaction block" in str(error)
    assert notes(admin) == ["first"]
    assert count(admin, "archive", "state = 'completed'") == 1


def test_a_block_that_raised_may_be_tried_again(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(job: pgqueue.CurrentJob) -> None:
        for note in ("first", "second"):
            with suppress(psycopg.errors.DivisionByZero), job.transaction() as connection:
                write(connection, note)
                if note == "first":
                    connection.execute("SELECT 1 / 0")

    assert in_a_handler(pq, body) is None
    assert notes(admin) == ["second"]
    assert count(admin, "archive", "state = 'completed'") == 1


@pytest.mark.parametrize("method", ["complete", "release", "fail", "snooze"])
def test_a_job_is_not_settled_by_hand_inside_its_block(method: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(job: pgqueue.CurrentJob) -> None:
        with job.transaction() as connection:
            write(connection)
            extra = {"fail": ("broken",), "snooze": (1,)}.get(method, ())
            getattr(pq, method)(job.job, *extra, using=connection)

    error = in_a_handler(pq, body)
    assert type(error) is pgqueue.PgQueueError
    assert "completes its job at its end" in str(error)
    assert notes(admin) == []


def test_a_connection_in_autocommit_is_refused(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    def body(job: pgqueue.CurrentJob) -> None:
        with psycopg.connect(database, autocommit=True) as connection, job.transaction(using=connection):
            write(connection)

    error = in_a_handler(pq, body)
    assert type(error) is pgqueue.ConfigurationError
    assert "autocommit" in str(error)
    assert notes(admin) == []


def test_autocommit_inside_a_transaction_is_accepted(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    def body(job: pgqueue.CurrentJob) -> None:
        with psycopg.connect(database, autocommit=True) as connection, connection.transaction():
            with job.transaction(using=connection):
                write(connection)
            assert notes(admin) == []

    assert in_a_handler(pq, body) is None
    assert notes(admin) == ["written"]


def test_the_wrong_colour_of_a_connection_is_refused_in_words(pq: pgqueue.PgQueue, database: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    def body(job: pgqueue.CurrentJob) -> None:
        engine = create_async_engine(sqlalchemy_url(database))
        with job.transaction(using=engine.connect()):
            pass

    error = in_a_handler(pq, body)
    assert type(error) is pgqueue.UnsupportedConnection
    assert "`async with`" in str(error)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_handler_that_completes_its_own_job_by_hand_is_not_told_that_it_lost_it(
    end: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        with psycopg.connect(database) as connection:
            write(connection)
            pq.complete(pgqueue.current_job().job, using=connection)
            getattr(connection, end)()

    job_id = work.enqueue()
    with running(pq) as watched:
        if end == "commit":
            wait_for_count(admin, 1, "archive", f"id = {job_id} AND state = 'completed'")
        else:
            wait_for_count(admin, 1, "job", f"id = {job_id} AND run_at IS NOT NULL")
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of it")
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
        assert not watched.seen(pgqueue.EventName.JOB_FAILED, outcome="completed")


def test_a_handler_that_snoozes_its_own_job_by_hand_has_its_way(pq: pgqueue.PgQueue, admin: Admin) -> None:
    @pq.task(name="work", queue="q")
    def work() -> None:
        pq.snooze(pgqueue.current_job().job, 3600)
        raise ValueError("what is said now does not count")

    job_id = work.enqueue()
    with running(pq) as watched:
        wait_for_count(admin, 1, "job", f"id = {job_id} AND run_at IS NOT NULL AND attempt = 0 AND errors IS NULL")
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of it")
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
    assert count(admin, "job", f"id = {job_id} AND attempt = 0 AND errors IS NULL") == 1


def test_a_block_keeps_the_result_that_was_set_and_says_where_none_was(pq: pgqueue.PgQueue) -> None:
    @pq.task(name="work", queue="q", keep_result=60)
    def work(value: int | None) -> str:
        job = pgqueue.current_job()
        with job.transaction():
            if value is not None:
                job.set_result({"rows": value})
        return "too late"

    with running(pq):
        with_value, without = work.enqueue(3), work.enqueue(None)
        ended = pq.wait([with_value, without], PATIENCE)
    assert ended[with_value].value == {"rows": 3}
    with pytest.raises(pgqueue.ResultMissing, match="set_result"):
        _ = ended[without].value
    assert ended[without].state is pgqueue.JobState.COMPLETED


def test_outside_of_a_worker_there_is_no_block(pq: pgqueue.PgQueue) -> None:
    [job_id] = [pq.enqueue("t", queue="q")]
    [job] = pq.claim("q")
    current = pgqueue.CurrentJob(job, lambda _job, _seconds: None)
    for call in (current.transaction, lambda: current.progress(1)):
        with pytest.raises(pgqueue.PgQueueError, match="worker runs"):
            call()
    assert job.id == job_id

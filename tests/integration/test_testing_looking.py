"""pgqueue.testing.assert_enqueued and enqueued_jobs: what is found, and what a failure says."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

import pgqueue
from pgqueue.testing import assert_enqueued, assert_enqueued_async, bound, enqueued_jobs, enqueued_jobs_async


def test_arguments_are_compared_as_the_handler_gets_them(pq: pgqueue.PgQueue) -> None:
    @pq.task(queue="mail")
    def send(to: str, *, urgent: bool = False, sizes: list[int] | None = None) -> None: ...

    job_id = send.enqueue(to="ada", sizes=[1, 2])
    [job] = assert_enqueued(
        send, "ada", kwargs={"urgent": False, "sizes": [1, 2]}, queue="mail", state="ready", times=1
    )
    assert (job.id, job.args, job.kwargs) == (job_id, [], {"to": "ada", "sizes": [1, 2]})
    assert assert_enqueued(send) == assert_enqueued(send.name, pq=pq) == enqueued_jobs(send) == enqueued_jobs(pq)
    assert_enqueued(send, "bob", times=0)
    assert enqueued_jobs(pq, queue="other") == enqueued_jobs(pq, task="nobody") == []


def test_a_failure_lists_what_was_enqueued(pq: pgqueue.PgQueue) -> None:
    @pq.task(name="send")
    def send(to: str) -> None: ...

    @pq.task(name="other")
    def other() -> None: ...

    with pytest.raises(AssertionError, match="nothing is enqueued"):
        assert_enqueued(send)
    later = datetime(2030, 1, 2, tzinfo=UTC)
    other.options(priority=5, unique_key="k").enqueue()
    send.options(run_at=later).enqueue("ada")
    with pytest.raises(AssertionError) as caught:
        assert_enqueued(send, "bob", queue="mail")
    said = str(caught.value)
    assert "expected send('bob') with queue='mail': it was not enqueued" in said
    lines = said.splitlines()[2:]
    assert lines[0].startswith("  send('ada')  [job ")
    assert "scheduled, due 2030-01-02T" in lines[0]
    assert "other()  [job" in lines[1]
    assert "priority 5, unique key k" in lines[1]
    with pytest.raises(AssertionError, match=r"expected send\(…\) 2 times: it was enqueued 1 times"):
        assert_enqueued(send, times=2)
    with pytest.raises(AssertionError, match=r"expected other\(\) 0 times"):
        assert_enqueued(other, kwargs={}, times=0)
    assert_enqueued(send, run_at=later, times=1)


def test_a_long_listing_is_cut(pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work(text: str) -> None: ...

    work.enqueue_many([("x" * 1000,)] * 25)
    with pytest.raises(AssertionError, match="… and 5 more") as caught:
        assert_enqueued(work, "y")
    assert len(str(caught.value)) < 10_000


def test_what_could_never_be_true_is_refused(pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work(number: int) -> None: ...

    with pytest.raises(pgqueue.ArgumentsDoNotBind):
        assert_enqueued(work, 1, 2)
    with pytest.raises(pgqueue.PayloadError):
        assert_enqueued(work, object())
    with pytest.raises(pgqueue.ConfigurationError, match="pq=pq"):
        assert_enqueued("work")


def test_jobs_under_an_old_name_of_the_task_are_its_own(pq: pgqueue.PgQueue) -> None:
    @pq.task(name="new", aliases=["old"])
    def work(number: int) -> None: ...

    pq.enqueue("old", [1])
    assert_enqueued(work, 1)


def test_what_is_not_committed_is_seen_on_that_connection_alone(pq: pgqueue.PgQueue, database: str) -> None:
    @pq.task
    def work() -> None: ...

    with psycopg.connect(database) as connection:
        work.enqueue(using=connection)
        assert_enqueued(work, using=connection)
        assert enqueued_jobs(work, using=connection) == enqueued_jobs(pq, using=connection) != []
        assert_enqueued(work, times=0)
        with bound(pq, connection):
            assert_enqueued(work)
        connection.rollback()
        assert_enqueued(work, times=0, using=connection)


async def test_the_same_for_async_queues(database: str) -> None:
    apq = pgqueue.AsyncPgQueue(database)

    @apq.task
    async def work(number: int) -> None: ...

    async with apq:
        await work.enqueue(1)
        [job] = await assert_enqueued_async(work, 1)
        assert await enqueued_jobs_async(apq) == [job]
        with pytest.raises(AssertionError, match="was not enqueued"):
            await assert_enqueued_async(work, 2)
        with pytest.raises(pgqueue.ConfigurationError, match="_async"):
            enqueued_jobs(apq)

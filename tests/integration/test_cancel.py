"""Cancellation, one by one and in bulk, and what it meets at the same moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import Step
from pgqueue.ops import cancel as cancel_ops
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

Admin = psycopg.Connection[Any]


def enqueue(pq: pgqueue.PgQueue, number: int, task: str = "work", queue: str = "q", **options: Any) -> list[int]:
    return [pq.enqueue(task, [n], queue=queue, **options) for n in range(number)]


def test_a_selection_is_cancelled_and_the_rest_is_left(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 3, "a"), enqueue(pq, 2, "b"), enqueue(pq, 2, "a", "other"), enqueue(pq, 1, "a", delay=60)
    running_one = pq.claim("q")
    assert pq.count_live(queue="q", task="a") == (3, 1)
    assert pq.cancel_all(queue="q", task="a") == (3, 1)
    assert pq.count_live(queue="q", task="a") == (0, 1)
    assert pq.cancel_all(queue="q", task="a") == (0, 1)  # asked again: it still runs
    assert pq.cancel_all(queue="other") == (2, 0)
    assert pq.count_live(everything=True) == (2, 1)
    pq.release(running_one)
    assert pq.count_live(everything=True) == (2, 0)
    assert count(admin, "archive", "state = 'cancelled'") == 6


@pytest.mark.parametrize("key", ["ordering_key", "concurrency_key"])
def test_jobs_of_a_key_are_cancelled_and_those_of_other_keys_are_not(
    key: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    more: dict[str, Any] = {"concurrency_limit": 1} if key == "concurrency_key" else {}
    enqueue(pq, 4, **{key: "k"}, **more)
    enqueue(pq, 3, **{key: "other"}, **more)
    enqueue(pq, 2)
    enqueue(pq, 2, queue="another", **{key: "k"}, **more)
    assert pq.cancel_all(queue="q", **{key: "k"}) == (4, 0)
    assert pq.cancel_all(**{key: "k"}) == (2, 0)
    assert count(admin, "job") == 5


def test_the_job_of_a_unique_key_is_cancelled(pq: pgqueue.PgQueue, admin: Admin) -> None:
    first, second = enqueue(pq, 2)
    admin.execute("UPDATE pgqueue.job SET unique_key = 'u' WHERE id = %s", [first])
    assert pq.cancel_all(unique_key="u") == (1, 0)
    assert admin.execute("SELECT id FROM pgqueue.job").fetchall() == [(second,)]


def test_a_cancellation_in_bulk_belongs_to_the_callers_transaction(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    enqueue(pq, 5)
    with psycopg.connect(database) as caller:
        assert pq.cancel_all(queue="q", using=caller) == (5, 0)
        caller.rollback()
    assert (count(admin, "job"), count(admin, "archive")) == (5, 0)
    with psycopg.connect(database) as caller:
        assert pq.cancel_all(queue="q", using=caller) == (5, 0)
        assert pq.claim("q") == []  # they are in the caller's hands
        caller.commit()
    assert (count(admin, "job"), count(admin, "archive")) == (0, 5)


def test_a_walk_in_small_steps_reaches_all_and_no_job_that_comes_later(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancel_ops, "PAGE", 7)
    for _ in range(5):
        enqueue(pq, 4, "a"), enqueue(pq, 3, "b")
    op = pq.cancel_all_op(task="a")
    step, later = next(op), []
    with pytest.raises(StopIteration) as stop:
        while True:
            assert isinstance(step, Step)
            rows = pq.run(one(step))
            later += enqueue(pq, 1, "a")
            step = op.send(rows)
    assert stop.value.value == (20, 0)
    assert count(admin, "job", "task = 'b'") == 15
    assert admin.execute("SELECT array_agg(id ORDER BY id) FROM pgqueue.job WHERE task = 'a'").fetchone() == (later,)


def one(step: Step) -> Any:
    return (yield step)


@pytest.mark.parametrize(
    "selection",
    [{}, {"queue": "q", "everything": True}, {"queue": ""}, {"ordering_key": "a", "concurrency_key": "b"},
     {"unique_key": 5}, {"ordering_key": ""}, {"task": "a\n"}],
)  # fmt: skip
def test_a_selection_that_makes_no_sense_is_refused_before_anything_is_sent(selection: dict[str, Any]) -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    for call in (pq.cancel_all, pq.count_live):
        with pytest.raises(pgqueue.ConfigurationError):
            call(**selection)


def meeting(database: str, act: Callable[[psycopg.Connection[Any]], Any], cancel: Callable[[], Any]) -> Any:
    """`act` in an open transaction, `cancel` meanwhile; what the cancellation answers once that has committed."""
    answers: list[Any] = []
    with psycopg.connect(database) as caller:
        act(caller)
        thread = threading.Thread(target=lambda: answers.append(cancel()))
        thread.start()
        wait_until(lambda: waits_for_a_lock(database) or answers, PATIENCE, "the two have met")
        assert not answers, "the cancellation did not wait"
        caller.commit()
        thread.join(PATIENCE)
    return answers[0]


def waits_for_a_lock(database: str) -> bool:
    with psycopg.connect(database, autocommit=True) as look:
        row = look.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    return row is not None and row[0] > 0


@pytest.mark.parametrize("bulk", [False, True])
def test_of_a_cancellation_and_another_act_at_the_same_moment_one_wins_and_the_other_knows(
    bulk: bool, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    def cancel(job_id: int) -> Callable[[], Any]:
        if bulk:
            return lambda: pq.cancel_all(queue="q")
        return lambda: pq.cancel(job_id)

    [job_id] = enqueue(pq, 1)
    claimed: list[pgqueue.Job] = []
    met = meeting(database, lambda caller: claimed.extend(pq.claim("q", using=caller)), cancel(job_id))
    assert met == ((0, 1) if bulk else {job_id: "requested"})  # it runs now, and is asked to stop
    met = meeting(database, lambda caller: pq.complete(claimed, using=caller), cancel(job_id))
    assert met == ((0, 0) if bulk else {})  # completed: there is nothing to cancel
    [job_id] = enqueue(pq, 1)
    jobs = pq.claim("q")
    met = meeting(database, lambda caller: pq.fail(jobs, "no", using=caller), cancel(job_id))
    assert met == ((1, 0) if bulk else {job_id: "cancelled"})  # it waits for its retry
    [job_id] = enqueue(pq, 1)
    pq.claim("q")
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 s'")
    met = meeting(database, lambda caller: pq.rescue("q", using=caller), cancel(job_id))
    assert met == ((1, 0) if bulk else {job_id: "cancelled"})  # it is back in line
    [job_id] = enqueue(pq, 1)
    met = meeting(database, lambda caller: pq.cancel(job_id, using=caller), cancel(job_id))
    assert met == ((0, 0) if bulk else {})  # the second of two
    assert (count(admin, "job"), count(admin, "archive")) == (0, 4)


def test_a_row_that_is_deleted_under_its_worker_is_a_lost_lease_and_no_more(pq: pgqueue.PgQueue, admin: Admin) -> None:
    begun, free = threading.Event(), threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        assert free.wait(PATIENCE)

    job_id = work.enqueue()
    with running(pq) as worker:
        assert begun.wait(PATIENCE)
        admin.execute("DELETE FROM pgqueue.job")
        free.set()
        worker.wait_for(pgqueue.EventName.LEASE_LOST, ids=[job_id], during="settle")
        free.set()
        work.enqueue()
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    assert count(admin, "job") == 0


def test_running_jobs_of_a_task_are_asked_to_stop_in_every_colour(pq: pgqueue.PgQueue, admin: Admin) -> None:
    begun = threading.Semaphore(0)
    seen: list[str] = []

    @pq.task(name="waits", queue="q")
    async def waits() -> None:
        begun.release()
        try:
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            seen.append("CancelledError")
            raise

    @pq.task(name="looks", queue="q")
    def looks() -> None:
        begun.release()
        wait_until(lambda: pgqueue.current_job().cancelled, PATIENCE, "the handler is told")
        seen.append("cancelled")
        raise RuntimeError("stopped")

    for task in (waits, looks):
        task.enqueue()
    with running(pq) as worker:
        for _ in range(2):
            assert begun.acquire(timeout=PATIENCE)
        wait_until(worker.worker._hearing, PATIENCE, "the worker hears")
        pq.enqueue("waits", queue="q", delay=3600)
        assert pq.cancel_all(queue="q") == (1, 2)
        wait_for_count(admin, 3, "archive", "state = 'cancelled'")
        worker.wait_for(pgqueue.EventName.JOBS_CANCELLED, cancelled=1, requested=2)
    assert sorted(seen) == ["CancelledError", "cancelled"]
    assert count(admin, "job") == 0


async def test_the_async_client_cancels_in_bulk(database: str) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        for _ in range(3):
            await pq.enqueue("work", queue="q")
        assert await pq.count_live(task="work") == (3, 0)
        assert await pq.cancel_all(task="work") == (3, 0)
        assert await pq.count_live(everything=True) == (0, 0)

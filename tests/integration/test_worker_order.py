"""In which order a worker starts jobs, when it looks for them, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.integration.test_worker import COLOURS, forever
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count


@COLOURS
def test_jobs_start_by_priority_and_then_in_the_order_of_their_enqueue(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    order: list[int] = []
    task = define(pq, colour, order.append)
    numbers = iter(range(1000))
    expected: dict[int, list[int]] = {}
    for priority in (0, -5, 100, 0, 7, -100, 100):
        batch = [next(numbers) for _ in range(20)]
        expected.setdefault(priority, []).extend(batch)
        task.options(priority=priority).enqueue_many([(number,) for number in batch])
    with running(pq, concurrency=1):
        wait_for_count(admin, 140, "archive")
    assert order == [number for priority in sorted(expected, reverse=True) for number in expected[priority]]


def test_queues_are_served_in_the_order_in_which_they_were_named(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    order: list[str] = []
    work = pq.task(name="work", queue="slow")(order.append)
    for queue in ("slow", "fast", "slow", "fast", "other"):
        work.options(queue=queue).enqueue(queue)
    with running(pq, concurrency=1, queues=("fast", "slow")):
        wait_for_count(admin, 4, "archive")
    assert order == ["fast", "fast", "slow", "slow"]
    assert [job.queue for job in pq.jobs()] == ["other"]


@COLOURS
def test_a_notification_starts_a_job_long_before_the_next_poll(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    begun = threading.Event()
    task = define(pq, colour, begun.set)
    with running(pq, poll=600.0) as watched:
        assert wait_until(lambda: watched.loops()["listen"].started.is_set(), PATIENCE, "the listener listens")
        for _ in range(3):
            begun.clear()
            task.enqueue()
            assert begun.wait(PATIENCE)
        wait_for_count(admin, 3, "archive")


@COLOURS
def test_a_retry_with_a_delay_comes_when_it_is_due_and_not_with_the_poll(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    times: list[float] = []

    def work() -> None:
        times.append(time.monotonic())
        if len(times) < 3:
            raise pgqueue.Retry(delay=0.3)

    define(pq, colour, work).enqueue()
    with running(pq, poll=600.0):
        wait_for_count(admin, 1, "archive", "state = 'completed' AND attempt = 3")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(0.25 < gap < 30 for gap in gaps), gaps


@pytest.mark.usefixtures("unhurried")
def test_a_drain_waits_for_retries_and_leaves_what_is_for_later(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    @pq.task(name="work", queue="q")
    def work(fails: bool) -> None:
        if fails and pgqueue.current_job().attempt < 3:
            raise pgqueue.Retry(delay=0.1)

    @pq.task(name="coroutine", queue="q")
    async def coroutine() -> None:
        await asyncio.sleep(0)

    for fails in (False, True, False):
        work.enqueue(fails)
    coroutine.enqueue()
    later = work.options(delay=3600).enqueue(False)
    pq.pause("halted")
    work.options(queue="halted").enqueue(False)
    with running(pq, drain=True, queues=("q", "halted", "empty")) as watched:
        assert watched.join() == 0
    assert count(admin, "archive", "state = 'completed'") == 4
    assert count(admin, "lease") == 0
    assert count(admin, "worker") == 0
    assert [job.id for job in pq.jobs(queue="q")] == [later]


@COLOURS
@pytest.mark.usefixtures("unhurried")
def test_a_stop_releases_what_runs_and_what_waits_without_an_attempt_burned(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @pq.task(name="plain", queue="q")
    def plain() -> None:
        begun.set()
        let_go.wait(PATIENCE)

    @pq.task(name="async", queue="q")
    async def coroutine() -> None:
        begun.set()
        await forever()

    task = coroutine if colour == "async" else plain
    ids = task.enqueue_many([()] * 5)
    places = admin.execute("SELECT id, position FROM pgqueue.job ORDER BY id").fetchall()
    try:
        with running(pq, concurrency=1, grace=0.0) as watched:
            assert begun.wait(PATIENCE)
            watched.worker.stop()
            assert watched.join() == 0
            assert watched.seen(EventName.JOBS_RELEASED)
    finally:
        let_go.set()
    assert (
        places
        == admin.execute(
            "SELECT id, position FROM pgqueue.job WHERE attempt = 0 AND lost = 0 AND lease_id IS NULL ORDER BY id"
        ).fetchall()
    )
    assert [job_id for job_id, _ in places] == ids
    assert count(admin, "lease") == 0
    assert count(admin, "worker") == 0


def test_a_stop_lets_what_runs_end_within_its_grace(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        assert let_go.wait(PATIENCE)

    work.enqueue_many([(), ()])
    with running(pq, concurrency=1, grace=PATIENCE) as watched:
        assert begun.wait(PATIENCE)
        watched.worker.stop()
        watched.wait_for(EventName.WORKER_STOPPING)
        let_go.set()
        assert watched.join() == 0
    assert count(admin, "archive", "attempt = 1") == 1
    assert count(admin, "job", "attempt = 0 AND lease_id IS NULL") == 1


@pytest.mark.usefixtures("unhurried")
def test_a_second_stop_does_not_wait_for_the_grace(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        let_go.wait(PATIENCE)

    work.enqueue()
    try:
        with running(pq, grace=600.0) as watched:
            assert begun.wait(PATIENCE)
            watched.worker.stop()
            watched.wait_for(EventName.WORKER_STOPPING)
            watched.worker.stop()
            assert watched.join() == 0
    finally:
        let_go.set()
    assert count(admin, "job", "attempt = 0 AND lease_id IS NULL") == 1


@pytest.mark.usefixtures("unhurried")
def test_an_idle_worker_stops_at_once(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    with running(pq, queues=("q",), poll=30.0, grace=30.0) as watched:
        assert count(admin, "worker") == 1
        asked = time.monotonic()
        watched.worker.stop()
        assert watched.join() == 0
        assert time.monotonic() - asked < 20
    assert count(admin, "worker") == 0


def test_a_task_that_blocks_the_event_loop_does_not_make_its_worker_hoard_the_queue(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @pq.task(name="work", queue="q")
    async def work(blocks: bool) -> None:
        if blocks:
            begun.set()
            let_go.wait(PATIENCE)

    with running(pq, concurrency=4, poll=0.05) as watched, contextlib.ExitStack() as stack:
        stack.callback(let_go.set)
        work.enqueue(True)
        assert begun.wait(PATIENCE)
        work.enqueue_many([(False,)] * 300)
        # Some rounds of the claimer, told by its own claims or, where it rightly makes none, by the clock.
        with contextlib.suppress(AssertionError):
            wait_until(lambda: len(watched.seen(EventName.JOBS_CLAIMED)) > 10, 2, "ten more claims")
        held = count(admin, "job", "lease_id IS NOT NULL")
        let_go.set()
        wait_for_count(admin, 301, "archive")
    assert held <= 20, f"{held} of 301 jobs are held by a worker that can run 4 at once, and runs one"

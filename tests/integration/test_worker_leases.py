"""A worker in this process and its leases: kept while it lives, given up when they are lost, whoever takes them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.ops import rescue as rescue_ops
from pgqueue.worker import WorkerOptions
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])
LEASE = 4.0
LONG = 2.5 * LEASE
"""How long a job lasts that must outlive its lease twice."""


@pytest.fixture
def beside(database: str) -> Iterator[pgqueue.PgQueue]:
    """The application of a second worker."""
    with pgqueue.PgQueue(database) as other:
        yield other


@pytest.fixture
def silent(database: str) -> Iterator[pgqueue.PgQueue]:
    """An application that wakes nobody, so that it is the first to see what it does."""
    with pgqueue.PgQueue(database, notify=False) as other:
        yield other


def spin() -> None:
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        sum(range(1000))


async def block() -> None:
    time.sleep(LONG)


def hold_a_transaction() -> None:
    """What a handler does inside `transaction.atomic()`: nothing of it is on the worker's connections."""
    time.sleep(LONG)


async def wait() -> None:
    await asyncio.sleep(LONG)


@pytest.mark.parametrize("function", [hold_a_transaction, spin, wait, block], ids=lambda function: function.__name__)
def test_a_job_longer_than_its_lease_is_started_once(
    function: Callable[[], Any], pq: pgqueue.PgQueue, beside: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    for app in (pq, beside):
        app.task(name="long", queue="q")(function)
        app.task(name="short", queue="q")(lambda: None)
    pq.enqueue("long", queue="q")
    with running(pq, lease=LEASE, poll=0.2) as first:
        first.wait_for(EventName.JOB_STARTED, task="long")
        with running(beside, lease=LEASE, poll=0.2) as second:
            wait_for_count(admin, 1, "archive", "task = 'long'")
            assert not second.seen(EventName.JOB_STARTED, task="long")
            assert not second.seen(EventName.JOBS_RESCUED)
            assert not first.seen(EventName.LEASE_LOST)
        assert len(first.seen(EventName.JOB_STARTED, task="long")) == 1
    assert admin.execute("SELECT attempt, lost FROM pgqueue.archive").fetchall() == [(1, 0)]


def test_fifty_long_jobs_of_one_worker_are_all_kept(
    pq: pgqueue.PgQueue, beside: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    tasks = [app.task(name="long", queue="q")(wait) for app in (pq, beside)]
    with running(pq, lease=LEASE, poll=0.2, concurrency=50) as first:
        tasks[0].enqueue_many([()] * 50)
        wait_until(lambda: len(first.seen(EventName.JOB_STARTED)) == 50, PATIENCE, "all fifty run")
        with running(beside, lease=LEASE, poll=0.2) as second:
            wait_for_count(admin, 50, "archive", "attempt = 1 AND lost = 0")
            assert not second.seen(EventName.JOB_STARTED)


def test_a_heartbeat_slower_than_a_third_of_the_lease_is_refused() -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="heartbeat"):
        WorkerOptions(lease=3.0, heartbeat=4.0)
    with pytest.raises(pgqueue.ConfigurationError, match="heartbeat"):
        WorkerOptions(lease=3.0, heartbeat=1.1)
    assert WorkerOptions(lease=3.0, heartbeat=1.0).beat_every == 1.0


@COLOURS
@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_job_whose_lease_is_lost_while_it_runs_is_told_and_not_settled(
    end: str, colour: str, pq: pgqueue.PgQueue, silent: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    told, taken = threading.Event(), threading.Event()

    def stop() -> None:
        told.set()
        assert taken.wait(PATIENCE)
        if end == "raises":
            raise ValueError("too late")

    @pq.task(name="plain", queue="q")
    def plain() -> None:
        job = pgqueue.current_job()
        wait_until(lambda: job.cancelled, PATIENCE, "the job sees that its lease is lost")
        with pytest.raises(pgqueue.LeaseLost):
            job.extend(60)
        stop()

    @pq.task(name="async", queue="q")
    async def coroutine() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stop()

    job_id = (coroutine if colour == "async" else plain).enqueue()
    with running(pq, lease=6.0, poll=600.0) as watched:
        watched.wait_for(EventName.JOB_STARTED)
        pq.pause("q")  # so that this worker does not take the job again
        with admin.transaction():  # or a heartbeat might come between the two
            admin.execute("UPDATE pgqueue.lease SET expires_at = '2020-01-01'")
            assert silent.run(rescue_ops.rescue("q", archive=True), admin).returned == [job_id]
        watched.wait_for(EventName.LEASE_LOST, ids=[job_id])
        assert told.wait(PATIENCE)
        silent.resume("q")
        job = wait_until(lambda: silent.claim("q", lease=3600), PATIENCE, "another owner has the job")[0]
        taken.set()
        wait_until(lambda: watched.worker.threads.idle() and watched.worker.coroutines.idle(), PATIENCE, "it has ended")
    assert admin.execute("SELECT id, lease_id, attempt, lost, cancel_requested FROM pgqueue.job").fetchall() == [
        (job_id, job.token, 2, 1, False)
    ]
    assert count(admin, "archive") == count(admin, "dead_letter") == 0
    silent.complete(job)


def test_a_job_that_ended_after_its_lease_was_taken_is_reported_as_lost(
    pq: pgqueue.PgQueue, beside: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        assert let_go.wait(PATIENCE)

    job_id = work.enqueue()
    # A lease so long that no heartbeat comes during the test: the settle itself has to find out.
    with running(pq, lease=600.0, poll=30.0) as watched:
        assert begun.wait(PATIENCE)
        with admin.transaction():
            admin.execute("UPDATE pgqueue.lease SET expires_at = '2020-01-01'")
            admin.execute("UPDATE pgqueue.job SET lease_id = 4711, attempt = 2")
            admin.execute(
                "INSERT INTO pgqueue.lease (id, queue, job_ids, claimed_at, expires_at)"
                " VALUES (4711, 'q', %s, clock_timestamp(), clock_timestamp() + interval '1 hour')",
                [[job_id]],
            )
        let_go.set()
        watched.wait_for(EventName.LEASE_LOST, ids=[job_id], during="settle")
        assert not watched.seen(EventName.JOBS_SETTLED)
    assert admin.execute("SELECT lease_id, attempt FROM pgqueue.job").fetchall() == [(4711, 2)]


@pytest.mark.usefixtures("unhurried")
def test_a_worker_whose_row_was_deleted_registers_anew_and_keeps_its_job(
    pq: pgqueue.PgQueue, beside: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    let_go = threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        assert let_go.wait(PATIENCE)

    beside.task(name="work", queue="q")(lambda: None)
    work.enqueue()
    with running(pq, lease=LEASE, poll=0.2) as first:
        first.wait_for(EventName.JOB_STARTED)
        with running(beside, lease=LEASE, poll=0.2) as second:
            admin.execute("DELETE FROM pgqueue.worker")
            wait_for_count(admin, 2, "worker")
            [(before,)] = admin.execute("SELECT expires_at FROM pgqueue.lease").fetchall()
            wait_until(
                lambda: count(admin, "lease", f"expires_at > '{before}'::timestamptz + interval '1 s'"),
                PATIENCE,
                "the lease was renewed after the row had gone",
            )
            let_go.set()
            wait_for_count(admin, 1, "archive", "attempt = 1 AND lost = 0")
            assert not second.seen(EventName.JOB_STARTED)
    assert count(admin, "worker") == 0


def test_the_job_of_a_lost_worker_comes_back_though_its_row_has_gone(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    define(pq, "plain", lambda: None).enqueue()
    [job] = pq.claim("q", lease=1.0)
    admin.execute("UPDATE pgqueue.lease SET worker_id = 4711")  # of a worker that has no row, and never had
    with running(pq, lease=LEASE) as watched:
        watched.wait_for(EventName.JOBS_RESCUED, returned=[job.id])
        wait_for_count(admin, 1, "archive", "attempt = 2 AND lost = 1")


def test_two_workers_of_one_name_do_not_touch_each_others_jobs(
    pq: pgqueue.PgQueue, beside: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    let_go = threading.Event()

    def work() -> None:
        assert let_go.wait(PATIENCE)

    for app in (pq, beside):
        app.task(name="work", queue="q")(work)
    options: dict[str, Any] = {"lease": LEASE, "poll": 0.2, "concurrency": 1, "name": "twin"}
    with running(pq, **options) as first, running(beside, **options) as second:
        pq.enqueue("work", queue="q")
        pq.enqueue("work", queue="q")
        for twin in (first, second):
            twin.wait_for(EventName.JOB_STARTED)
        assert first.worker.worker_id != second.worker.worker_id
        assert admin.execute("SELECT DISTINCT name FROM pgqueue.worker").fetchall() == [("twin",)]
        begun = admin.execute("SELECT min(expires_at), max(expires_at) FROM pgqueue.lease").fetchone()
        assert begun is not None
        renewed = f"expires_at > '{begun[1]}'::timestamptz + interval '{LEASE} s'"
        wait_for_count(admin, 2, "lease", renewed)
        let_go.set()
        wait_for_count(admin, 2, "archive", "attempt = 1 AND lost = 0")


def test_a_worker_that_takes_the_name_of_a_lost_one_does_not_keep_its_jobs(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    define(pq, "plain", lambda: None).enqueue()
    [job] = pq.claim("q", lease=1.0)
    [(worker_id,)] = admin.execute(
        "INSERT INTO pgqueue.worker (name, hostname, pid, version, queues, concurrency, lease_seconds)"
        " VALUES ('twin', 'here', 1, '0', '{q}', 1, 1) RETURNING id"
    ).fetchall()
    admin.execute("UPDATE pgqueue.lease SET worker_id = %s", [worker_id])
    with running(pq, lease=LEASE, name="twin") as watched:
        assert watched.worker.worker_id != worker_id
        watched.wait_for(EventName.JOBS_RESCUED, returned=[job.id])
        wait_for_count(admin, 1, "archive", "attempt = 2 AND lost = 1")

"""Unique keys under real workers: what the running job is told, what follows it, and how soon."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.worker import Worker, WorkerOptions
from tests.integration import isolated
from tests.integration.test_worker_isolation import app, wait_for_traces  # noqa: F401 - `app` is a fixture
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

Admin = psycopg.Connection[Any]
KEYED: dict[str, Any] = {"unique_key": "k", "on_conflict": "supersede"}


def states(admin: Admin) -> list[tuple[Any, ...]]:
    return admin.execute("SELECT args::text, state FROM pgqueue.archive ORDER BY id").fetchall()


def test_a_running_job_is_told_that_it_is_superseded_and_the_newer_one_follows_at_once(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    begun, told = threading.Event(), []

    @pq.task(name="work", queue="q", **KEYED)
    def work(number: int) -> None:
        job = pgqueue.current_job()
        begun.set()
        if number == 1:
            wait_until(lambda: job.superseded, PATIENCE, "it is told")
            assert not job.cancelled
            told.append(job.superseded)

    first = work.enqueue(1)
    # Its own next beat would come too late for anybody's patience.
    with running(pq, concurrency=2, lease=PATIENCE * 6) as watched:
        assert begun.wait(PATIENCE)
        work.enqueue(2)
        wait_for_count(admin, 2, "archive")
        watched.wait_for(EventName.JOB_SUPERSEDED, id=first)
        watched.wait_for(EventName.JOBS_FOLLOWED)
        assert not watched.seen(EventName.LOOP_FAILED)
        assert watched.worker.ledger.superseded == set()
    assert states(admin) == [("[1]", "superseded"), ("[2]", "completed")]
    assert told == [True]


def test_an_async_job_is_told_and_not_cancelled(pq: pgqueue.PgQueue, admin: Admin) -> None:
    begun = threading.Event()
    told = []

    @pq.task(name="work", queue="q", **KEYED)
    async def work(number: int) -> None:
        begun.set()
        while number == 1 and not pgqueue.current_job().superseded:
            await asyncio.sleep(0.01)
        told.append(number)

    work.enqueue(1)
    with running(pq, lease=60.0):
        assert begun.wait(PATIENCE)
        work.enqueue(2)
        wait_for_count(admin, 2, "archive")
    assert told == [1, 2]


def test_a_job_in_a_child_process_is_told(app: pgqueue.PgQueue, admin: Admin) -> None:  # noqa: F811
    task = isolated.wait_superseded.options(**KEYED)
    with running(app, queues=("apart",), lease=60.0):
        first = task.enqueue(1)
        wait_for_traces(admin, 1, "begun")
        second = task.enqueue(0)
        wait_for_count(admin, 2, "archive")
    assert [(row[0], row[3]) for row in wait_for_traces(admin, 2, "told")] == [(first, "True"), (second, "False")]


def test_a_superseded_job_that_has_not_started_is_never_started(pq: pgqueue.PgQueue, admin: Admin) -> None:
    """It waits in the worker's buffer, behind a job that takes its time."""
    go, ran = threading.Event(), []

    @pq.task(name="slow", queue="q")
    def slow() -> None:
        go.wait(PATIENCE)

    @pq.task(name="work", queue="q", **KEYED)
    def work(number: int) -> None:
        ran.append(number)

    slow.enqueue()
    with running(pq, concurrency=1, lease=60.0) as watched:
        wait_until(lambda: watched.worker.threads.running(), PATIENCE, "the slow one runs")
        first = work.enqueue(1)
        [held] = watched.worker.ledger.add(pq.claim("q"), time.monotonic() + 60)  # as a claim ahead would bring it
        work.enqueue(2)
        watched.worker.ledger.supersede(held.job.token, [first])
        watched.worker.threads.buffer.put(held)
        go.set()
        wait_for_count(admin, 3, "archive")
    assert ran == [2]
    assert states(admin)[1:] == [("[1]", "superseded"), ("[2]", "completed")]


def test_the_newer_job_follows_though_the_worker_never_heard_of_it(database: str, admin: Admin) -> None:
    """No notifications: the superseded one ends before any heartbeat, and maintenance looks often while something waits."""
    with pgqueue.PgQueue(database, notify=False) as pq:
        begun, go = threading.Event(), threading.Event()

        @pq.task(name="work", queue="q", **KEYED)
        def work(number: int) -> None:
            begun.set()
            assert go.wait(PATIENCE)

        work.enqueue(1)
        with running(pq, lease=300.0):
            assert begun.wait(PATIENCE)
            work.enqueue(2)
            go.set()
            wait_for_count(admin, 2, "archive")
    assert states(admin) == [("[1]", "superseded"), ("[2]", "completed")]


@pytest.mark.parametrize("mode", ["replace", "merge", "supersede"])
def test_a_draining_worker_also_runs_what_waits_behind(mode: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    @pq.task(name="work", queue="q", unique_key="k", on_conflict=mode)
    def work(number: int) -> None:
        if number < 3:
            work.enqueue(number + 1)

    work.enqueue(0)
    assert Worker(pq, WorkerOptions(drain=True)).run() == 0
    assert [row[0] for row in states(admin)] == ["[0]", "[1]", "[2]", "[3]"]
    assert count(admin, "job") == 0


def test_the_newer_job_follows_when_the_worker_of_the_older_is_lost(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran = []

    @pq.task(name="work", queue="q", **KEYED)
    def work(number: int) -> None:
        ran.append(number)

    work.enqueue(1)
    pq.claim("q", lease=1.0)  # by somebody who never comes back
    work.enqueue(2)
    with running(pq) as watched:
        wait_for_count(admin, 2, "archive")
        rescued = watched.wait_for(EventName.JOBS_RESCUED)
        assert rescued.facts["superseded"]
    assert ran == [2]
    assert states(admin) == [("[1]", "superseded"), ("[2]", "completed")]


def test_a_failing_superseded_job_is_not_tried_again_by_a_worker(pq: pgqueue.PgQueue, admin: Admin) -> None:
    begun, ran = threading.Event(), []

    @pq.task(name="work", queue="q", retry=pgqueue.Fixed(0.0), **KEYED)
    def work(number: int) -> None:
        ran.append(number)
        begun.set()
        if number == 1:
            wait_until(lambda: pgqueue.current_job().superseded, PATIENCE, "it is told")
            raise ValueError

    work.enqueue(1)
    with running(pq, concurrency=2):
        assert begun.wait(PATIENCE)
        work.enqueue(2)
        wait_for_count(admin, 2, "archive")
    assert ran == [1, 2]


def test_a_debounced_job_runs_once_after_a_burst(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran = []

    @pq.task(name="work", queue="q")
    def work(number: int) -> None:
        ran.append(number)

    task = work.options(**pgqueue.debounce("k", 0.5, at_most=30))
    with running(pq):
        ids = {task.enqueue(number) for number in range(20)}
        wait_for_count(admin, len(ids), "archive")
    assert ran[-1] == 19
    assert len(ran) == len(ids) < 20


def test_workers_look_at_keys_without_a_scan_when_nobody_uses_them(pq: pgqueue.PgQueue, admin: Admin) -> None:
    """What keys add to maintenance is one look into an empty index."""
    pq.enqueue("other", queue="q", delay=3600)
    with running(pq, queues=("q",)) as watched:
        asked: list[str] = []
        link = watched.loops()["maintenance"].link
        before = link.run
        link.run = lambda op: asked.append(op.__name__) or before(op)
        wait_until(lambda: asked.count("agenda") >= 3, PATIENCE, "three looks")
    assert "follow" not in asked

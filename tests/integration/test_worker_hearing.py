"""What an idle worker hears, and what it does when it cannot."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import rescue
from pgqueue.worker import maintenance
from tests.conftest import url_of
from tests.waiting import wait_until
from tests.workers import running

CLOCKS = 0.05
"""Seconds by which the database's clock and ours may differ in pace."""


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers with a long lease look unasked once a minute only, once they hear."""
    monkeypatch.setattr(maintenance, "QUIET_PERIOD", 60.0)


@pytest.fixture
def started(pq: pgqueue.PgQueue) -> list[float]:
    times: list[float] = []
    pq.task(name="work", queue="q")(lambda: times.append(time.monotonic()))
    return times


def test_a_worker_hears_its_own_greeting(pq: pgqueue.PgQueue, started: list[float]) -> None:
    with running(pq, queues=("q",)) as watched:
        wait_until(watched.worker._hearing, 30, "the greeting")


def test_a_worker_that_hears_nothing_finds_jobs_by_polling(
    database: str, server_url: str, admin: psycopg.Connection[Any]
) -> None:
    # LISTEN on another database succeeds and stays silent, as through a pooler in transaction mode.
    with pgqueue.PgQueue(database, listen_url=url_of(server_url, "postgres")) as deaf:
        ran = threading.Event()
        deaf.task(name="work", queue="q")(ran.set)
        with running(deaf, queues=("q",), poll=0.2) as watched:
            wait_until(
                lambda: watched.worker._listener is not None and watched.worker._listener.started.is_set(), 30, "LISTEN"
            )
            deaf.enqueue("work")
            assert ran.wait(30)
            assert not watched.worker._hearing()


@pytest.mark.usefixtures("rarely")
def test_a_job_that_is_due_within_seconds_starts_when_it_is_due(pq: pgqueue.PgQueue, started: list[float]) -> None:
    with running(pq, queues=("q",), poll=600, lease=600) as watched:
        wait_until(watched.worker._hearing, 30, "the greeting")
        for delay in (0.3, 0.6, 0.9):
            began = time.monotonic()
            pq.enqueue("work", delay=delay)
            wait_until(lambda: started, 30, "the start")
            assert delay - CLOCKS < started.pop() - began < delay + 20


@pytest.mark.usefixtures("rarely")
def test_a_delayed_job_starts_within_50_ms_of_its_time_and_nobody_looks_for_it_meanwhile(
    pq: pgqueue.PgQueue, started: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with time to spare: the luckiest of many is what the queue can do."""
    looks: list[str] = []
    agenda = rescue.agenda
    monkeypatch.setattr(rescue, "agenda", lambda queue: looks.append(queue) or agenda(queue))
    late = []
    with running(pq, queues=("q",), poll=600, lease=600) as watched:
        wait_until(watched.worker._hearing, 30, "the greeting")
        for _ in range(9):
            began = time.monotonic()
            pq.enqueue("work", delay=0.4)
            wait_until(lambda: started, 30, "the start")
            late.append(started.pop() - began - 0.4)
    assert min(late) < 0.05
    assert len(looks) < 9 * 5, "one for the notification, one when it is due, one afterwards, and some room"


@pytest.mark.usefixtures("rarely")
def test_a_retry_that_is_due_within_seconds_starts_when_it_is_due(pq: pgqueue.PgQueue) -> None:
    runs: list[float] = []

    @pq.task(name="again", queue="q", retry=pgqueue.Fixed(0.5))
    def again() -> None:
        runs.append(time.monotonic())
        if len(runs) == 1:
            raise ValueError("once more")

    with running(pq, queues=("q",), poll=600, lease=600) as watched:
        wait_until(watched.worker._hearing, 30, "the greeting")
        pq.enqueue("again")
        wait_until(lambda: len(runs) == 2, 30, "the second run")
    assert 0.5 - CLOCKS < runs[1] - runs[0] < 20


def test_a_rescue_wakes_the_workers(pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]) -> None:
    pq.enqueue("anything", queue="q")
    pq.claim("q")
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("LISTEN pgqueue")
        assert len(pq.rescue("q").returned) == 1
        assert [note.payload for note in listener.notifies(timeout=30, stop_after=1)] == ["q"]


def test_a_running_job_learns_of_its_cancellation_long_before_the_next_heartbeat(pq: pgqueue.PgQueue) -> None:
    begun, stopped = threading.Event(), threading.Event()

    @pq.task(name="long", queue="q")
    def long() -> None:
        begun.set()
        end = time.monotonic() + 60
        while not pgqueue.current_job().cancelled and time.monotonic() < end:
            time.sleep(0.01)
        stopped.set()
        raise RuntimeError("asked to stop")

    with running(pq, queues=("q",), lease=600) as watched:
        wait_until(watched.worker._hearing, 30, "the greeting")
        job_id = pq.enqueue("long")
        assert begun.wait(30)
        assert pq.cancel(job_id) == {job_id: "requested"}
        assert stopped.wait(30)
        wait_until(lambda: pq.jobs() == [], 30, "the end of the job")
    with psycopg.connect(pq.settings.database_url or "") as connection:
        assert connection.execute("SELECT state FROM pgqueue.archive").fetchall() == [("cancelled",)]

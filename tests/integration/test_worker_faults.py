"""A worker in this process whose connections are cut: every part comes back, and nothing is lost or done twice."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, define, running, wait_for_count

LEASE = 10.0
LOOPS = ["claim", "settle", "heartbeat", "maintenance", "listen"]


def cut(admin: psycopg.Connection[Any], *backends: int) -> None:
    """End these server processes, and wait until they are gone."""
    admin.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [list(backends)])
    gone = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = ANY (%s)"
    wait_until(lambda: (admin.execute(gone, [list(backends)]).fetchone() or [False])[0], PATIENCE, "backends are gone")


def cut_all(admin: psycopg.Connection[Any]) -> None:
    """End every session in this database but our own."""
    rows = admin.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    ).fetchall()
    cut(admin, *[pid for (pid,) in rows])


def last_beat(admin: psycopg.Connection[Any]) -> Any:
    [(seen,)] = admin.execute("SELECT max(seen_at) FROM pgqueue.worker").fetchall()
    return seen


def work_resumes(watched: Watched, task: Any, admin: psycopg.Connection[Any]) -> None:
    """One more job is started and settled; a retry of it comes round, so that promotion works too."""
    done = count(admin, "archive")
    task.enqueue(True)
    wait_for_count(admin, done + 1, "archive")


@pytest.fixture
def task(pq: pgqueue.PgQueue) -> Any:
    def work(again: bool) -> None:
        if again and pgqueue.current_job().attempt == 1:
            raise pgqueue.Retry(delay=0.05)

    return define(pq, "plain", work)


@pytest.mark.parametrize("loop", LOOPS)
def test_work_resumes_after_the_connection_of_one_loop_was_cut(
    loop: str, task: Any, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    with running(pq, lease=LEASE, poll=600.0 if loop == "listen" else 0.2) as watched:
        work_resumes(watched, task, admin)
        cut(admin, watched.backend(loop))
        work_resumes(watched, task, admin)
        if loop != "settle":  # which is so quick that it may not even fail
            watched.wait_for(EventName.LOOP_RECOVERED, loop=loop)
        assert all(part._thread.is_alive() for part in watched.loops().values())
    assert watched.status == 0
    assert count(admin, "archive", "lost = 0 AND attempt = 2") == 2


def test_work_resumes_after_every_connection_was_cut_at_once(
    task: Any, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    with running(pq, lease=LEASE, poll=0.2) as watched:
        for _ in range(3):
            work_resumes(watched, task, admin)
            cut_all(admin)
        work_resumes(watched, task, admin)
        assert all(part._thread.is_alive() for part in watched.loops().values())
    assert watched.status == 0


def test_a_job_runs_once_though_every_connection_is_cut_again_and_again_meanwhile(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    starts: list[int] = []
    let_go = threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        starts.append(1)
        assert let_go.wait(PATIENCE)

    work.enqueue()
    with running(pq, lease=6.0, poll=0.2) as watched:
        watched.wait_for(EventName.JOB_STARTED)
        end = time.monotonic() + 8.0
        cuts = 0
        while time.monotonic() < end:
            cut_all(admin)
            cuts += 1
            before = last_beat(admin)
            wait_until(lambda before=before: last_beat(admin) > before, PATIENCE, "a heartbeat comes through")
        let_go.set()
        wait_for_count(admin, 1, "archive", "attempt = 1 AND lost = 0")
    assert cuts > 1
    assert starts == [1]


def test_a_task_that_cuts_every_connection_at_its_end_is_completed_and_not_run_again(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    starts: list[int] = []

    @pq.task(name="work", queue="q")
    def work() -> None:
        starts.append(pgqueue.current_job().id)
        cut_all(admin)

    work.enqueue()
    with running(pq, lease=10.0, poll=0.2):
        wait_for_count(admin, 1, "archive", "attempt = 1 AND lost = 0")
    assert len(starts) == 1


def test_twenty_completions_are_stored_though_one_row_is_gone(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    ready, let_go = threading.Barrier(21), threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        ready.wait(PATIENCE)
        assert let_go.wait(PATIENCE)

    ids = work.enqueue_many([()] * 20)
    with running(pq, lease=30.0, concurrency=20) as watched:
        ready.wait(PATIENCE)
        admin.execute("DELETE FROM pgqueue.job WHERE id = %s", [ids[7]])
        let_go.set()
        wait_for_count(admin, 19, "archive", "state = 'completed'")
        watched.wait_for(EventName.LEASE_LOST, ids=[ids[7]])
    assert count(admin, "job") == 0


def test_jobs_enqueued_while_nobody_listens_are_found_when_the_listener_is_back(
    task: Any, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    with running(pq, poll=600.0) as watched:
        work_resumes(watched, task, admin)
        for _ in range(3):
            cut(admin, watched.backend("listen"))
            task.enqueue(False)  # into the gap, most of the times
            sent = time.monotonic()
            wait_until(lambda: count(admin, "job") == 0, PATIENCE, "the job has run")
            assert time.monotonic() - sent < 30


def test_a_listener_that_cannot_connect_does_not_spin(task: Any, database: str, admin: psycopg.Connection[Any]) -> None:
    with pgqueue.PgQueue(database, listen_url="host=/nowhere dbname=x") as pq:
        define(pq, "plain", lambda again: None)
        with running(pq, poll=0.1) as watched:
            failed = watched.wait_for(EventName.LOOP_FAILED, loop="listen")
            wait_until(lambda: len(watched.seen(EventName.LOOP_FAILED)) > 3, PATIENCE, "it tries again")
            pauses = [event.facts["retry_in"] for event in watched.seen(EventName.LOOP_FAILED, loop="listen")]
            assert min(pauses) > 0.01
            assert "nowhere" in failed.facts["detail"] or failed.facts["error"] == "DatabaseUnavailable"
            task.enqueue(False)  # polling is the floor
            wait_for_count(admin, 1, "archive")


def test_a_claim_that_fails_on_the_server_is_tried_again(
    task: Any, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    with running(pq, poll=0.1) as watched:
        work_resumes(watched, task, admin)
        admin.execute("ALTER TABLE pgqueue.lease RENAME TO lease_gone")
        task.enqueue(False)
        watched.wait_for(EventName.LOOP_FAILED, loop="claim")
        admin.execute("ALTER TABLE pgqueue.lease_gone RENAME TO lease")
        wait_until(lambda: count(admin, "job") == 0, PATIENCE, "the job has run")
        watched.wait_for(EventName.LOOP_RECOVERED, loop="claim")


def test_a_worker_stops_in_time_while_the_database_refuses_it(
    task: Any, pq: pgqueue.PgQueue, server_url: str, admin: psycopg.Connection[Any]
) -> None:
    [(name,)] = admin.execute("SELECT current_database()").fetchall()
    with psycopg.connect(server_url, autocommit=True) as elsewhere, running(pq, poll=0.1, grace=1.0) as watched:
        work_resumes(watched, task, admin)
        elsewhere.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false'.encode())
        try:
            cut_all(admin)
            watched.wait_for(EventName.LOOP_FAILED, loop="claim")
            asked = time.monotonic()
            watched.worker.stop()
            assert watched.join() == 0
            assert time.monotonic() - asked < 20
        finally:
            elsewhere.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true'.encode())

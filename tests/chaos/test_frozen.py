"""Workers that stand still for longer than their lease: stopped by a signal, or by C code that keeps the interpreter."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.chaos.app import TRACES
from tests.chaos.processes import Workers, workers
from tests.waiting import wait_until
from tests.workers import count, running, wait_for_count

LEASE = 4.0
PATIENCE = 60.0
LOST = "lost the lease of jobs"


@pytest.fixture
def fleet(database: str, admin: psycopg.Connection[Any], tmp_path: Path) -> Iterator[Workers]:
    admin.execute(TRACES.encode())
    with workers(database, tmp_path) as started:
        started.app = "tests.chaos.odd_app:pq"
        yield started


def traced(admin: psycopg.Connection[Any], where: str) -> int:
    row = admin.execute(f"SELECT count(*) FROM trace WHERE {where}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_a_worker_that_was_stopped_longer_than_its_lease_starts_nothing_of_its_buffer(
    pq: pgqueue.PgQueue, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    first = fleet.start(lease=LEASE, concurrency=1)
    for _ in range(20):  # so that it learns how short jobs are, and claims ahead
        pq.enqueue("steady", [0], queue="chaos")
    wait_for_count(admin, 20, "archive", seconds=PATIENCE)
    with admin.transaction():
        watched = pq.enqueue("watchful", queue="chaos", using=admin)
        buffered = [pq.enqueue("steady", [0], queue="chaos", using=admin) for _ in range(10)]
    wait_until(lambda: traced(admin, f"job_id = {watched}"), PATIENCE, "the first job runs")
    wait_until(lambda: count(admin, "job", "lease_id IS NOT NULL") == 11, PATIENCE, "the others wait in the buffer")
    first.send_signal(signal.SIGSTOP)
    jobs: list[pgqueue.Job] = []

    def taken() -> bool:
        jobs.extend(pq.claim("chaos", limit=20, lease=600))
        return len(jobs) == 11

    wait_until(taken, PATIENCE, "another owner has all of them")
    assert {(job.attempt, job.lost) for job in jobs} == {(2, 1)}
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: traced(admin, f"job_id = {watched} AND what = 'told'"), PATIENCE, "the running one is told")
    later = pq.enqueue("steady", [0], queue="chaos")
    wait_for_count(admin, 1, "archive", f"id = {later}", seconds=PATIENCE)
    assert traced(admin, f"job_id IN ({', '.join(map(str, buffered))})") == 0
    assert count(admin, "job", "attempt = 2 AND lost = 1 AND lease_id IS NOT NULL") == 11
    wait_until(lambda: LOST in fleet.log.read_text(), PATIENCE, "the worker says that it was too late")
    pq.complete(jobs)
    first.terminate()
    assert first.wait(PATIENCE) == 0


def test_a_job_of_c_code_that_keeps_the_interpreter_beyond_the_lease_is_not_settled_by_it_and_it_says_so(
    pq: pgqueue.PgQueue, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    first = fleet.start(lease=3.0, concurrency=1)
    job_id = pq.enqueue("catastrophe", [6.0], queue="chaos")
    wait_until(lambda: traced(admin, "what = 'start'"), PATIENCE, "the job has started")
    pq.task(name="catastrophe", queue="chaos")(lambda seconds: None)
    pq.task(name="steady", queue="chaos")(lambda seconds: None)
    with running(pq, lease=30.0, poll=0.2):
        wait_for_count(admin, 1, "archive", f"id = {job_id}", seconds=PATIENCE)
        wait_until(lambda: traced(admin, "what = 'end'"), PATIENCE, "the first run has ended")
        wait_until(lambda: LOST in fleet.log.read_text(), PATIENCE, "its worker says that it was too late")
    assert admin.execute("SELECT id, attempt, lost, state FROM pgqueue.archive").fetchall() == [
        (job_id, 2, 1, "completed")
    ]
    later = pq.enqueue("steady", [0], queue="chaos")
    wait_for_count(admin, 1, "archive", f"id = {later}", seconds=PATIENCE)  # by the first one, which lives
    first.terminate()
    assert first.wait(PATIENCE) == 0

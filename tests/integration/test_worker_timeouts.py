"""Plain functions that go on past their timeout: their jobs stay theirs, their slots do not, and too many end the worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.acceptance.command_line import CommandLine
from tests.integration import isolated
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

ROOT = Path(__file__).parents[2]
TIMEOUT = 0.3
WORDS = ("worker", "--app", "tests.integration.isolated", "--queues", "stubborn", "--lease", "5")


@pytest.fixture
def app(database: str, admin: psycopg.Connection[Any]) -> Iterator[pgqueue.PgQueue]:
    admin.execute(isolated.TRACES.encode())
    before = isolated.pq.settings
    isolated.pq.settings = isolated.pq._pool.settings = dataclasses.replace(before, database_url=database)
    yield isolated.pq
    admin.execute("INSERT INTO gate VALUES ('open')")  # whatever came of the test, no thread of it stays
    isolated.pq.close()
    isolated.pq.settings = isolated.pq._pool.settings = before


def number(admin: psycopg.Connection[Any], what: str, where: str = "true") -> int:
    [(found,)] = admin.execute(f"SELECT count(*) FROM trace WHERE what = '{what}' AND {where}".encode()).fetchall()
    return int(found)


def wait_for_traces(admin: psycopg.Connection[Any], count: int, what: str) -> None:
    wait_until(lambda: number(admin, what) == count, PATIENCE, f"{count} × {what}")


@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_job_past_its_timeout_keeps_its_lease_and_loses_its_slot(
    end: str, app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    stubborn = isolated.stubborn.options(timeout=TIMEOUT)
    with running(app, queues=("stubborn", "shared"), concurrency=2, lease=4.0) as watched:
        jobs = stubborn.enqueue_many([(end == "raises",)] * 2)
        for job_id in jobs:
            event = watched.wait_for(EventName.JOB_OVERDUE, id=job_id)
            assert (event.facts["task"], event.facts["timeout"]) == ("stubborn", TIMEOUT)
        wait_for_traces(admin, 2, "start")
        isolated.shared.enqueue_many([()] * 10)
        wait_for_count(admin, 10, "archive", "state = 'completed'")
        # Both leases have been renewed past the end that they had at first, and nobody else has got the jobs.
        [(first_end,)] = admin.execute("SELECT max(expires_at) FROM pgqueue.lease").fetchall()
        over = "SELECT clock_timestamp() > %s::timestamptz"
        wait_until(lambda: admin.execute(over, [first_end]).fetchall() == [(True,)], PATIENCE, "the first leases ended")
        assert number(admin, "start", f"job_id IN ({jobs[0]}, {jobs[1]})") == 2
        assert count(admin, "job", "attempt = 1 AND lease_id IS NOT NULL AND lost = 0") == 2
        wait_until(lambda: watched.worker.threads.running() == 0, PATIENCE, "no thread has anything to do")
        assert len(watched.worker.threads.stuck()) == 2
        # Those that are stuck end after all, and are settled.
        admin.execute("INSERT INTO gate VALUES ('open')")
        if end == "returns":
            wait_for_count(admin, 12, "archive", "state = 'completed' AND attempt = 1")
        else:
            wait_for_count(admin, 2, "job", "attempt = 1 AND run_at IS NOT NULL AND errors->0->>'type' = 'ValueError'")
        wait_until(lambda: not watched.worker.threads._stuck, PATIENCE, "the threads that were replaced have ended")
        isolated.shared.enqueue_many([()] * 10)
        wait_for_count(admin, 20, "archive", "task = 'shared'")
    assert watched.status == 0
    assert not watched.seen(EventName.LEASE_LOST)


def test_a_timeout_that_is_kept_replaces_nothing(app: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    with running(app, queues=("shared",), concurrency=2) as watched:
        slots = list(watched.worker.threads._slots)
        isolated.shared.options(timeout=600).enqueue_many([()] * 20)
        isolated.shared.options(timeout=500).enqueue_many([()] * 20)
        wait_for_count(admin, 40, "archive")
        assert watched.worker.threads._slots == slots
        assert not watched.seen(EventName.JOB_OVERDUE)
        # The outcome is on its way before the thread is through with the job.
        wait_until(lambda: watched.worker.threads.first_deadline() == float("inf"), PATIENCE, "no timeout is watched")


def test_a_stop_does_not_give_back_a_job_that_is_stuck(app: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    isolated.stubborn.options(timeout=TIMEOUT).enqueue()
    with running(app, queues=("stubborn",), grace=0.1, lease=600.0) as watched:
        watched.wait_for(EventName.JOB_OVERDUE)
        watched.worker.stop()
        assert watched.join() == 0
        assert not watched.seen(EventName.JOBS_RELEASED)
    assert count(admin, "job", "attempt = 1 AND lease_id IS NOT NULL") == 1


def test_too_many_stuck_threads_end_the_worker_with_75_once_the_others_have_finished(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any], database: str, tmp_path: Path
) -> None:
    words = (*WORDS, "--concurrency", "2")
    cli = CommandLine(tmp_path, database)
    stubborn = isolated.stubborn.options(timeout=1.5)
    with cli.started(*words, PYTHONPATH=str(ROOT)) as program:
        stubborn.enqueue_many([()] * 2)
        program.wait_for("runs on past its timeout of 1.5 s", 2)
        isolated.lingering.enqueue(8.0)
        stubborn.enqueue()
        wait_for_traces(admin, 4, "start")
        isolated.shared.options(queue="stubborn").enqueue_many([()] * 3)  # nobody is left to run these
        assert program.wait() == 75
        assert "3 threads are stuck past their timeout" in program.errors
    assert number(admin, "end") == 1
    assert count(admin, "archive", "task = 'lingering' AND state = 'completed'") == 1
    assert count(admin, "job", "task = 'stubborn' AND attempt = 1 AND lease_id IS NOT NULL") == 3
    assert count(admin, "job", "task = 'shared' AND attempt = 0") == 3
    admin.execute("INSERT INTO gate VALUES ('open')")
    with cli.started(*words, "--drain", PYTHONPATH=str(ROOT)) as program:
        assert program.wait() == 0, program.errors
    assert count(admin, "archive", "task = 'stubborn' AND state = 'completed' AND attempt = 2 AND lost = 1") == 3
    assert number(admin, "start", "note = 'overlap'") == 0


def test_a_parent_restarts_a_worker_with_too_many_stuck_threads_and_no_two_attempts_overlap(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any], database: str, tmp_path: Path
) -> None:
    words = (*WORDS, "--concurrency", "1")
    isolated.stubborn.options(timeout=1.5).enqueue_many([()] * 4)
    cli = CommandLine(tmp_path, database)
    with cli.started(*words, "--processes", "2", PYTHONPATH=str(ROOT)) as program:
        program.wait_for("ended with status 75, its successor starts")
        admin.execute("INSERT INTO gate VALUES ('open')")
        wait_for_count(admin, 4, "archive", "state = 'completed'")
        assert count(admin, "archive", "attempt > 1 AND lost = 1") >= 2
    assert number(admin, "start", "note = 'overlap'") == 0

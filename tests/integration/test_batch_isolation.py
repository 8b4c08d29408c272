"""Batches in child processes: the same answers, and a job that kills the process dies alone in the end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.batches import rows
from tests.integration import isolated, isolated_batches
from tests.waiting import wait_until
from tests.workers import PATIENCE, running, wait_for_count

Admin = psycopg.Connection[Any]
QUEUES = ("batches",)


@pytest.fixture
def app(database: str, admin: Admin) -> Iterator[pgqueue.PgQueue]:
    """The application of the children, on the database of this test."""
    admin.execute(isolated.TRACES.encode())
    before = isolated.pq.settings
    isolated.pq.settings = isolated.pq._pool.settings = dataclasses.replace(before, database_url=database)
    yield isolated.pq
    isolated.pq.close()
    isolated.pq.settings = isolated.pq._pool.settings = before


def traces(admin: Admin, what: str) -> list[tuple[int, int, int, str]]:
    """Job, attempt, process, and size of the batch, in their order."""
    return admin.execute("SELECT job_id, attempt, pid, note FROM trace WHERE what = %s ORDER BY at", [what]).fetchall()


def wait_for_traces(admin: Admin, number: int, what: str) -> None:
    wait_until(lambda: len(traces(admin, what)) == number, PATIENCE, f"{number} × {what}")


@pytest.mark.parametrize("task", [isolated_batches.answering, isolated_batches.answering_async], ids=["plain", "async"])
def test_each_job_of_a_batch_in_a_child_gets_its_own_outcome(task: Any, app: pgqueue.PgQueue, admin: Admin) -> None:
    kinds = ["nothing", "fail", "snooze", "discard", "dead letter", "nothing"]
    ids = task.enqueue_many([(kind,) for kind in kinds])
    with running(app, queues=QUEUES) as watched:
        wait_for_count(admin, 3, "archive")
        wait_for_count(admin, 1, "dead_letter", f"id = {ids[4]}")
        wait_for_count(admin, 2, "job", "run_at IS NOT NULL")
        watched.wait_for_all(4, EventName.JOB_FAILED)
    assert rows(admin, "id, state", "archive") == [
        (ids[0], "completed"), (ids[3], "discarded"), (ids[5], "completed"),
    ]  # fmt: skip
    assert rows(admin, "id, attempt, errors->0->>'type'") == [(ids[1], 1, "KeyError"), (ids[2], 0, None)]
    started = traces(admin, "start")
    assert [job_id for job_id, *_ in started] == ids
    assert {(attempt, size) for _, attempt, _, size in started} == {(1, "6")}
    [child] = {pid for _, _, pid, _ in started}
    assert child != os.getpid()


def test_a_batch_in_a_child_keeps_results_and_fails_alone_what_it_cannot_read(
    app: pgqueue.PgQueue, admin: Admin
) -> None:
    ids = isolated_batches.returning_many.enqueue_many([(0,), (1,), (2,)])
    admin.execute("UPDATE pgqueue.job SET args = '[]' WHERE id = %s", [ids[0]])
    with running(app, queues=QUEUES):
        found = app.wait(ids[1:], timeout=PATIENCE)
        wait_for_count(admin, 1, "job", f"id = {ids[0]} AND errors->0->>'type' = 'pgqueue.errors.ArgumentsDoNotBind'")
    assert found[ids[2]].value == 2
    assert "set" in str(found[ids[1]].error)
    assert [size for *_, size in traces(admin, "start")] == ["2", "2"]


def test_after_a_child_died_in_the_middle_of_a_batch_its_jobs_run_alone_and_only_the_guilty_one_dies(
    app: pgqueue.PgQueue, admin: Admin
) -> None:
    first, poison, third = isolated_batches.dying_together.enqueue_many([("good",), ("poison",), ("good",)])
    with running(app, queues=QUEUES, breaker_failures=0) as watched:
        wait_for_count(admin, 1, "dead_letter")
        wait_for_count(admin, 2, "archive", "state = 'completed' AND attempt = 2 AND lost = 1")
        watched.wait_for_all(5, EventName.JOB_FAILED, error="WorkerLost")
    assert rows(admin, "id, reason, attempt", "dead_letter") == [(poison, "worker lost", 3)]
    started = sorted((job_id, attempt, size) for job_id, attempt, _, size in traces(admin, "start"))
    assert started == [
        (first, 1, "3"), (first, 2, "1"), (poison, 1, "3"), (poison, 2, "1"), (poison, 3, "1"), (third, 1, "3"),
        (third, 2, "1"),
    ]  # fmt: skip


def test_the_shortest_timeout_of_a_batch_kills_its_child(app: pgqueue.PgQueue, admin: Admin) -> None:
    isolated_batches.late.enqueue()
    isolated_batches.late.options(timeout=0.3).enqueue()
    with running(app, queues=QUEUES):
        wait_for_count(admin, 2, "job", "attempt = 1 AND errors->0->>'type' = 'TimeoutError' AND lost = 0")
    assert len(traces(admin, "start")) == 2


def test_a_cancelled_job_of_a_batch_in_a_child_is_told_alone_and_each_reports_its_progress(
    app: pgqueue.PgQueue, admin: Admin
) -> None:
    ids = isolated_batches.watching.enqueue_many([()] * 3)
    with running(app, queues=QUEUES):
        wait_for_traces(admin, 3, "start")
        said = wait_until(
            lambda: (found := [app.progress(job_id) for job_id in ids]) and all(found) and found, PATIENCE, "reports"
        )
        assert [one.message for one in said if one] == ["number 0", "number 1", "number 2"]
        app.cancel([ids[1]])
        wait_for_count(admin, 3, "archive")
    assert rows(admin, "state", "archive") == [("completed",), ("cancelled",), ("completed",)]
    assert len(traces(admin, "told of 1, all: False")) == 3


def test_an_async_batch_in_a_child_is_cancelled_with_the_last_of_its_jobs(app: pgqueue.PgQueue, admin: Admin) -> None:
    first, second = isolated_batches.cancelled_async.enqueue_many([()] * 2)
    with running(app, queues=QUEUES) as watched:
        wait_for_traces(admin, 2, "start")
        app.cancel([first])
        watched.wait_for(EventName.JOB_CANCEL_REQUESTED, id=first)
        app.cancel([second])
        wait_for_count(admin, 2, "archive", "state = 'cancelled'")
    assert len(traces(admin, "cleaned up")) == 2


def test_what_a_batch_in_a_child_committed_stays_when_its_process_dies(app: pgqueue.PgQueue, admin: Admin) -> None:
    ids = isolated_batches.settling_many.enqueue_many([()] * 3)
    with running(app, queues=QUEUES) as watched:
        wait_for_traces(admin, 1, "own")
        admin.execute("INSERT INTO gate VALUES ('open')")
        wait_for_count(admin, 1, "job", f"id = {ids[0]} AND lost = 1 AND run_at IS NOT NULL")
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker knows")
        assert not watched.seen(EventName.LEASE_LOST)
    assert rows(admin, "id, state, attempt", "archive") == [(ids[1], "completed", 1), (ids[2], "completed", 1)]

"""Results, transaction blocks and progress of jobs in child processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.integration import isolated
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

Admin = psycopg.Connection[Any]
LIMIT = 3_000_000


@pytest.fixture
def app(database: str, admin: Admin) -> Iterator[pgqueue.PgQueue]:
    """The application of the children, on the database of this test."""
    admin.execute(isolated.TRACES.encode())
    before = isolated.pq.settings
    settings = dataclasses.replace(before, database_url=database, max_result_bytes=LIMIT)
    isolated.pq.settings = isolated.pq._pool.settings = settings
    yield isolated.pq
    isolated.pq.close()
    isolated.pq._hearing = None
    isolated.pq.settings = isolated.pq._pool.settings = before


def traces(admin: Admin) -> list[str]:
    return [what for (what,) in admin.execute("SELECT what FROM trace ORDER BY at").fetchall()]


def test_a_result_survives_its_way_out_of_a_child(app: pgqueue.PgQueue) -> None:
    ids = [isolated.returning.enqueue(400_000), isolated.returning_async.enqueue({"a": [None]})]
    unstorable = isolated.returning.enqueue(None)
    with running(app, queues=("apart",)) as watched:
        ended = app.wait([*ids, unstorable], PATIENCE * 2)
        watched.wait_for(EventName.RESULT_MISSING, id=unstorable)
    assert ended[ids[0]].value == '"\\é' * 400_000
    assert ended[ids[1]].value == {"a": [None]}
    assert (ended[unstorable].error or "").startswith("result: a set is not JSON")


@pytest.mark.parametrize("how", ["commits", "by itself", "dies after the commit"])
def test_a_block_in_a_child_that_was_committed_is_a_completion(how: str, app: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = isolated.settling.enqueue(how)
    with running(app, queues=("apart",)) as watched:
        ended = app.wait(job_id, PATIENCE * 2)
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of it")
        assert not watched.seen(EventName.LEASE_LOST)
        assert bool(watched.seen(EventName.JOB_FAILED, outcome="completed")) == (how != "commits")
    assert ended.state is pgqueue.JobState.COMPLETED
    if how != "by itself":
        assert ended.value == "set in the block"
    assert traces(admin) == ["own" if how == "by itself" else "business"]
    assert count(admin, "lease") == 0


@pytest.mark.parametrize(
    ("how", "error"), [("rolls back", "pgqueue.errors.TaskError"), ("dies before the commit", "WorkerLost")]
)
def test_a_block_in_a_child_that_was_not_committed_is_a_failed_attempt(
    how: str, error: str, app: pgqueue.PgQueue, admin: Admin
) -> None:
    job_id = isolated.settling.enqueue(how)
    with running(app, queues=("apart",)):
        wait_for_count(admin, 1, "job", f"id = {job_id} AND run_at IS NOT NULL AND errors->-1->>'type' = '{error}'")
    assert traces(admin) == []
    assert app.result(job_id) is None


def test_a_child_reports_progress_and_its_last_word_is_written(app: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = isolated.reporting.enqueue()
    with running(app, queues=("apart",)) as watched:
        last = wait_until(
            lambda: (said := app.progress(job_id)) and said.message == "step 4999" and said, PATIENCE, "the last report"
        )
        assert last.percent == 4999 / 50
        assert not watched.seen(EventName.LOOP_FAILED)
        admin.execute("INSERT INTO gate VALUES ('open')")
        wait_for_count(admin, 1, "archive")
        assert app.progress(job_id) is None

"""What workers do to the server while they have nothing to do, or one job for all of them."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.worker.link import Link
from tests.waiting import wait_until
from tests.workers import PATIENCE, running, wait_for_count

Admin = psycopg.Connection[Any]
SESSIONS = """
    SELECT state, coalesce(extract(epoch FROM clock_timestamp() - xact_start), 0)::float8, query
    FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'pgqueue' AND pid <> pg_backend_pid()
"""


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_no_transaction_is_open_while_a_task_runs_while_a_worker_listens_or_waits(
    pq: pgqueue.PgQueue, admin: Admin, colour: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        pq.enqueue("later", queue="elsewhere")
        begun.set()
        may_end.wait(PATIENCE)

    if colour == "plain":
        pq.task(name="long", queue="q")(work)
    else:
        import asyncio

        @pq.task(name="long", queue="q")
        async def long() -> None:
            await asyncio.to_thread(work)

    job_id = pq.enqueue("long", queue="q")
    with running(pq, queues=("q",), lease=15.0, heartbeat=0.5):
        assert begun.wait(PATIENCE)
        wait_until(lambda: len(admin.execute(SESSIONS).fetchall()) >= 5, PATIENCE, "every loop is connected")
        looks, last = 0, time.monotonic()
        end = last + 4  # heartbeats, polls and maintenance have their turns
        while time.monotonic() < end:
            rows = admin.execute(SESSIONS).fetchall()
            stood_still, last = time.monotonic() - last > 1, time.monotonic()
            assert len(rows) >= 5
            for state, age, query in rows:
                # "active" is a statement on its way; what waits between two statements must not hold a transaction.
                assert state in ("idle", "active"), (state, query)
                # One that is idle and catches up on what others have invalidated dates that from its last statement.
                assert state == "idle" or age < 3 or stood_still, (state, age, query)
            looks += 1
        assert looks > 10
        may_end.set()
        wait_for_count(admin, 1, "archive", f"id = {job_id} AND attempt = 1")


def test_one_job_for_ten_idle_workers_is_claimed_once_and_costs_each_a_look_or_two(
    pq: pgqueue.PgQueue, database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = 10
    asked: list[str] = []
    whole = Link.run

    def run(link: Link, op: Any) -> Any:
        asked.append(op.__name__)
        return whole(link, op)

    monkeypatch.setattr(Link, "run", run)
    with ExitStack() as stack:
        crowd = []
        for _ in range(workers):
            queue = stack.enter_context(pgqueue.PgQueue(database))
            queue.task(name="t", queue="q")(lambda: None)
            crowd.append(stack.enter_context(running(queue, poll=60.0, concurrency=1)))
        ears = [watched.worker._hearing for watched in crowd]
        wait_until(lambda: all(hears() for hears in ears), PATIENCE, "every worker hears")
        wait_until(lambda: _still(asked), PATIENCE, "nobody claims any more")
        before = asked.count("claim")
        pq.enqueue("t", queue="q")
        wait_for_count(admin, 1, "archive")
        wait_until(lambda: _still(asked), PATIENCE, "nobody claims any more")
        looks = asked.count("claim") - before
        # Each hears of it once; who runs it looks again when it is done.
        assert 1 <= looks <= 2 * workers + 2, looks
        wait_until(
            lambda: sum(watched.worker.settler.settled for watched in crowd) == 1,
            PATIENCE,
            "its worker knows it is done",
        )


def _still(asked: list[str]) -> bool:
    """Half a second without a claim."""
    before = asked.count("claim")
    time.sleep(0.5)
    return asked.count("claim") == before

"""Transaction blocks under fire: every booking once, whenever its worker dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.chaos.blocks_app import BUSINESS
from tests.chaos.processes import workers
from tests.waiting import wait_until
from tests.workers import count

JOBS = 200
CHANCE = 0.03
PATIENCE = 100.0


@pytest.mark.slow
def test_of_many_blocks_none_is_done_twice_while_workers_are_killed(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Each job kills its worker, now and then: in its block, between the block and the commit, after the commit."""
    admin.execute(BUSINESS.encode())
    ids = [
        pq.enqueue("book" if number % 3 else "book_async", [number % 10, CHANCE], queue="chaos", max_attempts=50)
        for number in range(JOBS)
    ]
    with workers(database, tmp_path) as fleet:
        fleet.app = "tests.chaos.blocks_app:pq"

        def over() -> bool:
            fleet.keep(2, lease=2.0)
            return count(admin, "job", "queue = 'chaos'") == 0

        wait_until(over, PATIENCE, "every job has ended")
        deaths = sum(process.returncode == -9 for process in fleet.processes if process.poll() is not None)
        fleet.keep(1, lease=2.0)
        wait_until(lambda: count(admin, "lease") == 0, PATIENCE, "the leases that dead workers left are gone")
    print(f"\n{deaths} workers died")
    assert deaths
    booked = admin.execute("SELECT job_id FROM booking ORDER BY job_id").fetchall()
    assert booked == [(job_id,) for job_id in ids], "every booking once"
    assert admin.execute("SELECT sum(booked) FROM balance").fetchone() == (JOBS,)
    later = admin.execute("SELECT (args->>0)::int8 FROM pgqueue.job WHERE queue = 'later' ORDER BY 1").fetchall()
    assert later == booked, "every follow-up once"
    assert count(admin, "archive", "state = 'completed'") == JOBS
    assert count(admin, "result", "state = 'completed' AND value IS NOT NULL") == JOBS

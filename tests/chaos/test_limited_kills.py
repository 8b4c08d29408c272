"""Limits of queues while worker processes are killed: nobody ever sees more running than the limit, and all is done."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.chaos.app import TRACES
from tests.chaos.processes import workers
from tests.waiting import wait_until
from tests.workers import count

PATIENCE = 100.0
LIMIT, JOBS, KILLS = 3, 60, 3


class Observer:
    """Counts, on a connection of its own and as often as it can, the jobs that are claimed."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.most = 0
        self.looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        with psycopg.connect(self.database, autocommit=True) as connection:
            while not self._stop.is_set():
                self.most = max(self.most, count(connection, "job", "lease_id IS NOT NULL"))
                self.looks += 1


@pytest.mark.slow
def test_never_more_jobs_run_than_the_limit_while_workers_are_killed(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    admin.execute(TRACES.encode())
    pq.limit_queue("chaos", running=LIMIT)
    pq.task(name="steady", queue="chaos")(lambda seconds: None).enqueue_many([(0.02,)] * JOBS)
    kills = 0
    next_kill = time.monotonic() + 2.0

    with workers(database, tmp_path) as fleet, Observer(database) as observer:

        def done() -> bool:
            nonlocal kills, next_kill
            fleet.keep(4, lease=2.0, concurrency=4)
            holders = admin.execute(
                "SELECT w.pid FROM pgqueue.lease AS l JOIN pgqueue.worker AS w ON w.id = l.worker_id ORDER BY l.id"
            ).fetchall()
            if kills < KILLS and holders and time.monotonic() >= next_kill:
                victim = next((one for one in fleet.alive() if one.pid == holders[0][0]), None)
                if victim is not None:
                    victim.kill()
                    victim.wait()
                    kills += 1
                    next_kill = time.monotonic() + 1.0
            return kills == KILLS and count(admin, "job") == 0

        # Jobs for as long as kills are left: each takes the slots of a worker for its lease.
        task = pq.task(name="steady", queue="chaos")(lambda seconds: None)
        wait_until(lambda: kills == KILLS or (task.enqueue(0.02), done())[1], PATIENCE, "workers are killed")
        wait_until(done, PATIENCE, "every job has ended")
    print(f"\n{observer.looks} looks, {kills} kills, at most {observer.most} at once")
    assert observer.most == LIMIT
    assert count(admin, "dead_letter") == 0
    assert count(admin, "archive", "state = 'completed'") >= JOBS

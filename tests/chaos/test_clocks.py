"""Workers and enqueuing processes whose own clock is wrong, or is set back: the database's clock decides, and nothing else.

They run under libfaketime: the one of the system, or of PGQUEUE_TEST_FAKETIME (`.ci/faketime` fetches it).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.chaos.app import TRACES
from tests.chaos.processes import ROOT, Workers, workers
from tests.waiting import wait_until
from tests.workers import count

LEASE = 5.0
PATIENCE = 60.0
SLACK = 20.0
"""Seconds that a busy machine may take; the clocks are wrong by ten minutes and more."""
REST = "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 FROM pgqueue.lease LIMIT 1"
SKEWS = pytest.mark.parametrize("skew", ["+10m", "-10m"])


def faketime() -> str:
    """The library, or the end of the test."""
    given = os.environ.get("PGQUEUE_TEST_FAKETIME")
    found = [Path(given)] if given else sorted(Path("/usr/lib").glob("*/faketime/libfaketime*.so.1"))
    if not found:
        pytest.skip("no libfaketime here: set PGQUEUE_TEST_FAKETIME to what `.ci/faketime FOLDER` prints")
    assert found[0].exists(), f"PGQUEUE_TEST_FAKETIME: there is no {found[0]}"
    return str(found[0])


class Clock:
    """The wrong clock of the processes that are started while it is set. Their monotonic clock is right."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = file
        self.library = faketime()
        self.monkeypatch = monkeypatch

    def set(self, skew: str) -> None:
        """For processes to come, and at once for those that run under this clock."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(skew)
        fresh.replace(self.file)

    def start(self, fleet: Workers, **options: float) -> subprocess.Popen[bytes]:
        """A worker that lives by this clock."""
        with self.monkeypatch.context() as patch:
            for name, value in self.environment().items():
                patch.setenv(name, value)
            return fleet.start(**options)  # type: ignore[arg-type]

    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": self.library,
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def run(self, database: str, *words: str) -> str:
        """What a process of this clock prints."""
        environment = {**os.environ, **self.environment(), "PGQUEUE_DATABASE_URL": database, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(tmp_path / "clock", monkeypatch)


@pytest.fixture
def fleet(database: str, admin: psycopg.Connection[Any], tmp_path: Path) -> Iterator[Workers]:
    admin.execute(TRACES.encode())
    with workers(database, tmp_path) as started:
        started.app = "tests.chaos.odd_app:pq"
        yield started


def now(admin: psycopg.Connection[Any]) -> float:
    """Seconds, by the database's clock."""
    row = admin.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0])


def started(admin: psycopg.Connection[Any], job_id: int, attempt: int = 1) -> float:
    """When this attempt was started, by the database's clock."""
    statement = "SELECT extract(epoch FROM at)::float8 FROM trace WHERE job_id = %s AND attempt = %s AND what = 'start'"
    rows = wait_until(
        lambda: admin.execute(statement, [job_id, attempt]).fetchall(), PATIENCE, f"{attempt} of {job_id}"
    )
    return float(rows[0][0])


@SKEWS
def test_a_process_whose_clock_is_wrong_enqueues_for_the_right_time(
    skew: str, clock: Clock, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    clock.set(skew)
    own = float(clock.run(fleet.database, "-c", "import time; print(time.time())"))
    assert abs(own - now(admin)) > 500, "the clock is not wrong"
    fleet.start(lease=LEASE)
    for delay in (0, 3):
        before = now(admin)
        words = ["enqueue", "steady", "--args", "[0]", "--queue", "chaos", "--delay", str(delay), "--unchecked"]
        job_id = int(clock.run(fleet.database, "-m", "pgqueue", *words))
        assert delay <= started(admin, job_id) - before < delay + SLACK


@SKEWS
def test_a_worker_whose_clock_is_wrong_keeps_leases_and_due_times_by_the_databases_clock(
    skew: str, clock: Clock, fleet: Workers, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    clock.set(skew)
    clock.start(fleet, lease=LEASE, concurrency=3)
    wait_until(lambda: count(admin, "worker"), PATIENCE, "the worker has started")
    before = now(admin)
    at_once = pq.enqueue("long", [2 * LEASE], queue="chaos")
    later = pq.enqueue("steady", [0], queue="chaos", delay=3)
    flaky = pq.enqueue("flaky", queue="chaos", retry=pgqueue.Fixed(3))
    assert started(admin, at_once) - before < SLACK
    [(rest,)] = wait_until(lambda: admin.execute(REST).fetchall(), PATIENCE, "the lease of the long one")
    assert -SLACK < rest <= LEASE
    fleet.start(lease=LEASE, concurrency=3)  # one whose clock is right beside it: neither takes from the other
    wait_until(lambda: count(admin, "worker") == 2, PATIENCE, "both have started")
    assert 3 <= started(admin, later) - before < 3 + SLACK
    assert 3 <= started(admin, flaky, 2) - started(admin, flaky) < 3 + SLACK
    wait_until(lambda: count(admin, "archive") == 3, PATIENCE, "all are done")
    assert count(admin, "archive", f"id = {at_once} AND attempt = 1 AND lost = 0") == 1
    assert count(admin, "archive", "lost > 0") == 0
    assert all(0 <= worker.silent < LEASE + SLACK for worker in pq.workers())


def test_a_clock_that_is_set_back_an_hour_during_a_job_changes_nothing(
    clock: Clock, fleet: Workers, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    clock.set("+0")
    process = clock.start(fleet, lease=LEASE, concurrency=2)
    job_id = pq.enqueue("long", [3 * LEASE], queue="chaos")
    begun = started(admin, job_id)
    clock.set("-1h")
    fleet.start(lease=LEASE)  # who would take the job if its lease were not renewed
    flaky = pq.enqueue("flaky", queue="chaos", retry=pgqueue.Fixed(3))
    assert 3 <= started(admin, flaky, 2) - started(admin, flaky) < 3 + SLACK
    wait_until(lambda: count(admin, "archive", f"id = {job_id}"), PATIENCE, "the long one has ended")
    assert count(admin, "archive", f"id = {job_id} AND attempt = 1 AND lost = 0") == 1
    assert 3 * LEASE - 0.5 < now(admin) - begun < 3 * LEASE + SLACK
    late = pq.enqueue("steady", [0], queue="chaos")
    assert started(admin, late)
    process.terminate()
    assert process.wait(PATIENCE) == 0

"""Jobs that kill their process, among good ones, in real workers: the good ones do not pay for it."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.chaos.poison_app import TRACES
from tests.waiting import wait_until
from tests.workers import count

ROOT = Path(__file__).parents[2]
PATIENCE = 90.0
GOOD = 200
WORDS = ("worker", "--app", "tests.chaos.poison_app", "--queues", "poison", "--lease", "5", "--concurrency", "10")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "segfault", "greedy"])
@pytest.mark.parametrize("number", [1, 3], ids=["alone", "three of them"])
def test_a_job_that_kills_its_process_ends_in_the_dead_letters_and_costs_a_good_one_at_most_one_run_each(
    number: int, kind: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], database: str, tmp_path: Path
) -> None:
    admin.execute(TRACES.encode())
    first, second = [], []
    for step in range(GOOD):
        first.append(pq.enqueue("good_async" if step % 10 == 0 else "good", queue="poison"))
    poison = [
        pq.enqueue(kind, queue="poison", max_attempts=3, retry=pgqueue.Fixed(0), priority=1) for _ in range(number)
    ]
    with CommandLine(tmp_path, database).started(*WORDS, "--processes", "2", PYTHONPATH=str(ROOT)) as program:
        wait_until(lambda: count(admin, "job") == 0, PATIENCE, f"every job has ended: {program.errors}")
        # A job that comes afterwards finds workers that work.
        second.append(pq.enqueue("good", queue="poison"))
        wait_until(lambda: count(admin, "archive") == GOOD + 1, PATIENCE, "a fresh job is completed")
        program.signal(signal.SIGTERM)
        assert program.wait(PATIENCE) == 0
    done = admin.execute("SELECT id FROM pgqueue.archive WHERE state = 'completed' ORDER BY id").fetchall()
    assert [job_id for (job_id,) in done] == first + second
    dead = admin.execute("SELECT id, reason, attempt FROM pgqueue.dead_letter ORDER BY id").fetchall()
    assert dead == [(job_id, "worker lost", 3) for job_id in poison]
    starts = dict(admin.execute("SELECT job_id, count(*) FROM start GROUP BY job_id").fetchall())
    assert max(starts[job_id] for job_id in first) <= 1 + number
    assert all(1 <= starts[job_id] <= 3 for job_id in poison)
    # In threads it takes the worker with it once; from then on only its own child. In a child it never does.
    lost = admin.execute("SELECT lost FROM pgqueue.dead_letter").fetchall()
    assert all(found == 0 if kind == "greedy" else 1 <= found <= number for (found,) in lost)
    if kind == "greedy":
        assert "ended with" not in program.errors


@pytest.mark.slow
@pytest.mark.parametrize("task", ["endless", "sleeping"])
def test_a_worker_that_is_killed_leaves_no_child_behind(
    task: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], database: str, tmp_path: Path
) -> None:
    admin.execute(TRACES.encode())
    pq.enqueue(task, queue="poison")
    with CommandLine(tmp_path, database).started(*WORDS, PYTHONPATH=str(ROOT)) as program:
        [(child,)] = wait_until(lambda: admin.execute("SELECT pid FROM start").fetchall(), PATIENCE, "it has started")
        assert child != program.process.pid
        assert runs(child)
        program.process.kill()
        wait_until(lambda: not runs(child), PATIENCE, "the child is gone")


def runs(pid: int) -> bool:
    """Whether this process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False

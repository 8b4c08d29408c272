"""`pgqueue worker` and `pgqueue status` when everything fails: the line for operators, and the worker that leaves."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import PATIENCE, CommandLine
from tests.waiting import wait_until

APP = """
    import os
    import pathlib
    import time

    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(name="work", queue="images", max_attempts=10_000, retry=pgqueue.Fixed(0.2))
    def work(number):
        if "BROKEN" in os.environ:
            raise ImportError("a library is missing here")
        if pathlib.Path("down").exists():
            raise ConnectionError("nobody listens")
        time.sleep(0.05)
"""


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    line = CommandLine(tmp_path, database)
    line.write("flaky.py", APP)
    return line


def enqueue(pq: pgqueue.PgQueue, count: int) -> None:
    for number in range(count):
        pq.enqueue("work", [number], queue="images", max_attempts=10_000, retry=pgqueue.Fixed(0.2))


def completed(admin: psycopg.Connection[Any]) -> int:
    row = admin.execute("SELECT count(*) FROM pgqueue.archive WHERE state = 'completed'").fetchone()
    return int(row[0]) if row else 0


def test_status_says_which_task_is_held_back_and_why(
    cli: CommandLine, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    cli.write("down", "")
    enqueue(pq, 40)
    with cli.started("worker", "--app", "flaky", "--name", "mill", "--breaker", "5") as program:
        program.wait_for("holding back task work of queue images: 5 attempts in a row failed with ConnectionError")
        line = "task work of queue images is held back by worker 1 (mill) for"
        wait_until(lambda: line in cli.good("status"), PATIENCE, "the line")
        assert "attempts in a row failed with ConnectionError; it tries one job every" in cli.good("status")
        [held] = cli.json("status")[0]["held_back"]
        assert (held["worker"], held["reason"]) == ("mill", "ConnectionError")
        (cli.folder / "down").unlink()
        program.wait_for("task work of queue images works again after")
        wait_until(lambda: completed(admin) == 40, PATIENCE, "all are completed")
        wait_until(lambda: "held back" not in cli.good("status"), PATIENCE, "no such line any more")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_broken_worker_goes_on_alone_and_leaves_with_70_beside_one_that_works(
    cli: CommandLine, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    enqueue(pq, 100)
    words = ("worker", "--app", "flaky", "--lease", "2", "--concurrency", "2", "--breaker", "0")
    with cli.started(*words, "--unfit", "50", BROKEN="1") as sick:
        sick.wait_for("failed with ImportError")
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 34, 60, "it has failed for longer than thirty seconds")
        assert sick.process.poll() is None, "alone it goes on"
        with cli.started(*words) as sound:
            enqueue(pq, 200)
            assert sick.wait(PATIENCE * 2) == 70
            assert "others complete jobs of images" in sick.errors
            assert "Traceback" not in sick.errors
            wait_until(lambda: completed(admin) == 300, PATIENCE * 2, "the other one completes everything")
            sound.signal(signal.SIGTERM)
            assert sound.wait() == 0


def test_a_number_that_is_none_is_refused(cli: CommandLine) -> None:
    assert "breaker_failures must be a whole number" in cli.sentence(2, "worker", "--app", "flaky", "--breaker", "-1")
    assert "unfit_failures must be a whole number" in cli.sentence(2, "worker", "--app", "flaky", "--unfit", "-1")

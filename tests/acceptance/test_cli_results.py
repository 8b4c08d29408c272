"""pgqueue result, and the progress in pgqueue jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pgqueue
from tests.acceptance.command_line import PATIENCE, CommandLine
from tests.waiting import wait_until

APP = """
    import time

    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(queue="images", keep_result=600)
    def double(number):
        return {"text": "é\\n", "double": 2 * number}


    @pq.task(queue="images", keep_result=600)
    def unstorable():
        return {1, 2}


    @pq.task(queue="images")
    def slow():
        pgqueue.current_job().progress(40, "resized")
        while not pgqueue.current_job().cancelled:
            time.sleep(0.05)
        raise RuntimeError
"""


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    line = CommandLine(tmp_path, database)
    line.write("sums.py", APP)
    return line


def enqueue(pq: pgqueue.PgQueue, task: str, *args: object) -> int:
    return pq.enqueue(f"sums.{task}", args, queue="images")


def test_results_are_shown_for_people_and_for_programs(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    good, bad = enqueue(pq, "double", 21), enqueue(pq, "unstorable")
    with cli.started("worker", "--app", "sums", "--drain") as program:
        assert program.wait() == 0
        assert f"the result of job {bad} (sums.unstorable) on queue images cannot be stored" in program.errors
    [first, second] = cli.json("result", str(good), str(bad))
    assert first["id"] == good
    assert (first["state"], first["value"]) == ("completed", {"text": "é\n", "double": 42})
    assert first["kept_until"]
    assert (second["state"], second["value"]) == ("completed", None)
    assert second["error"].startswith("result: a set is not JSON")
    table = cli.good("result", str(good)).splitlines()
    assert "completed" in table[1]
    assert '"double":42' in table[1]
    assert len(table) == 2


def test_what_has_not_completed_is_status_one(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    waiting = enqueue(pq, "double", 1)
    status, output, errors = cli.run("result", str(waiting), "999999", "--json")
    assert (status, errors) == (1, "")
    assert [(row["id"], row["state"]) for row in json.loads(output)] == [(waiting, "live"), (999999, "ended")]
    assert cli.sentence(2, "result", "1", "1") == "an id is named twice"
    assert cli.run("result", "one")[0] == 2
    assert cli.run("result", str(waiting), "--wait", "0.2")[0] == 1


def test_waiting_on_the_command_line_ends_with_the_job(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    job_id = enqueue(pq, "double", 5)
    with cli.started("worker", "--app", "sums"):
        [row] = cli.json("result", str(job_id), "--wait", "60")
    assert row["value"]["double"] == 10


def test_progress_is_seen_while_a_job_runs(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    job_id = enqueue(pq, "slow")
    with cli.started("worker", "--app", "sums"):
        wait_until(lambda: pq.progress(job_id), PATIENCE, "the job reports")
        [row] = cli.json("jobs")
        assert row["progress"]["percent"] == 40.0
        assert row["progress"]["message"] == "resized"
        assert "40 % resized" in cli.good("jobs")
        status, output, _ = cli.run("result", str(job_id), "--json")
        [row] = json.loads(output)
        assert (status, row["state"], row["percent"], row["message"]) == (1, "live", 40.0, "resized")
        pq.cancel(job_id)
        wait_until(lambda: pq.jobs() == [], PATIENCE, "the job is cancelled")
    [row] = json.loads(cli.run("result", str(job_id), "--json")[1])
    assert (row["state"], row["percent"]) == ("cancelled", None)

"""pgqueue schedules, and the worker that ticks them."""

from __future__ import annotations

from pathlib import Path

import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.conftest import execute

SCHEDULED = """
    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.schedule("* * * * * *", name="every second", args=["tick"])
    @pq.task(queue="images")
    def note(text):
        with open("marks", "a") as file:
            file.write(f"{text} {pgqueue.current_job().scheduled_for}\\n")
"""
ASYNC = """
    import pgqueue

    pq = pgqueue.AsyncPgQueue()


    @pq.task(queue="letters", priority=3)
    async def send(to): ...
"""


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    line = CommandLine(tmp_path, database)
    line.write("scheduled.py", SCHEDULED)
    line.write("letters.py", ASYNC)
    return line


def test_a_worker_ticks_the_schedules_of_its_code_and_one_with_no_schedules_does_not(cli: CommandLine) -> None:
    with cli.started("worker", "--app", "scheduled", "--no-schedules") as idle:
        idle.wait_for("started: queues")
        assert cli.json("schedules", "list") == []
        with cli.started("worker", "--app", "scheduled", "--processes", "2") as busy:
            cli.wait_for_mark("tick 20", times=3)
            busy.wait_for("schedule every second ticked: jobs")
        assert "ticked" not in idle.errors
    ticks = [mark for mark in cli.marks() if mark.startswith("tick")]
    assert len(ticks) == len(set(ticks))
    [shown] = cli.json("schedules", "list")
    assert (shown["name"], shown["state"], shown["in_code"]) == ("every second", "ticking", True)
    assert "code of live workers" in cli.sentence(1, "schedules", "remove", "every second")


def test_an_operator_makes_changes_pauses_runs_and_removes_a_schedule(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    add = ("schedules", "add", "nightly", "shop.note", "--cron", "30 2 * * *", "--tz", "Europe/Berlin")
    words = (*add, "--args", '["x"]', "--app", "shop", "--priority", "4", "--missed", "all")
    assert cli.good(*words) == "schedule nightly is made\n"
    assert cli.good(*words) == "schedule nightly is there already\n"
    [shown] = cli.json("schedules", "list")
    assert shown["next_at"] is not None
    assert (shown["task"], shown["queue"], shown["priority"], shown["missed"]) == ("shop.note", "images", 4, "all")
    table = cli.good("schedules", "list")
    assert "30 2 * * * Europe/Berlin" in table
    assert (
        cli.good("schedules", "change", "nightly", "--every", "3600", "--no-overlap") == "schedule nightly is changed\n"
    )
    assert "every 3600 s" in cli.good("schedules", "list")
    assert cli.good("schedules", "pause", "nightly") == "schedule nightly is paused\n"
    assert cli.json("schedules", "list")[0]["state"] == "paused"
    job_id = int(cli.good("schedules", "run", "nightly"))
    assert "while its last one lives" in cli.sentence(1, "schedules", "run", "nightly")
    [job] = pq.claim("images")
    assert (job.id, job.args, job.priority, job.headers["schedule"]) == (job_id, ["x"], 4, "nightly")
    assert cli.good("schedules", "resume", "nightly") == "schedule nightly is not paused\n"
    assert cli.good("schedules", "remove", "nightly") == "schedule nightly is removed\n"
    assert cli.good("schedules", "list").splitlines()[-1] == "(none)"


def test_tasks_of_an_async_application_are_known_too(cli: CommandLine) -> None:
    cli.good("schedules", "add", "s", "letters.send", "--every", "60", "--args", '["ada"]', "--app", "letters")
    [shown] = cli.json("schedules", "list")
    assert (shown["queue"], shown["priority"], shown["every"]) == ("letters", 3, 60.0)
    refused = cli.sentence(1, "schedules", "add", "t", "letters.send", "--every", "60", "--app", "letters")
    assert "missing a required argument" in refused


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["add", "s", "t", "--unchecked"], 2, "one of the two"),
        (["add", "s", "t", "--cron", "* * *", "--unchecked"], 2, "five fields"),
        (["add", "s", "t", "--cron", "* * * * *", "--tz", "Europe/Berln", "--unchecked"], 2, "similar: Europe/Berlin"),
        (["add", "s", "t", "--cron", "* * * * *"], 2, "--unchecked"),
        (["add", "s", "t", "--every", "0", "--unchecked"], 2, "between 1"),
        (["add", "s", "t", "--every", "5", "--args", "{}", "--unchecked"], 2, "JSON list"),
        (["add", "s", "t", "--every", "5", "--args", '["\\u0000"]', "--unchecked"], 2, "--args"),
        (["add", "s", "t", "--every", "5", "--missed", "never", "--unchecked"], 2, "missed must be"),
        (["add", "a,b", "t", "--every", "5", "--unchecked"], 2, "schedule name"),
        (["add", "s", "shop.nothing", "--every", "5", "--app", "shop"], 1, "no task named"),
        (["change", "known"], 2, "change what?"),
        (["change", "known", "--cron", "61 * * * *"], 2, "bad minute"),
        (["change", "knwon", "--every", "5"], 1, "similar: known"),
        (["pause", "knwon"], 1, "similar: known"),
        (["resume", "knwon"], 1, "similar: known"),
        (["run", "knwon"], 1, "similar: known"),
        (["remove", "knwon"], 1, "similar: known"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], status: int, said: str, cli: CommandLine, pq: pgqueue.PgQueue
) -> None:
    pq.add_schedule("known", "t", every=60)
    assert said in cli.sentence(status, "schedules", *words)
    assert execute(str(cli.database), "SELECT name FROM pgqueue.schedule") == [("known",)]

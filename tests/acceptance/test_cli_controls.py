"""The commands for pauses, ageing, expiry and cancellation in bulk."""

from __future__ import annotations

from pathlib import Path

import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    return CommandLine(tmp_path, database)


def test_a_task_is_paused_shown_and_resumed(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    job_id = pq.enqueue("shop.note", queue="images")
    assert cli.good("pause", "images", "--task", "shop.note") == "task shop.note of queue images is paused\n"
    assert pq.claim("images") == []
    assert "task shop.note of queue images is paused\n" in cli.good("status")
    [status] = cli.json("status")
    assert [pause["task"] for pause in status["paused_tasks"]] == ["shop.note"]
    assert cli.good("resume", "images", "--task", "shop.note") == "task shop.note of queue images is not paused\n"
    assert [job.id for job in pq.claim("images")] == [job_id]


def test_a_pause_with_an_end_says_it(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("shop.note", queue="images")
    assert cli.good("pause", "images", "--seconds", "600") == "queue images is paused for 600 s\n"
    assert "queue images is paused until " in cli.good("status")
    assert "is paused until 2" in cli.good("pause", "images", "--until", "2999-01-31T18:00Z")
    [status] = cli.json("status")
    assert status["paused_until"].startswith("2999-01-31")
    for words, part in (
        (("--until", "tomorrow"), "--until must be a time"),
        (("--until", "2999-01-31T18:00"), "must end in a time zone"),
        (("--seconds", "-1"), "must not be negative"),
        (("--seconds", "1", "--until", "2999-01-31T18:00Z"), "not both"),
        (("--task", ""), "non-empty"),
    ):
        assert part in cli.sentence(2, "pause", "images", *words)


def test_ageing_is_set_shown_and_switched_off(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("shop.note", queue="images")
    moving = "jobs that wait in queue images move up by one priority every 90 s\n"
    assert cli.good("ageing", "images", "90") == moving
    assert moving in cli.good("status")
    assert cli.json("status")[0]["ageing"] == 90
    assert cli.good("ageing", "images", "0") == "jobs that wait in queue images keep their priority\n"
    assert cli.json("status")[0]["ageing"] is None
    assert "at least 0.1" in cli.sentence(2, "ageing", "images", "0.01")
    assert "there is no queue 'imags'" in cli.sentence(1, "ageing", "imags", "5")


def test_an_enqueue_may_expire(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    cli.good("enqueue", "--unchecked", "shop.note", "--queue", "images", "--expires-in", "60")
    [job] = pq.claim("images")
    assert job.expires_in is not None
    assert job.expires_in <= 60
    assert "expires_in must be" in cli.sentence(2, "enqueue", "--unchecked", "shop.note", "--expires-in", "0")


def test_a_selection_is_cancelled_after_a_look(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    for name in ("shop.note", "shop.note", "shop.fail"):
        pq.enqueue(name, queue="images")
    pq.claim("images")
    assert cli.good("cancel", "--task", "shop.note", "--dry-run") == "1 job(s) wait, 1 run\n"
    assert cli.json("cancel", "--task", "shop.note", "--dry-run") == [{"waiting": 1, "running": 1}]
    assert "add --yes" in cli.sentence(2, "cancel", "--task", "shop.note")
    done = cli.good("cancel", "--task", "shop.note", "--yes")
    assert done == "1 job(s) cancelled, 1 running one(s) asked to stop\n"
    assert cli.json("cancel", "--all", "--yes") == [{"cancelled": 1, "requested": 1}]
    assert cli.json("cancel", "--queue", "images", "--ordering-key", "k") == [{"cancelled": 0, "requested": 0}]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "which jobs?"),
        (("1", "--all"), "ids alone"),
        (("1", "--dry-run"), "ids alone"),
        (("--all", "--task", "x"), "leave out the rest"),
        (("--ordering-key", "a", "--concurrency-key", "b"), "not both"),
        (("--ordering-key", ""), "must not be empty"),
        (("--task", "a,b"), "no comma"),
    ],
)
def test_a_selection_that_makes_no_sense_is_a_usage_mistake(
    cli: CommandLine, words: tuple[str, ...], part: str
) -> None:
    assert part in cli.sentence(2, "cancel", *words)


def test_an_unknown_queue_is_not_cancelled(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("shop.note", queue="images")
    assert "there is no queue 'imags'" in cli.sentence(1, "cancel", "--queue", "imags", "--yes")

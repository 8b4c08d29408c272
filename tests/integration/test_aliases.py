"""Aliases: a task that was renamed still runs the jobs that carry its old name, in every kind of runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.schedules import ago, tick
from tests.workers import count, define, running, wait_for_count

Admin = psycopg.Connection[Any]


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_job_with_the_old_name_of_a_task_is_run_by_its_new_function(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ran: list[int] = []
    define(pq, colour, ran.append, name="new.name", aliases=["old.name", "older.name"])
    with pgqueue.PgQueue(pq.settings.database_url) as old:  # a process of the release before
        for number, name in enumerate(("older.name", "old.name", "new.name")):
            old.enqueue(name, [number], queue="q")
    with running(pq) as worker:
        wait_for_count(admin, 3, "archive", "state = 'completed'")
        assert {event.facts["task"] for event in worker.seen(pgqueue.EventName.JOB_STARTED)} == {
            "older.name", "old.name", "new.name",
        }  # fmt: skip
    assert sorted(ran) == [0, 1, 2]
    assert count(admin, "archive", "task = 'old.name'") == 1


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_failure_names_the_stored_name(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    define(pq, colour, lambda: 1 / 0, name="new.name", aliases=["old.name"])
    pq.enqueue("old.name", queue="q", max_attempts=1)  # known here: it gets its new name
    with pgqueue.PgQueue(pq.settings.database_url) as old:
        job_id = old.enqueue("old.name", queue="q", max_attempts=1)
    with running(pq) as worker:
        worker.wait_for(pgqueue.EventName.JOB_FAILED, id=job_id, task="old.name")
        worker.wait_for(pgqueue.EventName.JOB_FAILED, task="new.name")
        wait_for_count(admin, 2, "dead_letter")
    assert count(admin, "dead_letter", "task = 'old.name'") == 1


def test_ticks_under_the_old_name_are_run_by_the_new_function_and_new_schedules_get_the_new_name(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ran: list[int] = []
    with pgqueue.PgQueue(pq.settings.database_url) as old:  # a process of the release before
        old.add_schedule("stored", "old.name", every=3600, queue="q", args=[1])
    define(pq, "plain", ran.append, name="new.name", aliases=["old.name"])
    pq.add_schedule("added", "old.name", every=3600, args=[2])
    assert [(schedule.name, schedule.task) for schedule in pq.schedules()] == [
        ("added", "new.name"), ("stored", "old.name"),
    ]  # fmt: skip
    tick(pq)
    for name in ("stored", "added"):
        ago(admin, name, 3601)
    with running(pq):
        wait_for_count(admin, 2, "archive", "state = 'completed'")
    assert sorted(ran) == [1, 2]


ISOLATED = """
    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(queue="images", isolation="process", name="new.name", aliases=["old.name"])
    def renamed(text):
        with open("marks", "a") as file:
            file.write(f"{text} {pgqueue.current_job().task}\\n")
"""


def test_an_isolated_job_with_the_old_name_runs_in_a_child(tmp_path: Path, database: str, pq: pgqueue.PgQueue) -> None:
    cli = CommandLine(tmp_path, database)
    cli.write("renamed.py", ISOLATED)
    pq.enqueue("old.name", ["ran"], queue="images")
    with cli.started("worker", "--app", "renamed", "--drain") as program:
        assert program.wait() == 0, program.errors
    assert cli.marks() == ["ran old.name"]


def one() -> None: ...


def two() -> None: ...


def test_a_name_that_two_tasks_want_is_refused_at_the_definition_whichever_comes_first() -> None:
    for first, second in (
        ({"name": "a", "aliases": ["b"]}, {"name": "b"}),
        ({"name": "b"}, {"name": "a", "aliases": ["b"]}),
        ({"name": "a", "aliases": ["c"]}, {"name": "b", "aliases": ["c"]}),
    ):
        pq = pgqueue.PgQueue()
        pq.task(**first)(one)  # type: ignore[call-overload]
        with pytest.raises(pgqueue.DuplicateTask, match="two tasks are named"):
            pq.task(**second)(two)  # type: ignore[call-overload]
        assert list(pq.tasks) == [first["name"]]


def test_a_task_that_is_defined_again_after_a_reload_keeps_its_aliases_and_may_change_them() -> None:
    pq = pgqueue.PgQueue()
    pq.task(name="a", aliases=["b", "c"])(one)
    again = pq.task(name="a", aliases=["b"])(one)
    assert pq.tasks.find("b") is again
    with pytest.raises(pgqueue.UnknownTask):
        pq.tasks.find("c")
    pq.task(name="c")(two)


@pytest.mark.parametrize("aliases", ["old.name", ["a"], [""], [5], 5, ["x,y"]])
def test_aliases_that_make_no_sense_are_refused(aliases: Any) -> None:
    with pytest.raises(pgqueue.ConfigurationError):
        pgqueue.PgQueue().task(name="a", aliases=aliases)(one)

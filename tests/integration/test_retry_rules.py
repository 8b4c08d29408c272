"""Retry rules in a worker: threads, the event loop and child processes decide alike, and a broken rule loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.workers import count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
RULES: dict[type[BaseException], Any] = {
    ConnectionError: pgqueue.Fixed(3600),
    OSError: "dead",
    KeyError: "discard",
    TimeoutError: pgqueue.Snooze(3600),
}
KINDS = {
    "reset": ConnectionResetError,
    "denied": PermissionError,
    "key": KeyError,
    "late": TimeoutError,
    "other": ValueError,
}


def fail(kind: str) -> None:
    raise KINDS[kind](kind)


def fates(admin: Admin) -> dict[str, str]:
    """What became of each, by its argument."""
    rows = admin.execute("""
        SELECT args->>0, 'dead' FROM pgqueue.dead_letter
        UNION ALL SELECT args->>0, state FROM pgqueue.archive
        UNION ALL SELECT args->>0, format('attempt %s, in %s min', attempt, round(extract(epoch FROM run_at - now()) / 60))
                  FROM pgqueue.job""").fetchall()
    return dict(rows)


EXPECTED = {
    "reset": "attempt 1, in 60 min",
    "denied": "dead",
    "key": "discarded",
    "late": "attempt 0, in 60 min",
    "other": "attempt 1, in 120 min",
}


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_an_exception_is_dealt_with_by_its_class(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, colour, fail, retry=pgqueue.ByException(RULES, default=pgqueue.Fixed(7200)))
    task.enqueue_many([(kind,) for kind in KINDS])
    with running(pq) as worker:
        wait_for_count(admin, 0, "job", "position IS NOT NULL")
        assert not worker.seen(pgqueue.EventName.TASK_POLICY_FAILED)
    assert fates(admin) == EXPECTED
    assert count(admin, "dead_letter", "reason LIKE 'PermissionError%'") == 1


ISOLATED = """
    import time

    import pgqueue

    pq = pgqueue.PgQueue()


    def broken(job, error):
        raise RuntimeError("the policy")


    rules = pgqueue.ByException({TimeoutError: "discard", KeyError: "discard"}, default=pgqueue.Fixed(3600))


    def fail(kind):
        raise KeyError(kind)


    def sleep(kind):
        time.sleep(600)


    @pq.task(queue="images", name="broken", isolation="process", retry=broken, max_attempts=1)
    def fail_and_have_no_policy(kind):
        raise KeyError(kind)


    pq.task(queue="images", name="fail", isolation="process", retry=rules)(fail)
    pq.task(queue="images", name="sleep", isolation="process", retry=rules, timeout=0.5)(sleep)
"""


def test_rules_hold_in_child_processes_also_for_what_is_killed_at_its_timeout(
    tmp_path: Path, database: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    cli = CommandLine(tmp_path, database)
    cli.write("isolated_rules.py", ISOLATED)
    for name in ("fail", "broken"):
        pq.enqueue(name, [name], queue="images", max_attempts=1)
    pq.enqueue("sleep", ["sleep"], queue="images", timeout=0.5)
    with cli.started("worker", "--app", "isolated_rules", "--drain") as program:
        assert program.wait(90) == 0, program.errors
    assert fates(admin) == {"fail": "discarded", "sleep": "discarded", "broken": "dead"}
    assert "the retry policy of task broken failed" in program.errors


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_policy_function_decides_and_a_broken_one_is_told_and_loses_no_job(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    def policy(job: pgqueue.Job, error: BaseException) -> Any:
        return {"reset": "dead", "key": 3600, "denied": "nonsense"}.get(str(error.args[0])) or 1 / 0

    task = define(pq, colour, fail, retry=policy)
    for kind in ("reset", "key"):
        task.enqueue(kind)
    stored = task.options(retry=pgqueue.Fixed(7200))
    ids = [stored.enqueue(kind) for kind in ("denied", "other")]
    with running(pq) as worker:
        wait_for_count(admin, 0, "job", "position IS NOT NULL")
        for job_id in ids:
            worker.wait_for(pgqueue.EventName.TASK_POLICY_FAILED, id=job_id, task="work", queue="q", attempt=1)
        assert len(worker.seen(pgqueue.EventName.TASK_POLICY_FAILED)) == 2
    later = "attempt 1, in 120 min"
    assert fates(admin) == {"reset": "dead", "key": "attempt 1, in 60 min", "denied": later, "other": later}


def test_a_worker_that_does_not_know_the_task_goes_by_the_stored_policy(pq: pgqueue.PgQueue, admin: Admin) -> None:
    define(pq, "plain", fail, retry=pgqueue.ByException({ValueError: "dead"}, default=pgqueue.Fixed(7200))).enqueue("x")
    with pgqueue.PgQueue(pq.settings.database_url) as other:
        other.fail(other.claim("q"), ValueError("no"))
    assert fates(admin) == {"x": "attempt 1, in 120 min"}


def test_what_comes_back_joins_its_prioritys_line_when_it_is_due(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, "plain", fail, retry=pgqueue.ByException({ValueError: 3600}))
    high = task.options(priority=5).enqueue("other")
    with running(pq):
        wait_for_count(admin, 1, "job", "run_at IS NOT NULL")
    first, second = task.enqueue("a"), task.options(priority=5).enqueue("b")
    admin.execute("UPDATE pgqueue.job SET run_at = now() WHERE run_at IS NOT NULL")
    assert pq.promote("q") == [high]
    assert [job.id for job in pq.claim("q", limit=10)] == [second, high, first]


def test_failures_with_a_rule_open_the_circuit_and_answers_do_not(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, "plain", fail, retry=pgqueue.ByException({KeyError: "discard", ConnectionError: 3600}))
    task.enqueue_many([("key",)] * 10)
    with running(pq, concurrency=1, breaker_failures=3) as worker:
        wait_for_count(admin, 10, "archive", "state = 'discarded'")
        assert not worker.seen(pgqueue.EventName.TASK_CIRCUIT_OPENED)
        task.enqueue_many([("reset",)] * 10)
        worker.wait_for(pgqueue.EventName.TASK_CIRCUIT_OPENED, task="work")

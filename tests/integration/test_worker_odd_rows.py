"""Rows that enqueue would never write: each concerns itself alone, and everything beside it goes on."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.worker import execution
from tests.workers import count, running, wait_for_count

MATES = 30
ROW = {"queue": "q", "task": "good", "max_attempts": 2}

UNREADABLE: dict[str, dict[str, Any]] = {
    "unknown task": {"task": "nobody.knows"},
    "unknown task with a long name": {"task": "x" * 10_000},
    "empty task name": {"task": ""},
    "task name with a line break": {"task": "good\n"},
    "module path as a task name": {"task": "os.system", "args": '["true"]'},
    "surplus arguments": {"args": "[1, 2, 3]"},
    "missing arguments": {"task": "needy"},
    "unknown keyword": {"kwargs": '{"colour": "red"}'},
    "async task with surplus arguments": {"task": "good async", "args": "[1]"},
    "args null": {"args": "null"},
    "args scalar": {"args": "3"},
    "args object": {"args": '{"0": 1}'},
    "args text": {"args": '"abc"'},
    "kwargs list": {"kwargs": "[]"},
    "kwargs null": {"kwargs": "null"},
    "kwargs scalar": {"kwargs": "true"},
    "NUL escape": {"task": "needy", "args": r'["a\u0000b"]'},
    "lone surrogate": {"task": "needy", "args": r'["\ud800"]'},
    "5,000 digits": {"task": "needy", "args": f"[{'1' * 5000}]"},
    "nested too deep": {"task": "needy", "args": "[" * 1000 + "]" * 1000},
    "equal keys": {"task": "needy", "args": '[{"a": 1, "a": 2}]'},
}

SPENT: dict[str, dict[str, Any]] = {
    "attempts at the maximum": {"attempt": 2},
    "attempts beyond the maximum": {"attempt": 7},
    "no attempts allowed": {"max_attempts": 0},
    "a negative number of attempts allowed": {"max_attempts": -1},
}

STRANGE: dict[str, dict[str, Any]] = {
    "attempt at the end of its type": {"attempt": 2**31 - 1, "max_attempts": 2**31 - 1},
    "lost at the end of its type": {"lost": 2**31 - 1},
    "negative attempt": {"attempt": -5},
    "lowest priority of its type": {"priority": -(2**15)},
    "highest priority of its type": {"priority": 2**15 - 1},
    "timeout NaN": {"timeout": "NaN"},
    "timeout infinite": {"timeout": "Infinity"},
    "timeout negative": {"timeout": -1},
    "policy that is none": {"retry": '{"kind": "magic"}'},
    "policy that is a list": {"retry": "[]"},
    "headers that are a list": {"headers": "[]"},
    "errors null": {"errors": "null"},
    "errors an object": {"errors": "{}"},
    "errors a number": {"errors": "7"},
    "created in the year infinity": {"created_at": "infinity"},
    "created before time": {"created_at": "-infinity"},
    "due before time": {"run_at": "-infinity", "position": None},
    "due, and in line": {"run_at": "2020-01-01"},
}


def insert(admin: psycopg.Connection[Any], **columns: Any) -> int:
    row = {**ROW, **columns}
    names = ", ".join(row)
    values = ", ".join(f"%({name})s" for name in row)
    statement = f"INSERT INTO pgqueue.job ({names}) VALUES ({values}) RETURNING id"
    found = admin.execute(statement.encode(), row).fetchone()
    assert found is not None
    return int(found[0])


@pytest.fixture
def good(pq: pgqueue.PgQueue) -> pgqueue.Task[[], None]:
    """The task of the batch mates; others beside it, for rows that want them."""

    @pq.task(name="good", queue="q")
    def good() -> None: ...

    @pq.task(name="good async", queue="q")
    async def good_async() -> None: ...

    @pq.task(name="needy", queue="q")
    def needy(value: object) -> None: ...

    @pq.task(name="bad", queue="q")
    def bad() -> None:
        raise ValueError("as always")

    return good


def test_what_cannot_be_called_is_recorded_retried_with_a_delay_and_buried(
    good: pgqueue.Task[[], None], pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert execution.UNKNOWN_TASK_DELAY >= 5.0
    monkeypatch.setattr(execution, "UNKNOWN_TASK_DELAY", 600.0)  # all of them shall be seen waiting at once
    names = {}
    for name, columns in UNREADABLE.items():
        good.enqueue()
        names[insert(admin, **columns)] = name
    good.enqueue_many([()] * MATES)
    mates = len(UNREADABLE) + MATES
    with running(pq, concurrency=4) as watched:
        wait_for_count(admin, mates, "archive", "state = 'completed' AND attempt = 1")
        wait_for_count(admin, len(names), "job", "run_at IS NOT NULL")
        rows = admin.execute(
            "SELECT id, attempt, lost, jsonb_array_length(errors), run_at > created_at + interval '9 min' FROM pgqueue.job"
        ).fetchall()
        assert {names[row[0]]: row[1:] for row in rows} == dict.fromkeys(UNREADABLE, (1, 0, 1, True))
        admin.execute("UPDATE pgqueue.job SET run_at = '2020-01-01'")
        wait_for_count(admin, len(names), "dead_letter", "attempt = 2 AND jsonb_array_length(errors) = 2")
        assert watched.thread.is_alive()
    assert count(admin, "job") == count(admin, "lease") == 0
    reasons = admin.execute("SELECT id, reason FROM pgqueue.dead_letter").fetchall()
    kinds = {names[job_id]: reason.split(":")[0].rsplit(".", 1)[-1] for job_id, reason in reasons}
    assert kinds["unknown task"] == kinds["module path as a task name"] == kinds["empty task name"] == "UnknownTask"
    assert kinds["surplus arguments"] == kinds["missing arguments"] == kinds["unknown keyword"] == "ArgumentsDoNotBind"
    assert kinds["args null"] == kinds["kwargs list"] == kinds["5,000 digits"] == "PayloadDecodeError"


def test_a_row_without_attempts_left_is_buried_and_not_run(
    good: pgqueue.Task[[], None], pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    runs: list[int] = []
    pq.task(name="watched", queue="q")(lambda: runs.append(pgqueue.current_job().id))
    names = {insert(admin, task="watched", **columns): name for name, columns in SPENT.items()}
    good.enqueue_many([()] * MATES)
    with running(pq):
        wait_for_count(admin, len(SPENT), "dead_letter")
        wait_for_count(admin, MATES, "archive", "state = 'completed'")
    rows = admin.execute("SELECT id, jsonb_array_length(errors) FROM pgqueue.dead_letter").fetchall()
    assert {names[job_id]: errors for job_id, errors in rows} == dict.fromkeys(SPENT, 1)
    assert runs == []
    # Out of the dead letters they come back with attempts that allow a run.
    pq.redrive()
    with running(pq):
        wait_for_count(admin, MATES + len(SPENT), "archive", "state = 'completed' AND attempt = 1")
    assert sorted(runs) == sorted(names)


@pytest.mark.parametrize("task", ["good", "bad"])
@pytest.mark.parametrize("name", list(STRANGE))
def test_a_strange_row_does_not_keep_its_mates_from_running(
    name: str, task: str, good: pgqueue.Task[[], None], pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    strange = insert(admin, task=task, **STRANGE[name])
    good.enqueue_many([()] * MATES)
    with running(pq, concurrency=2, lease=4.0):
        wait_for_count(admin, MATES, "archive", f"id <> {strange} AND attempt = 1")
        # What comes later, too: the strange row has been claimed, and remembered, by now.
        good.enqueue_many([()] * MATES)
        wait_for_count(admin, 2 * MATES, "archive", f"id <> {strange} AND attempt = 1")
        # And it has an exit itself: it has ended, or waits for a retry.
        stuck = "lease_id IS NOT NULL OR run_at IS NULL OR run_at <= clock_timestamp()"
        wait_for_count(admin, 0, "job", f"id = {strange} AND ({stuck})")


@pytest.mark.parametrize("name", list(STRANGE))
def test_a_strange_row_of_a_lost_worker_does_not_keep_the_others_from_their_rescue(
    name: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    others = [pq.enqueue("good", queue="q") for _ in range(3)]
    strange = insert(admin, **STRANGE[name])
    token = 4711
    admin.execute(
        "INSERT INTO pgqueue.lease (id, queue, job_ids, claimed_at, expires_at)"
        " VALUES (%s, 'q', %s, clock_timestamp(), '2020-01-01')",
        [token, [strange, *others]],
    )
    admin.execute("UPDATE pgqueue.job SET lease_id = %s, position = coalesce(position, id)", [token])
    rescued = pq.rescue("q")
    assert sorted([*rescued.returned, *rescued.dead, *rescued.cancelled]) == sorted([strange, *others])
    assert count(admin, "lease") == 0


@pytest.mark.parametrize("name", list(STRANGE))
def test_a_strange_row_that_was_claimed_does_not_break_the_claims_after_it(
    name: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    insert(admin, **STRANGE[name])
    for _ in range(4):
        job_id = pq.enqueue("good", queue="q")
        assert job_id in {job.id for job in pq.claim("q", limit=10)}


@pytest.mark.parametrize("name", list(STRANGE))
def test_an_operator_can_look_at_a_strange_row_and_cancel_it(
    name: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    strange = insert(admin, **STRANGE[name])
    assert [job.id for job in pq.jobs(queue="q")] == [strange]
    assert [status.queue for status in pq.status()] == ["q"]
    pq.promote("q")
    assert pq.cancel(strange) == {strange: "cancelled"}


def test_a_running_job_whose_lease_row_is_gone_is_adopted_and_run(
    good: pgqueue.Task[[], None], pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    orphan = good.enqueue()
    [job] = pq.claim("q", lease=3600)
    admin.execute("DELETE FROM pgqueue.lease")
    with running(pq) as watched:
        watched.wait_for(pgqueue.EventName.JOBS_ADOPTED, ids=[orphan])
        wait_for_count(admin, 1, "archive", "attempt = 2 AND lost = 1")
    with pytest.raises(pgqueue.LeaseLost):
        pq.complete(job)

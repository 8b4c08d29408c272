"""Results: kept with the completion or not at all, for as long as the task says, and never in the way of finished work."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgqueue
from pgqueue import roles
from pgqueue.ops import result as result_ops
from pgqueue.result import keep
from tests.logins import login, roles_of_test
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
State = pgqueue.JobState


def rows(admin: Admin) -> list[tuple[Any, ...]]:
    return admin.execute("SELECT id, state, value::text, error FROM pgqueue.result ORDER BY id").fetchall()


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_what_a_handler_returns_is_its_result(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    values = [None, True, 0, -1.5, "é😀", [], {"a": [1, {"b": None}]}]
    task = define(pq, colour, lambda number: values[number], keep_result=True)
    ids = [task.enqueue(number) for number in range(len(values))]
    with running(pq):
        ended = pq.wait(ids, PATIENCE)
    assert [ended[job_id].value for job_id in ids] == values
    assert {one.state for one in ended.values()} == {State.COMPLETED}
    assert count(admin, "lease") == 0
    one = pq.result(ids[2])
    assert one is not None
    assert one.finished_at is not None
    assert one.expires_at is not None
    assert one.expires_at - one.finished_at == timedelta(days=1)
    assert "value" not in repr(one)


async def test_results_for_asyncio(database: str, pq: pgqueue.PgQueue) -> None:
    task = define(pq, "async", lambda number: number + 1, keep_result=60)
    job_id = task.enqueue(1)
    async with pgqueue.AsyncPgQueue(database) as other:
        assert await other.result(job_id) is None
        with running(pq):
            assert (await other.wait(job_id, PATIENCE)).value == 2
            assert (await other.wait([job_id]))[job_id].value == 2
        found = await other.result(job_id)
        assert found is not None
        assert found.value == 2
        assert await other.progress(job_id) is None


def test_a_task_that_keeps_nothing_leaves_no_row_and_a_result_without_value(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, "plain", lambda: 5)
    job_id = task.enqueue()
    assert pq.result(job_id) is None, "it has not ended"
    with running(pq):
        ended = pq.wait(job_id, PATIENCE)
    assert (ended.state, ended.error, ended.expires_at) == (State.COMPLETED, None, None)
    with pytest.raises(pgqueue.ResultMissing, match=f"job {job_id} has no result: none was kept"):
        _ = ended.value
    assert rows(admin) == []
    assert pq.result(10**12) is None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({1, 2}, "result: a set is not JSON"),
        ({"a": [object()]}, "result.a[0]: a object is not JSON"),
        ("x" * 200, "result: the values are at least 202 bytes as JSON and the limit is 100,"),
        ("\0", "result: the text holds a NUL"),
        ("\ud800", "result: the text holds a lone surrogate"),
        (float("nan"), "result: NaN"),
        ((1, 2), "result: a tuple would arrive as a list"),
    ],
)
@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_result_that_cannot_be_stored_never_fails_finished_work(
    colour: str, value: Any, why: str, database: str, admin: Admin
) -> None:
    with pgqueue.PgQueue(database, max_result_bytes=100) as pq:
        task = define(pq, colour, lambda: value, keep_result=60)
        job_id = task.enqueue()
        with running(pq) as watched:
            ended = pq.wait(job_id, PATIENCE)
            watched.wait_for(pgqueue.EventName.RESULT_MISSING, id=job_id, queue="q", task="work")
    assert ended.state is State.COMPLETED
    assert ended.error is not None
    assert ended.error.startswith(why)
    with pytest.raises(pgqueue.ResultMissing, match="result"):
        _ = ended.value
    assert count(admin, "archive", "state = 'completed'") == 1


def test_a_result_as_large_as_the_limit_is_kept(database: str) -> None:
    with pgqueue.PgQueue(database, max_result_bytes=100) as pq:
        task = define(pq, "plain", lambda size: "x" * size, keep_result=60)
        ids = [task.enqueue(98), task.enqueue(99)]
        with running(pq):
            ended = pq.wait(ids, PATIENCE)
    assert ended[ids[0]].value == "x" * 98
    assert ended[ids[1]].value_json is None


class Odd:
    """Does harm when it is looked at."""

    @property
    def __class__(self) -> Any:
        raise SystemExit


def odd_text() -> Any:
    return type("Text", (str,), {"__eq__": lambda *_: 1 / 0, "__hash__": str.__hash__})("x")


@pytest.mark.parametrize("make", [Odd, lambda: [Odd()], odd_text], ids=["object", "in a list", "text"])
def test_a_value_that_does_harm_when_it_is_looked_at_has_no_result(make: Callable[[], Any]) -> None:
    kept = keep(make(), seconds=1, max_bytes=100)
    assert kept.value_json is None
    assert kept.error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_every_json_value_comes_back_as_it_was_returned(value: Any) -> None:
    kept = keep(value, seconds=1, max_bytes=10**6)
    assert kept.error is None
    read = pgqueue.JobResult(
        id=1, state=State.COMPLETED, value_json=kept.value_json, error=None, finished_at=None, expires_at=None
    )
    assert read.value == value
    assert type(read.value) is type(value)


def test_every_other_end_leaves_an_entry_too(database: str, admin: Admin) -> None:
    """Also where nothing is archived, and where those who end the job know nothing of its task."""
    with pgqueue.PgQueue(database, archive=False) as pq, pgqueue.PgQueue(database, archive=False) as stranger:
        stop = {"wait": False}

        def body(how: str) -> None:
            if how == "cancelled while running":
                stop["wait"] = True
                while not pgqueue.current_job().cancelled:
                    time.sleep(0.01)
                raise RuntimeError
            raise {"discard": pgqueue.Discard("of no use"), "dead": pgqueue.DeadLetter("hopeless")}[how]

        task = define(pq, "plain", body, keep_result=60)
        discarded, dead = task.enqueue("discard"), task.enqueue("dead")
        running_job = task.options(priority=-1).enqueue("cancelled while running")
        with running(pq):
            assert pq.wait(discarded, PATIENCE).state is State.DISCARDED
            assert pq.wait(dead, PATIENCE).state is State.DEAD
            wait_until(lambda: stop["wait"], PATIENCE, "it runs")
            stranger.cancel(running_job)
            assert pq.wait(running_job, PATIENCE).state is State.CANCELLED
        waiting = task.enqueue("never")
        stranger.cancel(waiting)
        lost = task.options(max_attempts=1).enqueue("never")
        lost_and_cancelled = task.options(max_attempts=1).enqueue("never")
        stranger.claim("q", limit=2, lease=0.1)
        stranger.cancel(lost_and_cancelled)
        wait_until(lambda: any(stranger.rescue("q")), PATIENCE, "its lease has ended")
        found = {job_id: (state, error) for job_id, state, _, error in rows(admin)}
    assert found == {
        discarded: ("discarded", "of no use"),
        dead: ("dead", "pgqueue.outcome.DeadLetter: hopeless"),
        running_job: ("cancelled", "cancelled while running"),
        waiting: ("cancelled", "cancelled while waiting"),
        lost: ("dead", "worker lost"),
        lost_and_cancelled: ("cancelled", "cancelled while running, worker lost"),
    }


def test_a_redriven_job_has_no_result_while_it_lives_and_then_the_new_one(pq: pgqueue.PgQueue, admin: Admin) -> None:
    fail = [True]

    def body() -> str:
        if fail[0]:
            raise pgqueue.DeadLetter("hopeless")
        return "done"

    job_id = define(pq, "plain", body, keep_result=60).enqueue()
    with running(pq):
        assert pq.wait(job_id, PATIENCE).state is State.DEAD
    fail[0] = False
    pq.redrive(ids=job_id)
    assert pq.result(job_id) is None
    with running(pq):
        ended = pq.wait(job_id, PATIENCE)
    assert (ended.state, ended.value) == (State.COMPLETED, "done")
    assert rows(admin) == [(job_id, "completed", '"done"', None)]


def test_a_completion_that_does_not_happen_leaves_no_result(pq: pgqueue.PgQueue, admin: Admin) -> None:
    """The entry is under the fence of the completion: a job that is lost meanwhile has none."""
    seen = []

    def body() -> str:
        job = pgqueue.current_job()
        seen.append(job.attempt)
        if job.attempt == 1:
            pq.pause("q")
            admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 s'")
            wait_until(
                lambda: any(pq.rescue("q")) or not count(admin, "job", "lease_id IS NOT NULL"), PATIENCE, "rescued"
            )
        return f"attempt {job.attempt}"

    job_id = define(pq, "plain", body, keep_result=60).enqueue()
    with running(pq) as watched:
        watched.wait_for(pgqueue.EventName.LEASE_LOST)
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the first attempt is over")
        assert rows(admin) == []
        pq.resume("q")
        assert pq.wait(job_id, PATIENCE).value == "attempt 2"
    assert seen == [1, 2]


def test_results_expire_and_are_removed_in_pieces(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, "plain", lambda: 1, keep_result=60)
    job_id = task.enqueue()
    with running(pq):
        assert pq.wait(job_id, PATIENCE).value == 1
    admin.execute("UPDATE pgqueue.result SET expires_at = now() - interval '1 s'")
    found = pq.result(job_id)
    assert found is not None, "the archive still knows"
    assert (found.state, found.value_json) == (State.COMPLETED, None)
    admin.execute(
        "INSERT INTO pgqueue.result (id, queue, state, finished_at, expires_at)"
        " SELECT 1000000 + n, 'q', 'completed', now(), now() - interval '1 s' FROM generate_series(1, 25000) AS n"
    )
    admin.execute(
        "INSERT INTO pgqueue.result (id, queue, state, finished_at, expires_at)"
        " VALUES (5, 'q', 'completed', now(), now() + interval '1 hour')"
    )
    assert pq.run(result_ops.prune())
    assert count(admin, "result") == 25_002 - result_ops.PRUNE * result_ops.ROUNDS
    assert not pq.run(result_ops.prune())
    assert rows(admin) == [(5, "completed", None, None)]


def test_a_worker_prunes_by_itself(pq: pgqueue.PgQueue, admin: Admin) -> None:
    admin.execute(
        "INSERT INTO pgqueue.result (id, queue, state, finished_at, expires_at)"
        " SELECT n, 'q', 'completed', now(), now() - interval '1 s' FROM generate_series(1, 22000) AS n"
    )
    admin.execute(
        "INSERT INTO pgqueue.progress (id, queue, token, attempt, message, updated_at)"
        " VALUES (1, 'q', 1, 1, '', now() - interval '1 hour')"
    )
    define(pq, "plain", lambda: 1)
    with running(pq):
        wait_for_count(admin, 0, "result")
        wait_for_count(admin, 0, "progress")


def test_workers_declare_which_tasks_keep_results(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    define(pq, "plain", print, keep_result=timedelta(hours=1))
    with running(pq):
        assert admin.execute("SELECT task, seconds FROM pgqueue.kept_task").fetchall() == [("work", 3600.0)]
    with pgqueue.PgQueue(database) as other:
        define(other, "plain", print)
        with running(other):
            assert count(admin, "kept_task") == 0


@pytest.mark.parametrize("wrong", ["1", 0, -1, float("nan"), 10**12, timedelta(0)])
def test_a_time_that_is_none_is_refused_where_the_task_is_defined(wrong: Any, pq: pgqueue.PgQueue) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="keep_result"):
        define(pq, "plain", print, keep_result=wrong)


def test_a_single_call_cannot_keep_its_result(pq: pgqueue.PgQueue) -> None:
    task = define(pq, "plain", print)
    with pytest.raises(pgqueue.ConfigurationError, match="keep_result belongs to the task"):
        task.options(keep_result=True)


def test_each_role_sees_of_results_what_it_needs(database: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = define(pq, "plain", lambda: "secret", keep_result=60).enqueue()
    with running(pq):
        pq.wait(job_id, PATIENCE)
    plain = pq.enqueue("t", queue="p")
    pq.fail(pq.claim("p"), pgqueue.DeadLetter("secret"))
    with roles_of_test(database) as prefix:
        for with_payloads, kind in ((False, "worker"), (False, "producer"), (False, "reader"), (True, "reader")):
            roles.create(database, prefix=prefix, with_payloads=with_payloads)
            with login(database, f"{prefix}_{kind}") as url, pgqueue.PgQueue(url) as other:
                ended = other.wait([job_id, plain], PATIENCE)
                sees = kind != "reader" or with_payloads
                assert ended[job_id].state is State.COMPLETED
                assert ended[job_id].value_json == ('"secret"' if sees else None)
                knows = kind == "worker" or with_payloads
                assert ended[plain].state is (State.DEAD if knows else None)
                assert sees or "secret" not in json.dumps([one.error for one in ended.values()])

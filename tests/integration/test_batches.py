"""Batch handlers in a worker of this process: what they are called with and when, and what becomes of each job."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.batches import LONG, Seen, define, rows
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

Admin = psycopg.Connection[Any]
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])


# When it is called, and with what


@COLOURS
def test_a_handler_gets_its_jobs_in_the_order_of_their_places_and_no_more_than_it_wants(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen = Seen()
    work = define(pq, colour, seen, batch=100, batch_wait=0.3)
    work.enqueue_many((number,) for number in range(250))
    work.options(priority=1).enqueue(1000)
    with running(pq, concurrency=1) as watched:
        wait_for_count(admin, 251, "archive", "state = 'completed' AND attempt = 1")
        watched.wait_for_all(3, EventName.BATCH_STARTED, task="work", queue="q")
    assert seen.all == [1000, *range(250)]
    assert max(seen.sizes) == 100
    assert len(seen.calls) == 3, seen.sizes
    assert [event.facts["count"] for event in watched.seen(EventName.BATCH_STARTED)] == seen.sizes


def test_the_jobs_of_a_batch_know_themselves(pq: pgqueue.PgQueue, admin: Admin) -> None:
    found: list[tuple[Any, ...]] = []

    def body(jobs: pgqueue.Batch) -> None:
        for job in jobs:
            facts = (job.id, job.queue, job.task, job.attempt, job.max_attempts, job.priority, job.headers)
            found.append((*facts, job.args, job.kwargs, job.cancelled, job.created_at is not None, job.token > 0))
            job.extend(60)
        jobs.extend(60)

    work = define(pq, "plain", body, max_attempts=7)
    job_id = work.options(headers={"tenant": "é"}, priority=3).enqueue(1, {"two": 2}, three=[3])
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    facts = (job_id, "q", "work", 1, 7, 3, {"tenant": "é"}, [1, {"two": 2}], {"three": [3]}, False, True, True)
    assert found == [facts]


def test_a_full_batch_is_called_at_once_and_a_job_that_comes_later_completes_it(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen = Seen()
    work = define(pq, "plain", seen, batch=3, batch_wait=LONG)
    work.enqueue_many([(0,), (1,), (2,), (3,), (4,)])
    with running(pq) as watched:
        wait_for_count(admin, 3, "archive")
        wait_until(lambda: len(watched.worker.ledger) == 2, PATIENCE, "two jobs wait for a third")
        work.enqueue(5)
        wait_for_count(admin, 6, "archive")
    assert seen.calls == [[0, 1, 2], [3, 4, 5]]


def test_a_batch_that_is_not_full_is_called_when_its_first_job_has_waited_long_enough(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen = Seen()
    work = define(pq, "plain", seen, batch_wait=0.4)
    times: dict[str, float] = {}
    pq.events.subscribe(lambda event: times.setdefault(event.name, time.monotonic()))
    work.enqueue_many([(0,), (1,), (2,)])
    with running(pq):
        wait_for_count(admin, 3, "archive")
    assert seen.calls == [[0, 1, 2]]
    assert times[EventName.BATCH_STARTED] - times[EventName.JOBS_CLAIMED] >= 0.39


@COLOURS
def test_what_has_gathered_while_every_runner_was_busy_fills_one_batch(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen, entered, go_on = Seen(), threading.Event(), threading.Event()

    def body(jobs: pgqueue.Batch) -> None:
        seen(jobs)
        entered.set()
        go_on.wait(PATIENCE)

    work = define(pq, colour, body, batch=100)
    work.enqueue(-1)
    with running(pq, concurrency=1):
        assert entered.wait(PATIENCE)
        work.enqueue_many((number,) for number in range(100))
        go_on.set()
        wait_for_count(admin, 101, "archive")
    assert seen.calls == [[-1], list(range(100))]


def test_a_call_takes_one_slot_and_a_worker_holds_no_more_than_its_slots_can_take(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen, go_on = Seen(), threading.Event()

    def body(jobs: pgqueue.Batch) -> None:
        seen(jobs)
        go_on.wait(PATIENCE)

    define(pq, "plain", body).enqueue_many((number,) for number in range(100))
    try:
        with running(pq, concurrency=2, poll=0.1) as watched:
            wait_until(lambda: len(seen.calls) == 2, PATIENCE, "two calls")
            claims = len(watched.seen(EventName.JOBS_CLAIMED))
            wait_until(lambda: watched.worker.claimer._wake.is_set() or claims, PATIENCE, "the claimer looks again")
            assert seen.sizes == [10, 10]
            assert len(watched.worker.ledger) <= 30  # what is in work, and one batch that was under way
            go_on.set()
            wait_for_count(admin, 100, "archive")
    finally:
        go_on.set()


def test_two_tasks_of_one_queue_are_called_apart(pq: pgqueue.PgQueue, admin: Admin) -> None:
    first, second, plain = Seen(), Seen(), []
    one = define(pq, "plain", first, name="one", batch_wait=0.3)
    two = define(pq, "async", second, name="two", batch_wait=0.3)
    three = pq.task(name="three", queue="q")(plain.append)
    for number in range(5):
        one.enqueue(number)
        two.enqueue(10 + number)
        three.enqueue(20 + number)
    with running(pq):
        wait_for_count(admin, 15, "archive", "state = 'completed'")
    assert first.calls == [[0, 1, 2, 3, 4]]
    assert second.calls == [[10, 11, 12, 13, 14]]
    assert sorted(plain) == [20, 21, 22, 23, 24]


def test_a_worker_that_drains_does_not_wait_for_more(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen = Seen()
    define(pq, "plain", seen, batch_wait=LONG).enqueue_many([(0,), (1,)])
    with running(pq, drain=True) as watched:
        assert watched.join() == 0
    assert seen.all == [0, 1]
    assert count(admin, "archive", "state = 'completed'") == 2


def test_a_batch_never_holds_two_jobs_of_one_ordering_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen = Seen()
    work = define(pq, "plain", seen, batch_wait=0.05, ordering_key=lambda text: text[0])
    work.enqueue_many([("a1",), ("a2",), ("b1",), ("b2",), ("a3",)])
    with running(pq):
        wait_for_count(admin, 5, "archive", "state = 'completed'")
    assert all(len({text[0] for text in call}) == len(call) for call in seen.calls)
    told = seen.all
    assert [text for text in told if text[0] == "a"] == ["a1", "a2", "a3"]
    assert [text for text in told if text[0] == "b"] == ["b1", "b2"]


# What becomes of each job


@COLOURS
def test_each_job_of_a_batch_gets_its_own_outcome(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(jobs: pgqueue.Batch) -> None:
        for job in jobs:
            match job.args[0]:
                case "complete":
                    job.complete()
                case "fail":
                    job.fail(KeyError("lost in a batch"))
                case "fail with text":
                    job.fail("out of paper")
                case "retry":
                    job.retry(delay=1000, reason="not yet")
                case "snooze":
                    job.snooze(2000)
                case "discard":
                    job.discard("no use")
                case "dead letter":
                    job.dead_letter("no hope")

    kinds = ["complete", "fail", "fail with text", "retry", "snooze", "discard", "dead letter", "nothing"]
    ids = dict(zip(kinds, define(pq, colour, body).enqueue_many([(kind,) for kind in kinds]), strict=True))
    with running(pq) as watched:
        wait_for_count(admin, 4, "job", "run_at IS NOT NULL")
        wait_for_count(admin, 3, "archive")
        wait_for_count(admin, 1, "dead_letter")
        watched.wait_for_all(6, EventName.JOB_FAILED)
    left = {
        row[0]: row[1:] for row in rows(admin, "id, attempt, round(extract(epoch FROM run_at - now())/100), errors")
    }
    assert [(left[ids[kind]][0], int(left[ids[kind]][1])) for kind in kinds if ids[kind] in left] == [
        (1, 36), (1, 36), (1, 10), (0, 20),
    ]  # fmt: skip
    assert left[ids["fail"]][2][0]["type"] == "KeyError"
    assert (left[ids["fail with text"]][2][0]["message"], left[ids["snooze"]][2]) == ("out of paper", None)
    archived = rows(admin, "id, state, reason", "archive")
    assert archived == [
        (ids["complete"], "completed", None), (ids["discard"], "discarded", "no use"), (ids["nothing"], "completed", None),
    ]  # fmt: skip
    assert rows(admin, "id, reason", "dead_letter") == [(ids["dead letter"], "pgqueue.outcome.DeadLetter: no hope")]
    told = {event.facts["id"]: event.facts["outcome"] for event in watched.seen(EventName.JOB_FAILED)}
    assert told == {
        ids["fail"]: "retry", ids["fail with text"]: "retry", ids["retry"]: "retry", ids["snooze"]: "snooze",
        ids["discard"]: "discard", ids["dead letter"]: "dead",
    }  # fmt: skip


def test_only_the_failed_jobs_of_a_batch_are_retried(pq: pgqueue.PgQueue, admin: Admin) -> None:
    runs: list[tuple[int, int]] = []

    def body(jobs: pgqueue.Batch) -> None:
        for job in jobs:
            runs.append((job.args[0], job.attempt))
            if job.args[0] % 3 == 0 and job.attempt < 3:
                job.fail(ValueError("not yet"))

    define(pq, "plain", body, batch=20, retry=pgqueue.Fixed(0)).enqueue_many((number,) for number in range(20))
    with running(pq):
        wait_for_count(admin, 20, "archive", "state = 'completed'")
    expected = [(number, attempt) for number in range(20) for attempt in ((1, 2, 3) if number % 3 == 0 else (1,))]
    assert sorted(runs) == expected


@COLOURS
def test_answers_stay_when_the_call_raises_afterwards(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(jobs: pgqueue.Batch) -> None:
        jobs[0].complete()
        jobs[1].discard("no use")
        raise ConnectionError("half-way")

    ids = define(pq, colour, body, batch_wait=LONG, batch=5).enqueue_many([()] * 5)
    with running(pq) as watched:
        wait_for_count(admin, 3, "job", "run_at IS NOT NULL AND attempt = 1")
        watched.wait_for_all(4, EventName.JOB_FAILED)
    assert rows(admin, "id, state", "archive") == [(ids[0], "completed"), (ids[1], "discarded")]
    assert rows(admin, "id, errors->0->>'type'") == [(job_id, "ConnectionError") for job_id in ids[2:]]


def test_a_signal_that_the_call_raises_holds_for_all_jobs_without_an_answer(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(jobs: pgqueue.Batch) -> None:
        jobs[0].complete()
        raise pgqueue.Snooze(1000)

    define(pq, "plain", body, batch=3, batch_wait=LONG).enqueue_many([()] * 3)
    with running(pq):
        wait_for_count(admin, 2, "job", "run_at IS NOT NULL AND attempt = 0 AND errors IS NULL")
        wait_for_count(admin, 1, "archive", "state = 'completed'")


def test_the_retry_policy_of_a_batch_task_decides_about_each_answer(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(jobs: pgqueue.Batch) -> None:
        jobs[0].fail(KeyError("a"))
        jobs[1].fail(ValueError("b"))
        raise OSError("c")

    policy = pgqueue.ByException({KeyError: "discard", ValueError: "dead", OSError: 1000})
    ids = define(pq, "plain", body, batch=3, batch_wait=LONG, retry=policy).enqueue_many([()] * 3)
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'discarded'")
        wait_for_count(admin, 1, "dead_letter", f"id = {ids[1]}")
        wait_for_count(admin, 1, "job", f"id = {ids[2]} AND run_at IS NOT NULL")


def test_a_handler_that_returns_what_nobody_runs_has_failed(pq: pgqueue.PgQueue, admin: Admin) -> None:
    async def nothing() -> None: ...

    define(pq, "plain", lambda jobs: nothing(), batch=2, batch_wait=LONG).enqueue_many([()] * 2)
    with running(pq):
        wait_for_count(admin, 2, "job", "errors->0->>'type' = 'pgqueue.errors.TaskError'")


def test_arguments_that_nobody_can_read_fail_alone(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen = Seen()

    def payload(number: int) -> None: ...

    work = define(pq, "plain", seen, batch=3, batch_wait=0.2, payload=payload)
    ids = work.enqueue_many([(number,) for number in range(4)])
    admin.execute('UPDATE pgqueue.job SET args = \'{"no": "list"}\' WHERE id = %s', [ids[1]])
    admin.execute("UPDATE pgqueue.job SET args = '[1, 2]' WHERE id = %s", [ids[2]])
    with running(pq):
        wait_for_count(admin, 2, "archive", "state = 'completed'")
        wait_for_count(admin, 2, "job", "run_at > clock_timestamp() + interval '1 second'")
    assert sorted(seen.all) == [0, 3]
    assert rows(admin, "id, errors->0->>'type'") == [
        (ids[1], "pgqueue.errors.PayloadDecodeError"), (ids[2], "pgqueue.errors.ArgumentsDoNotBind"),
    ]  # fmt: skip


def test_jobs_under_an_old_name_of_the_task_share_its_batches(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen: list[list[str]] = []
    define(pq, "plain", lambda jobs: seen.append([job.task for job in jobs]), batch=2, batch_wait=LONG, aliases=["old"])
    with pgqueue.PgQueue(pq.settings.database_url) as before:
        before.enqueue("old", queue="q")
        before.enqueue("work", queue="q")
    with running(pq):
        wait_for_count(admin, 2, "archive", "state = 'completed'")
    assert seen == [["old", "work"]]

"""Unique keys over time: newer jobs behind running ones, windows, throttles, debounces, redrives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import unique as unique_ops
from tests.integration.test_unique import LATER, MODES, Admin, live, make, rows
from tests.workers import count


@pytest.mark.parametrize("mode", ["replace", "merge", "supersede"])
def test_a_new_job_runs_after_the_running_one_of_its_key_and_not_beside_it(
    mode: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    first = task.enqueue([1])
    [job] = pq.claim("q")
    second = task.enqueue([2])
    assert second != first
    assert task.enqueue([3]) == second, "what waits behind is replaced or merged in turn"
    assert task.options(on_conflict="skip").enqueue([4]) == second
    pq.run(unique_ops.follow("q", archive=True))
    pq.promote("q")
    assert pq.claim("q") == []
    pq.complete(job)
    pq.run(unique_ops.follow("q", archive=True))
    pq.promote("q")
    [after] = pq.claim("q")
    assert (after.id, after.args) == (second, [[2, 3] if mode == "merge" else [3]])
    assert live(admin)[0][2:] == ("k", None, None)
    state = "superseded" if mode == "supersede" else "completed"
    assert rows(admin, "id, state FROM pgqueue.archive") == [(first, state)]


@pytest.mark.parametrize("end", ["retry", "dead", "snooze", "release", "lost", "lost for good", "cancel", "discard"])
def test_a_superseded_job_is_archived_and_never_tried_again(end: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="supersede", max_attempts=1 if end in ("dead", "lost for good") else 5)
    first = task.enqueue(1)
    [job] = pq.claim("q")
    second = task.enqueue(2)
    if end.startswith("lost"):
        admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
        assert pq.rescue("q").superseded == [first]
    elif end == "cancel":
        pq.cancel(first)
        pq.fail(job, "x")
    elif end == "discard":
        pq.fail(job, pgqueue.Discard())
    elif end in ("retry", "dead"):
        pq.fail(job, "x", delay=0)
    else:
        getattr(pq, end)(job, *([5] if end == "snooze" else []))
    state = "cancelled" if end == "cancel" else "superseded"
    assert rows(admin, "id, state FROM pgqueue.archive") == [(first, state)]
    assert count(admin, "dead_letter") == 0
    assert count(admin, "lease") == 0
    pq.run(unique_ops.follow("q", archive=True))
    assert [one.id for one in pq.claim("q")] == [second]


def test_a_replaced_running_job_keeps_its_completion_and_its_last_failure_but_not_its_retry(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = make(pq, on_conflict="replace", max_attempts=2)
    first = task.enqueue(1)
    [job] = pq.claim("q")
    task.enqueue(2)
    pq.fail(job, "x")
    assert rows(admin, "id, state FROM pgqueue.archive") == [(first, "superseded")]
    pq.run(unique_ops.follow("q", archive=True))
    pq.promote("q")
    [job] = pq.claim("q")
    task.options(max_attempts=1).enqueue(3)
    pq.fail(job, pgqueue.DeadLetter("hopeless"))
    assert count(admin, "dead_letter") == 1


def test_a_merged_job_waits_until_the_running_one_has_all_its_retries(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="merge", max_attempts=2)
    first = task.enqueue([1])
    [job] = pq.claim("q")
    second = task.enqueue([2])
    pq.fail(job, "x", delay=0)
    assert pq.run(unique_ops.follow("q", archive=True)) == []
    [job] = pq.claim("q")
    assert job.id == first
    pq.fail(job, "x")
    assert pq.run(unique_ops.follow("q", archive=True)) == [second]


def test_a_cancelled_newer_job_leaves_the_running_one_as_it_was(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="supersede")
    first = task.enqueue(1)
    [job] = pq.claim("q")
    assert pq.cancel(task.enqueue(2))
    pq.fail(job, "x", delay=0)
    assert [one.id for one in pq.claim("q")] == [first]


def test_what_waits_behind_is_due_no_earlier_than_it_was_asked_for(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="supersede")
    task.enqueue(1)
    [job] = pq.claim("q")
    second = task.options(delay=LATER).enqueue(2)
    pq.complete(job)
    assert pq.run(unique_ops.follow("q", archive=True)) == [second]
    assert pq.promote("q") == []
    assert rows(admin, "run_at > now() + interval '59 min', unique_key FROM pgqueue.job") == [(True, "k")]


def test_a_claim_without_a_worker_lets_the_newer_job_follow(pq: pgqueue.PgQueue, database: str) -> None:
    task = make(pq, on_conflict="supersede")
    task.enqueue(1)
    [job] = pq.claim("q")
    second = task.enqueue(2)
    pq.complete(job)
    with pgqueue.PgQueue(database) as fresh:
        assert [one.id for one in fresh.claim("q")] == [second]


# windows


def test_no_second_job_within_the_window_whatever_has_become_of_the_first(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, unique_for=timedelta(minutes=5))
    first = task.enqueue(1)
    assert task.enqueue(2) == first
    pq.complete(pq.claim("q"))
    assert task.enqueue(3) == first
    with pytest.raises(pgqueue.DuplicateJob) as caught:
        task.options(on_conflict="raise").enqueue(4)
    assert caught.value.job_id == first
    assert task.enqueue_many([(5,), (6,)]) == [first, first]
    admin.execute("UPDATE pgqueue.unique_window SET until = now()")
    second = task.enqueue(7)
    assert second != first
    assert rows(admin, "job_id, until > now() + interval '4 min' FROM pgqueue.unique_window") == [(second, True)]


def test_a_window_goes_with_the_rollback_of_its_first_job(pq: pgqueue.PgQueue, database: str) -> None:
    task = make(pq, unique_for=300)
    with psycopg.connect(database) as caller:
        first = task.enqueue(1, using=caller)
        caller.rollback()
    second = task.enqueue(2)
    assert second != first
    assert task.enqueue(3) == second


def test_windows_that_have_closed_are_pruned_and_open_ones_stay(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, unique_key=lambda n: f"n:{n}", unique_for=300)
    task.enqueue_many([(n,) for n in range(2500)])
    admin.execute("UPDATE pgqueue.unique_window SET until = now() - interval '1 s' WHERE unique_key <> 'n:7'")
    pq.run(unique_ops.prune("q"))
    assert rows(admin, "unique_key FROM pgqueue.unique_window") == [("n:7",)]


# recipes


def test_a_throttled_job_starts_at_most_once_in_its_time_and_the_last_call_is_not_lost(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = make(pq).options(**pgqueue.throttle("k", 60))
    first = task.enqueue(1)
    assert task.enqueue(2) == first, "it has not started"
    [job] = pq.claim("q")
    assert job.args == [2]
    second = task.enqueue(3)
    pq.complete(job)
    pq.run(unique_ops.follow("q", archive=True))
    assert task.enqueue(4) == second
    assert pq.promote("q") == []
    in_time = "run_at BETWEEN now() + interval '30 s' AND now() + interval '61 s', args::text FROM pgqueue.job"
    assert rows(admin, in_time) == [(True, "[4]")]
    admin.execute("UPDATE pgqueue.job SET run_at = now()")
    admin.execute("UPDATE pgqueue.unique_window SET until = now() + interval '60 s'")
    assert pq.promote("q") == [second]
    pq.complete(pq.claim("q"))
    task.enqueue(5)
    assert pq.claim("q") == [], "the second start has a window of its own"


def test_a_throttled_job_whose_calls_are_skipped_loses_them(pq: pgqueue.PgQueue) -> None:
    task = make(pq).options(**pgqueue.throttle("k", 60) | {"on_conflict": "skip"})
    first = task.enqueue(1)
    pq.complete(pq.claim("q"))
    assert task.enqueue(2) == first


def test_a_debounced_job_waits_for_quiet_and_no_longer_than_its_limit(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq).options(**pgqueue.debounce("k", 40, at_most=timedelta(seconds=100)))
    first = task.enqueue(1)

    def due(of: int) -> list[tuple[Any, ...]]:
        return rows(admin, f"round(extract(epoch FROM coalesce(next_at, run_at) - created_at) / 10) * 10 FROM pgqueue.job"
                           f" WHERE id = {of}")  # fmt: skip

    assert due(first) == [(40,)]
    admin.execute("UPDATE pgqueue.job SET created_at = created_at - interval '30 s'")
    assert task.enqueue(2) == first
    assert due(first) == [(70,)]
    admin.execute("UPDATE pgqueue.job SET created_at = created_at - interval '50 s'")
    task.enqueue(3)
    assert due(first) == [(100,)]
    admin.execute("UPDATE pgqueue.job SET run_at = now()")
    pq.promote("q")
    [job] = pq.claim("q")
    assert job.args == [3]
    second = task.enqueue(4)
    assert due(second) == [(40,)], "calls during the run are debounced for the next"
    admin.execute(f"UPDATE pgqueue.job SET created_at = created_at - interval '90 s' WHERE id = {second}".encode())
    assert task.enqueue(5) == second
    assert due(second) == [(100,)]


# redrive


def test_redrive_skips_a_dead_letter_whose_key_is_taken_and_says_so(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, unique_key=lambda n: f"n:{n % 3}", max_attempts=1)
    dead = []
    for n in (0, 3, 1, 2, 5):
        dead.append(task.enqueue(n))
        pq.fail(pq.claim("q"), "x")
    alive = task.enqueue(1)
    back = pq.redrive()
    assert (list(back), back.skipped) == ([dead[0], dead[3]], [dead[1], dead[2], dead[4]])
    assert sorted(row[0] for row in live(admin)) == sorted([dead[0], dead[3], alive])
    assert task.enqueue(0) == dead[0], "a redriven job has its key again"
    assert count(admin, "dead_letter") == 3
    pq.complete(pq.claim("q", limit=10))
    assert list(pq.redrive()) == [dead[1], dead[2], dead[4]]


def test_redrive_goes_on_past_whole_batches_whose_keys_are_taken(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.ops.dead_letter.BATCH", 3)
    task = make(pq, unique_key=lambda n: f"n:{n}", max_attempts=1)
    ids = task.enqueue_many([(n,) for n in range(8)])
    pq.fail(pq.claim("q", limit=10), "x")
    task.enqueue_many([(n,) for n in range(7)])
    back = pq.redrive()
    assert (list(back), sorted(back.skipped)) == ([ids[7]], ids[:7])


# the rest of the queue


def test_the_sequence_does_not_move_for_what_is_skipped(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq)
    first = task.enqueue()
    for _ in range(50):
        assert task.enqueue() == first
    assert pq.enqueue("other", queue="q") < first + 10


@pytest.mark.parametrize("mode", MODES)
async def test_every_mode_works_from_the_async_queue_too(mode: str, database: str, admin: Admin) -> None:
    async with pgqueue.AsyncPgQueue(database) as queue:
        task = make(queue, on_conflict=mode)
        first = await task.enqueue([1])
        async with await psycopg.AsyncConnection.connect(database) as caller:
            if mode == "raise":
                with pytest.raises(pgqueue.DuplicateJob):
                    await task.enqueue([2], using=caller)
            else:
                assert await task.enqueue([2], using=caller) == first
                assert await task.enqueue_many([([3],), ([4],)], using=caller) == [first, first]
        assert count(admin, "job") == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_job_enqueued_beside_a_unique_one_has_no_key(mode: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    make(pq, on_conflict=mode).enqueue()
    pq.enqueue("work", queue="q", unique_key=None, on_conflict="skip")
    assert rows(admin, "unique_key, next_key FROM pgqueue.job ORDER BY id") == [("k", None), (None, None)]

"""Unique keys between transactions: two connections in a fixed order, and many at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import unique as unique_ops
from tests.waiting import wait_until
from tests.workers import count

Admin = psycopg.Connection[Any]
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
MODES = ["skip", "replace", "merge", "supersede", "raise"]
OVER = ["replace", "merge", "supersede"]


def make(pq: pgqueue.PgQueue, **options: Any) -> Any:
    return pq.task(name="work", queue="q", **{"unique_key": "k", **options})(lambda *args: None)


def rows(admin: Admin, what: str) -> list[tuple[Any, ...]]:
    return admin.execute(f"SELECT {what}".encode()).fetchall()


def follow(pq: pgqueue.PgQueue) -> list[int]:
    followed = pq.run(unique_ops.follow("q", archive=True))
    pq.promote("q")
    return sorted(followed)


@contextmanager
def meanwhile(call: Callable[[], Any], admin: Admin) -> Iterator[Future[Any]]:
    """`call` in a thread, up to where it waits for a lock; the block then decides what it meets."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        wait_until(lambda: future.done() or rows(admin, WAITING.removeprefix("SELECT ")) != [(0,)], 30, "it waits")
        assert not future.done(), "it did not wait"
        yield future
        future.exception(30)


def isolated(database: str, level: psycopg.IsolationLevel) -> psycopg.Connection[Any]:
    connection = psycopg.connect(database)
    connection.isolation_level = level
    connection.execute("SELECT 1 FROM pgqueue.job")
    return connection


# Enqueue against enqueue


@pytest.mark.parametrize("mode", MODES)
def test_when_the_winner_of_a_key_rolls_back_the_loser_has_the_job(
    mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    with psycopg.connect(database) as winner:
        lost = task.enqueue([1], using=winner)
        with meanwhile(lambda: task.enqueue([2]), admin) as loser:
            winner.rollback()
        assert loser.result() != lost
    assert rows(admin, "id, args::text FROM pgqueue.job") == [(loser.result(), "[[2]]")]


@pytest.mark.parametrize("mode", MODES)
def test_when_the_winner_of_a_key_commits_the_loser_meets_its_job(
    mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    with psycopg.connect(database) as winner, psycopg.connect(database) as caller:
        first = task.enqueue([1], using=winner)
        with meanwhile(lambda: task.enqueue([2], using=caller), admin) as loser:
            winner.commit()
        if mode == "raise":
            assert isinstance(loser.exception(), pgqueue.DuplicateJob)
        else:
            assert loser.result() == first
        caller.execute("SELECT 1")
        caller.commit()
    left = {"merge": "[[1,2]]", "skip": "[[1]]", "raise": "[[1]]"}.get(mode, "[[2]]")
    assert rows(admin, "id, args::text FROM pgqueue.job") == [(first, left)]


@pytest.mark.parametrize("mode", OVER)
def test_two_that_follow_a_running_job_meet_in_one(mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    task = make(pq, on_conflict=mode)
    task.enqueue([0])
    pq.claim("q")
    with psycopg.connect(database) as winner:
        first = task.enqueue([1], using=winner)
        with meanwhile(lambda: task.enqueue([2]), admin) as loser:
            winner.commit()
        assert loser.result() == first
    left = "[[1,2]]" if mode == "merge" else "[[2]]"
    assert rows(admin, "args::text FROM pgqueue.job WHERE next_key = 'k'") == [(left,)]


def test_of_two_that_open_a_window_one_does(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    task = make(pq, unique_for=60)
    with psycopg.connect(database) as winner:
        first = task.enqueue(1, using=winner)
        with meanwhile(lambda: task.enqueue(2), admin) as loser:
            winner.commit()
        assert loser.result() == first
    with psycopg.connect(database) as other:
        task.options(unique_key="other").enqueue(1, using=other)
        with meanwhile(lambda: task.options(unique_key="other").enqueue(2), admin) as loser:
            other.rollback()
        assert loser.result() != first
    assert rows(admin, "w.job_id = j.id FROM pgqueue.unique_window w JOIN pgqueue.job j USING (unique_key)") == [
        (True,), (True,)]  # fmt: skip


@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_a_window_holds_although_its_job_has_come_and_gone_meanwhile(
    mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, unique_for=60, on_conflict=mode)
    with psycopg.connect(database) as winner:
        first = task.enqueue(1, using=winner)
        pq.complete(pq.claim("q", using=winner), using=winner)
        with meanwhile(lambda: task.enqueue(2), admin) as loser:
            winner.commit()
    if mode == "skip":
        assert loser.result() == first
        assert count(admin, "job") == 0
    else:
        assert rows(admin, "id, run_at > now() + interval '30 s' FROM pgqueue.job") == [(loser.result(), True)]


def test_a_window_that_a_call_without_one_was_quicker_than_names_the_job_of_that_call(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq)
    with psycopg.connect(database) as winner:
        first = task.enqueue(1, using=winner)
        with meanwhile(lambda: task.options(unique_for=60).enqueue(2), admin) as loser:
            winner.commit()
        assert loser.result() == first
    assert rows(admin, "job_id FROM pgqueue.unique_window") == [(first,)]


@pytest.mark.parametrize("unique_for", [None, 60])
@pytest.mark.parametrize("mode", ["skip", "replace", "merge"])
def test_bulks_in_opposite_order_do_not_deadlock(
    mode: str, unique_for: float | None, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """Both come to the key in the middle, which a third one holds: by then each has taken half of the others, or none."""
    task = make(pq, unique_key=lambda n: f"n:{n}", on_conflict=mode, unique_for=unique_for)
    keys = list(range(10, 19))
    with psycopg.connect(database) as holder, ThreadPoolExecutor(2) as pool:
        task.enqueue(14, using=holder)
        waiting = []
        for number, order in enumerate((keys, keys[::-1]), 1):
            waiting.append(pool.submit(task.enqueue_many, [(n,) for n in order]))
            wait_until(
                lambda number=number: rows(admin, WAITING.removeprefix("SELECT ")) == [(number,)], 30, "it waits"
            )
        holder.rollback()
        first, second = (future.result(60) for future in waiting)
    assert first == second[::-1]
    assert count(admin, "job") == len(keys)


@pytest.mark.parametrize("mode", ["skip", "replace", "merge"])
def test_many_bulks_with_the_same_keys_are_told_the_same_ids(
    mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, unique_key=lambda n, _: f"n:{n}", on_conflict=mode)
    errors: list[BaseException] = []
    ids: dict[int, list[list[int]]] = {}
    barrier = threading.Barrier(4)

    def enqueue(seed: int) -> None:
        try:
            with psycopg.connect(database) as caller:
                for turn in range(5):
                    keys = range(1000 * turn, 1000 * turn + 200)
                    order = random.Random(seed).sample(keys, len(keys))
                    barrier.wait(30)
                    found = task.enqueue_many([(n, [seed]) for n in order], using=caller)
                    caller.commit()
                    ids.setdefault(turn, []).append([job_id for _, job_id in sorted(zip(order, found, strict=True))])
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=enqueue, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert all(len(told) == 4 and all(one == told[0] for one in told) for told in ids.values())
    assert count(admin, "job") == 1000


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
@pytest.mark.parametrize("mode", MODES)
def test_a_caller_whose_snapshot_cannot_see_the_job_is_told_to_try_again(
    mode: str, level: psycopg.IsolationLevel, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    with isolated(database, level) as caller:
        first = task.enqueue([1])
        with pytest.raises(psycopg.errors.SerializationFailure):
            task.enqueue([2], using=caller)
        caller.rollback()
        caller.execute("SELECT 1")
        if mode == "raise":
            with pytest.raises(pgqueue.DuplicateJob):
                task.enqueue([2], using=caller)
            caller.execute("SELECT 1")
        else:
            assert task.enqueue([2], using=caller) == first
        caller.commit()
    assert count(admin, "job") == 1


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_a_caller_with_an_old_snapshot_is_not_told_of_a_job_that_has_ended(
    level: psycopg.IsolationLevel, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq)
    first = task.enqueue(1)
    with isolated(database, level) as caller:
        pq.complete(pq.claim("q"))
        second = task.enqueue(2, using=caller)
        caller.commit()
    assert second != first
    assert rows(admin, "id FROM pgqueue.job") == [(second,)]


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
@pytest.mark.parametrize("mode", OVER)
def test_a_caller_with_a_snapshot_before_the_claim_does_not_change_a_running_job(
    mode: str, level: psycopg.IsolationLevel, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    task.enqueue([1])
    with isolated(database, level) as caller:
        [job] = pq.claim("q")
        with pytest.raises(psycopg.errors.SerializationFailure):
            task.enqueue([2], using=caller)
        caller.rollback()
        second = task.enqueue([2], using=caller)
        caller.commit()
    pq.complete(job)
    assert follow(pq) == [second]


@pytest.mark.parametrize("mode", OVER)
def test_an_own_connection_in_repeatable_read_works_as_any_other(
    mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    [(name,)] = rows(admin, "current_database()")
    admin.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'".encode())
    with pgqueue.PgQueue(database) as fresh:
        task = make(fresh, on_conflict=mode)
        first = task.enqueue([1])
        assert task.options(on_conflict="skip").enqueue([5]) == first
        [job] = fresh.claim("q")
        second = task.enqueue([2])
        assert task.enqueue([3]) == second
        fresh.complete(job)
        assert follow(fresh) == [second]


# Enqueue against claim, settle and rescue


@pytest.mark.parametrize("mode", OVER)
def test_a_claim_passes_over_a_job_that_an_open_transaction_replaces(
    mode: str, pq: pgqueue.PgQueue, database: str
) -> None:
    task = make(pq, on_conflict=mode)
    first = task.enqueue([1])
    with psycopg.connect(database) as caller:
        assert task.enqueue([2], using=caller) == first
        assert pq.claim("q") == []
        caller.rollback()
    assert pq.claim("q")[0].args == [[1]]


@pytest.mark.parametrize("mode", OVER)
def test_an_enqueue_that_waits_for_a_claim_leaves_the_claimed_job_alone(
    mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    first = task.enqueue([1])
    with psycopg.connect(database) as claimer:
        [job] = pq.claim("q", using=claimer)
        with meanwhile(lambda: task.enqueue([2]), admin) as late:
            claimer.commit()
        assert late.result() != first
    assert rows(admin, "args::text FROM pgqueue.job WHERE unique_key = 'k'") == [("[[1]]",)]
    assert pq.claim("q") == []
    pq.complete(job)
    assert follow(pq) == [late.result()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["complete", "fail", "release", "snooze", "bury", "lost"])
def test_a_slow_enqueue_never_holds_up_the_settle_or_the_rescue_of_the_running_job(
    end: str, mode: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    first = task.enqueue([1])
    [job] = pq.claim("q")
    with psycopg.connect(database) as caller, psycopg.connect(database, autocommit=True) as worker:
        worker.execute("SET lock_timeout = '2s'")
        with pytest.raises(pgqueue.DuplicateJob) if mode == "raise" else _nothing():
            task.enqueue([2], using=caller)
        if end == "lost":
            admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
            assert pq.rescue("q", using=worker).returned == [first]
        elif end == "fail":
            pq.fail(job, "x", delay=0, using=worker)
        elif end == "bury":
            pq.fail(job, pgqueue.DeadLetter("x"), using=worker)
        else:
            getattr(pq, end)(job, *([9] if end == "snooze" else []), using=worker)
        caller.commit()
    follow(pq)
    live = rows(admin, "args::text FROM pgqueue.job ORDER BY id")
    gone = end in ("complete", "bury")
    if mode in ("skip", "raise"):
        assert live == ([] if gone else [("[[1]]",)])
    elif mode == "merge" and not gone:
        assert live == [("[[1]]",), ("[[2]]",)]
    else:
        assert live == [("[[2]]",)], "the newer one goes on, and the older is not tried again"
    assert all(len(pq.claim("q")) <= 1 for _ in range(2))


@contextmanager
def _nothing() -> Iterator[None]:
    yield

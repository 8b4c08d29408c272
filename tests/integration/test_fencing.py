"""A late finisher: whatever it does with a token that is not the current one any more changes nothing, and is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import worker as worker_ops

WORKER_ID = 4711
EVERYTHING = {
    "job": "id, task, position, run_at, attempt, lost, lease_id, cancel_requested, errors",
    "lease": "id, worker_id, job_ids, claimed_at, expires_at",
    "archive": "id, state, attempt, lost, finished_at",
    "dead_letter": "id, attempt, lost, reason, errors, died_at",
}

LATE: dict[str, Callable[[pgqueue.PgQueue, pgqueue.Job], None]] = {
    "completes": lambda pq, job: pq.complete(job),
    "fails": lambda pq, job: pq.fail(job, "too late", delay=0),
    "dead-letters": lambda pq, job: pq.fail(job, pgqueue.DeadLetter("too late")),
    "discards": lambda pq, job: pq.fail(job, pgqueue.Discard("too late")),
    "extends": lambda pq, job: pq.extend(job, 3600),
    "releases": lambda pq, job: pq.release(job),
    "snoozes": lambda pq, job: pq.snooze(job, 3600),
}


@pytest.fixture(params=["another process", "the same process"])
def second(request: pytest.FixtureRequest, database: str, pq: pgqueue.PgQueue) -> Iterator[pgqueue.PgQueue]:
    """The client that takes the job over."""
    if request.param == "the same process":
        yield pq
        return
    with pgqueue.PgQueue(database) as other:
        yield other


@pytest.fixture
def everything(admin: psycopg.Connection[Any]) -> Callable[[], dict[str, list[Any]]]:
    """All that the queue knows, as another session sees it."""

    def look() -> dict[str, list[Any]]:
        return {
            table: admin.execute(f"SELECT {columns} FROM pgqueue.{table} ORDER BY id".encode()).fetchall()
            for table, columns in EVERYTHING.items()
        }

    return look


def expire(admin: psycopg.Connection[Any]) -> None:
    admin.execute("UPDATE pgqueue.lease SET expires_at = clock_timestamp() - interval '1 second'")


def take_over(
    admin: psycopg.Connection[Any], first: pgqueue.PgQueue, second: pgqueue.PgQueue, *, max_attempts: int
) -> tuple[pgqueue.Job, pgqueue.Job]:
    """One job as its first owner saw it and as its second one does."""
    first.enqueue("work", queue="q", max_attempts=max_attempts)
    [old] = first.claim("q", lease=60)
    expire(admin)
    assert second.rescue("q").returned == [old.id]
    [new] = second.claim("q", lease=60)
    assert (new.id, new.attempt, new.lost) == (old.id, 2, 1)
    assert new.token > old.token
    return old, new


@pytest.mark.parametrize("max_attempts", [5, 2], ids=["retries left", "none left"])
@pytest.mark.parametrize("action", list(LATE))
def test_a_late_finisher_changes_nothing_while_the_new_owner_works(
    action: str,
    max_attempts: int,
    pq: pgqueue.PgQueue,
    second: pgqueue.PgQueue,
    admin: psycopg.Connection[Any],
    everything: Callable[[], Any],
) -> None:
    old, new = take_over(admin, pq, second, max_attempts=max_attempts)
    before = everything()
    with pytest.raises(pgqueue.LeaseLost) as caught:
        LATE[action](pq, old)
    assert caught.value.jobs == (old,)
    assert everything() == before
    second.complete(new)
    after = everything()
    assert [row[:4] for row in after["archive"]] == [(new.id, "completed", 2, 1)]
    assert (after["job"], after["lease"], after["dead_letter"]) == ([], [], [])


@pytest.mark.parametrize("action", list(LATE))
@pytest.mark.parametrize("end", ["completed", "dead"])
def test_a_late_finisher_changes_nothing_after_the_new_owner_has_finished(
    action: str,
    end: str,
    pq: pgqueue.PgQueue,
    second: pgqueue.PgQueue,
    admin: psycopg.Connection[Any],
    everything: Callable[[], Any],
) -> None:
    old, new = take_over(admin, pq, second, max_attempts=2)
    if end == "completed":
        second.complete(new)
    else:
        second.fail(new, "broken for good")
    before = everything()
    with pytest.raises(pgqueue.LeaseLost) as caught:
        LATE[action](pq, old)
    assert caught.value.jobs == (old,)
    assert everything() == before


@pytest.mark.parametrize("action", list(LATE))
def test_a_late_finisher_changes_nothing_while_the_job_waits_for_its_retry(
    action: str,
    pq: pgqueue.PgQueue,
    second: pgqueue.PgQueue,
    admin: psycopg.Connection[Any],
    everything: Callable[[], Any],
) -> None:
    old, new = take_over(admin, pq, second, max_attempts=5)
    second.fail(new, "again, please", delay=3600)
    before = everything()
    with pytest.raises(pgqueue.LeaseLost):
        LATE[action](pq, old)
    assert everything() == before


@pytest.mark.parametrize("same_worker", [True, False], ids=["the same worker id", "another worker id"])
def test_a_late_heartbeat_does_not_lengthen_the_new_lease(
    same_worker: bool,
    pq: pgqueue.PgQueue,
    second: pgqueue.PgQueue,
    admin: psycopg.Connection[Any],
    everything: Callable[[], Any],
) -> None:
    old, new = take_over(admin, pq, second, max_attempts=5)
    admin.execute("UPDATE pgqueue.lease SET worker_id = %s", [WORKER_ID if same_worker else 1])
    before = everything()
    assert pq.run(worker_ops.beat_leases(WORKER_ID, "q", [old.token], lease=3600)) == {}
    assert everything() == before
    if not same_worker:
        assert pq.run(worker_ops.beat_leases(WORKER_ID, "q", [new.token], lease=3600)) == {}
        assert everything() == before


def test_a_late_finisher_in_a_batch_is_named_alone_and_the_others_are_settled(
    pq: pgqueue.PgQueue, second: pgqueue.PgQueue, admin: psycopg.Connection[Any], everything: Callable[[], Any]
) -> None:
    old, new = take_over(admin, pq, second, max_attempts=5)
    pq.enqueue("work", queue="q")
    [other] = pq.claim("q", lease=60)
    with pytest.raises(pgqueue.LeaseLost) as caught:
        pq.complete([old, other])
    assert caught.value.jobs == (old,)
    assert [row[:2] for row in everything()["archive"]] == [(other.id, "completed")]
    assert [row[6] for row in everything()["job"]] == [new.token]
    assert [row[0] for row in everything()["lease"]] == [new.token]


@pytest.mark.parametrize("action", list(LATE))
def test_an_old_token_does_not_pass_beside_a_current_one_of_the_very_claim_that_took_the_job_over(
    action: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], everything: Callable[[], Any]
) -> None:
    pq.enqueue("work", queue="q")
    [old] = pq.claim("q", lease=60)
    expire(admin)
    pq.rescue("q")
    pq.enqueue("work", queue="q")
    new, mate = pq.claim("q", limit=2, lease=60)
    admin.execute("UPDATE pgqueue.job SET lease_id = %s WHERE id = %s", [mate.token, new.id])
    admin.execute("UPDATE pgqueue.lease SET job_ids = %s WHERE id = %s", [[new.id, mate.id], mate.token])
    before = [row for row in everything()["job"] if row[0] == old.id]
    with pytest.raises(pgqueue.LeaseLost) as caught:
        LATE[action](pq, [old, mate])  # type: ignore[arg-type]
    assert caught.value.jobs == (old,)
    assert [row for row in everything()["job"] if row[0] == old.id] == before
    assert mate.token in [row[0] for row in everything()["lease"]]


def test_one_call_may_hold_the_old_and_the_new_token_of_a_job(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], everything: Callable[[], Any]
) -> None:
    for order in (slice(None), slice(None, None, -1)):
        old, new = take_over(admin, pq, pq, max_attempts=5)
        with pytest.raises(pgqueue.LeaseLost) as caught:
            pq.extend([old, new][order], 60)
        assert caught.value.jobs == (old,)
        with pytest.raises(pgqueue.LeaseLost) as caught:
            pq.complete([old, new][order])
        assert caught.value.jobs == (old,)
        assert everything()["job"] == []


def test_a_claim_that_is_named_twice_in_one_call_is_settled_once(
    pq: pgqueue.PgQueue, everything: Callable[[], Any]
) -> None:
    pq.enqueue("work", queue="q")
    [job] = pq.claim("q", lease=60)
    pq.complete([job, job])
    with pytest.raises(pgqueue.LeaseLost) as caught:
        pq.complete(job)
    assert caught.value.jobs == (job,)
    assert len(everything()["archive"]) == 1


def test_a_lease_that_ran_out_is_still_good_while_nobody_has_taken_the_job(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], everything: Callable[[], Any]
) -> None:
    pq.enqueue("work", queue="q")
    [job] = pq.claim("q", lease=60)
    expire(admin)
    pq.complete(job)
    assert not any(pq.rescue("q"))
    assert [row[:4] for row in everything()["archive"]] == [(job.id, "completed", 1, 0)]


def test_the_last_attempt_of_a_lost_owner_is_buried_once(
    pq: pgqueue.PgQueue, second: pgqueue.PgQueue, admin: psycopg.Connection[Any], everything: Callable[[], Any]
) -> None:
    pq.enqueue("work", queue="q", max_attempts=1)
    [old] = pq.claim("q", lease=60)
    expire(admin)
    assert second.rescue("q").dead == [old.id]
    before = everything()
    assert [row[:4] for row in before["dead_letter"]] == [(old.id, 1, 1, "worker lost")]
    for act in LATE.values():
        with pytest.raises(pgqueue.LeaseLost):
            act(pq, old)
    assert everything() == before


def test_a_redriven_job_does_not_listen_to_its_owner_of_before(
    pq: pgqueue.PgQueue, second: pgqueue.PgQueue, admin: psycopg.Connection[Any], everything: Callable[[], Any]
) -> None:
    pq.enqueue("work", queue="q", max_attempts=1)
    [old] = pq.claim("q", lease=60)
    expire(admin)
    second.rescue("q")
    assert second.redrive() == [old.id]
    [new] = second.claim("q", lease=60)
    assert (new.id, new.attempt) == (old.id, 1)
    before = everything()
    for act in LATE.values():
        with pytest.raises(pgqueue.LeaseLost):
            act(pq, old)
    assert everything() == before

"""Lanes among faults: workers frozen in the middle of an admission, late commits, rows changed by hand, very many jobs."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import status as status_ops
from pgqueue.ops.admission import AdmissionMark
from pgqueue.sql import statements
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
TAKE = statements("pgqueue")["admission_take"]


def ordered(pq: pgqueue.PgQueue, key: str = "a", using: Any = None, **options: Any) -> int:
    made: int = pq.enqueue("work", queue="q", ordering_key=key, using=using, **options)
    return made


def limited(pq: pgqueue.PgQueue, number: int, limit: int, key: str = "a") -> list[int]:
    task = pq.task(name="work", queue="q", concurrency_key=key, concurrency_limit=limit)(lambda number: None)
    made: list[int] = task.enqueue_many((n,) for n in range(number))
    return made


def claimed(pq: pgqueue.PgQueue, limit: int = 10) -> list[int]:
    return [job.id for job in pq.claim("q", limit=limit)]


def on_admission(admin: Admin, happens: str) -> None:
    """What happens from now on to every job that is admitted."""
    admin.execute(
        "CREATE FUNCTION pgqueue.hinder() RETURNS trigger LANGUAGE plpgsql AS $$"
        f" BEGIN {happens}; RETURN NEW; END $$".encode()
    )
    admin.execute(
        "CREATE TRIGGER hinder BEFORE UPDATE OF admitted ON pgqueue.job FOR EACH ROW"
        " WHEN (NEW.admitted AND OLD.admitted IS NULL) EXECUTE FUNCTION pgqueue.hinder()"
    )


def drained(pq: pgqueue.PgQueue) -> bool:
    return pq.run(status_ops.drained("q"))


def test_a_worker_frozen_in_the_middle_of_an_admission_holds_up_nobody_and_its_lanes_for_seconds_only(
    pq: pgqueue.PgQueue, database: str
) -> None:
    mine = ordered(pq)
    frozen = psycopg.connect(database)  # takes the row of the lane, and then nothing more is heard of it
    frozen.execute(TAKE, {"queue": "q", "after": 0, "limit": 10})
    ordered(pq)
    others = [pq.enqueue("work", queue="q"), ordered(pq, "b")]
    assert claimed(pq) == others, "at once, without the lane that is held"
    wait_until(lambda: claimed(pq) == [mine], PATIENCE, "the server has ended the transaction of the frozen one")
    frozen.close()


ADMITS = """
import sys

import pgqueue
from pgqueue.ops import admission

with pgqueue.PgQueue(sys.argv[1]) as pq:
    pq.run(admission.admit("q", admission.AdmissionMark(), room=10, channel=None))
"""


def test_a_process_frozen_while_it_waits_for_the_answer_in_an_admission_gives_its_lanes_back(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    mine = ordered(pq)
    waits = "SELECT count(*) FROM pg_locks WHERE relation = 'pgqueue.admission'::regclass AND NOT granted"
    with psycopg.connect(database) as holder:
        holder.execute("LOCK TABLE pgqueue.admission IN ACCESS EXCLUSIVE MODE")
        process = subprocess.Popen([sys.executable, "-c", ADMITS, database])
        try:
            wait_until(lambda: admin.execute(waits).fetchone() == (1,), PATIENCE, "the admission is under way")
            process.send_signal(signal.SIGSTOP)
            holder.rollback()
            # What it had to say must have been said before: a server that waits for the rest of a pipeline ends nothing.
            wait_until(
                lambda: claimed(pq) == [mine], PATIENCE, "the server has ended the transaction of the frozen one"
            )
        finally:
            process.kill()
            process.wait()


def test_a_job_whose_commit_came_late_is_admitted_by_the_next_claim(pq: pgqueue.PgQueue, database: str) -> None:
    with psycopg.connect(database) as caller:
        late = ordered(pq, "late", using=caller)
        for key in ("b", "c"):
            early = ordered(pq, key)
            assert claimed(pq) == [early], "what comes later than the late one is admitted before it"
        caller.commit()
    assert claimed(pq) == [late]


def test_a_worker_hears_of_a_late_commit_and_admits_its_job_at_once(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    define(pq, "plain", lambda *_: None)
    with running(pq, poll=60.0, lease=60.0) as watched, psycopg.connect(database) as caller:
        wait_until(lambda: watched.worker._listener.hearing, PATIENCE, "it hears")  # type: ignore[union-attr]
        for number in range(20):
            late = ordered(pq, f"late {number}", using=caller)
            early = ordered(pq, f"early {number}")
            wait_for_count(admin, 1, "archive", f"id = {early}")
            caller.commit()
            # Maintenance would find it after four seconds.
            wait_until(lambda late=late: count(admin, "archive", f"id = {late}"), 3.0, "the late one runs")  # type: ignore[misc]


def test_a_claim_that_finds_enough_admits_jobs_with_keys_as_well(pq: pgqueue.PgQueue, admin: Admin) -> None:
    define(pq, "plain", lambda number: None).enqueue_many((number,) for number in range(50))
    keyed = ordered(pq, priority=50)
    pq._maintained.clear()
    assert len(claimed(pq, 1)) == 1
    assert claimed(pq, 1) == [keyed]


def test_jobs_that_are_claimed_reach_their_caller_though_the_admission_fails(pq: pgqueue.PgQueue, admin: Admin) -> None:
    plain, keyed = pq.enqueue("work", queue="q"), ordered(pq)
    on_admission(admin, "RAISE EXCEPTION 'no admission today'")
    assert claimed(pq) == [plain]
    with pytest.raises(psycopg.errors.RaiseException):
        pq.claim("q")
    admin.execute("DROP TRIGGER hinder ON pgqueue.job")
    assert claimed(pq) == [keyed]


def test_an_admission_that_fails_does_not_keep_a_worker_from_jobs_without_keys(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    define(pq, "plain", lambda *_: None)
    with running(pq, poll=0.2) as watched:
        on_admission(admin, "RAISE EXCEPTION 'no admission today'")
        keyed = ordered(pq)
        watched.wait_for(pgqueue.EventName.LOOP_FAILED, loop="claim")
        plain = [pq.enqueue("work", queue="q") for _ in range(5)]
        wait_for_count(admin, len(plain), "archive")
        assert count(admin, "job", f"id = {keyed} AND admitted IS NULL") == 1
        admin.execute("DROP TRIGGER hinder ON pgqueue.job")
        wait_for_count(admin, len(plain) + 1, "archive")


@pytest.mark.parametrize("width", [0, -5, None, 7])
@pytest.mark.parametrize("kind", ["o", "c", "zebra", ""])
def test_a_lane_that_was_written_by_hand_goes_on_and_holds_up_no_other(
    kind: str, width: int | None, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    strange = [ordered(pq) for _ in range(3)]
    admin.execute("UPDATE pgqueue.job SET lane = %s, lane_width = %s", [f"{kind}x" if kind else "", width])
    other = ordered(pq, "b")
    pq.run(admission_ops.repair("q"))
    done: list[int] = []
    while jobs := pq.claim("q", limit=10):
        done += [job.id for job in jobs]
        pq.complete(jobs)
    assert sorted(done) == [*strange, other]
    assert [job_id for job_id in done if job_id != other] == strange


def test_two_parked_jobs_of_one_key_in_one_call_are_buried_with_the_others(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = [pq.enqueue("work", queue="q", max_attempts=1) for _ in range(6)]
    jobs = pq.claim("q", limit=10)
    admin.execute("UPDATE pgqueue.job SET lane = 'oa', park = true WHERE id = ANY (%s)", [ids[:2] + ids[3:5]])
    pq.fail(jobs[:3], "broken")
    assert count(admin, "dead_letter") == 3
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    assert pq.run(rescue_ops.rescue("q", archive=True)).dead == ids[3:]
    [lane] = pq.lanes("q")
    assert lane.parked_by in ids


def test_a_wide_lane_is_admitted_in_parts(pq: pgqueue.PgQueue, admin: Admin) -> None:
    limited(pq, 5000, limit=100_000)
    mark = AdmissionMark()
    parts = []
    while (part := pq.run(admission_ops.admit("q", mark, room=0, channel=None))).more:
        parts.append(part.jobs)
    parts.append(part.jobs)
    assert sum(parts) == 5000
    assert max(parts) <= admission_ops.ROWS * admission_ops.JOBS_PER_ROW


def test_an_admission_that_takes_too_long_is_tried_with_less(pq: pgqueue.PgQueue, admin: Admin) -> None:
    limited(pq, 2000, limit=100_000)
    on_admission(admin, "PERFORM pg_sleep(0.002)")
    define(pq, "plain", lambda *_: None, name="other")
    # A third of the lease is what a round trip may take; all that is admitted at once at first takes longer.
    with running(pq, queues=("q",), lease=3.0):
        wait_for_count(admin, 0, "job", "admitted IS NULL", seconds=PATIENCE * 3)


def test_keys_of_one_queue_are_not_hidden_by_those_of_another(pq: pgqueue.PgQueue) -> None:
    for number in range(30):
        pq.enqueue("work", queue="p", ordering_key=f"a {number:02}")
    ordered(pq, "z")
    assert [lane.key for lane in pq.lanes("q", limit=10)] == ["z"]
    assert len(pq.lanes("p", limit=10)) == 10
    assert {row.queue: row.blocked for row in pq.status()} == {"p": 30, "q": 1}


def test_a_queue_in_which_everything_is_parked_is_drained(pq: pgqueue.PgQueue) -> None:
    for key in ("a", "b"):
        for _ in range(3):
            ordered(pq, key, on_dead="park", max_attempts=1)
    pq.fail(pq.claim("q", limit=10), "broken")
    assert claimed(pq) == []
    assert drained(pq)
    pq.enqueue("work", queue="p", ordering_key="a")
    assert drained(pq), "another queue"
    pq.unpark("q", "b")
    assert not drained(pq)


def test_many_dead_letters_of_one_key_are_redriven_and_run_in_their_order(pq: pgqueue.PgQueue) -> None:
    ids = [ordered(pq, max_attempts=1) for _ in range(40)]
    for _ in ids:
        pq.fail(pq.claim("q", limit=10), "broken")
    newer = ordered(pq)
    assert pq.redrive(queue="q") == ids
    done: list[int] = []
    while jobs := pq.claim("q", limit=10):
        done += [job.id for job in jobs]
        pq.complete(jobs)
    assert done == [*ids, newer]


def test_all_jobs_of_a_key_are_cancelled_at_once_and_the_key_goes_on(pq: pgqueue.PgQueue) -> None:
    ids = [ordered(pq) for _ in range(300)]
    [running_one] = pq.claim("q")
    assert set(pq.cancel(ids).values()) == {"cancelled", "requested"}
    after = ordered(pq)
    assert claimed(pq) == []
    pq.release(running_one)
    assert claimed(pq) == [after]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_jobs_with_keys_run_in_order_where_transactions_are_stricter_by_default(
    level: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]
    admin.execute(f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = '{level}'".encode())
    seen: list[int] = []
    task = define(pq, "plain", seen.append, ordering_key=lambda number: str(number % 3))
    with pgqueue.PgQueue(database) as other:
        define(other, "plain", seen.append)
        with running(pq, concurrency=4, poll=0.2), running(other, concurrency=4, poll=0.2):
            for number in range(120):
                task.enqueue(number)
            wait_for_count(admin, 120, "archive", seconds=PATIENCE * 2)
    for key in range(3):
        assert [n for n in seen if n % 3 == key] == list(range(key, 120, 3))

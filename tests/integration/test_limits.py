"""Limits of queues as `claim` keeps to them: exact, fleet-wide, and derived from rows that live."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import psycopg

import pgqueue
from pgqueue.ops import Step
from pgqueue.ops import limit as limit_ops
from pgqueue.ops.claim import LowWater, looks_at
from pgqueue.sql import statements
from tests.waiting import wait_until
from tests.workers import PATIENCE, count

Admin = psycopg.Connection[Any]
SQL = statements("pgqueue")
CLAIM = {**looks_at("q", 10, 30.0, None, None, []), "free": 10}


def enqueue(pq: pgqueue.PgQueue, number: int, queue: str = "q") -> list[int]:
    task = pq.task(name=f"work on {queue}", queue=queue)(lambda number: None)
    made: list[int] = task.enqueue_many((n,) for n in range(number))
    return made


def claimed(pq: pgqueue.PgQueue, limit: int = 100, **options: Any) -> list[int]:
    pq._low_water.clear()  # a full pass, as at least once a second
    return [job.id for job in pq.claim("q", limit=limit, **options)]


def running(admin: Admin) -> int:
    return count(admin, "job", "lease_id IS NOT NULL")


def rest(admin: Admin, seconds: float) -> None:
    """The last look at the bucket was so many seconds earlier than it was."""
    admin.execute("UPDATE pgqueue.queue SET refilled_at = refilled_at - %s * interval '1 second'", [seconds])


# How many at once


def test_no_more_jobs_run_than_the_limit_and_each_end_makes_room(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = enqueue(pq, 10)
    pq.limit_queue("q", running=3)
    first = pq.claim("q", limit=2)
    second = pq.claim("q", limit=10)
    assert [job.id for job in [*first, *second]] == ids[:3]
    assert claimed(pq) == []
    pq.complete(second[0])
    assert claimed(pq) == ids[3:4]
    pq.fail(first[0], "later", delay=3600)
    assert claimed(pq) == ids[4:5]
    pq.release(first[1])
    assert claimed(pq) == ids[1:2], "its old place"
    assert running(admin) == 3


def test_jobs_that_have_ended_do_not_count_though_their_lease_lives(pq: pgqueue.PgQueue) -> None:
    enqueue(pq, 100)
    pq.limit_queue("q", running=20)
    jobs = pq.claim("q", limit=20)
    pq.complete(jobs[:15])
    assert len(claimed(pq)) == 15


def test_a_lost_job_gives_its_slot_back_and_nothing_leaks(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = enqueue(pq, 4)
    pq.limit_queue("q", running=2)
    for _ in range(5):
        assert claimed(pq) == ids[:2]
        assert claimed(pq) == [], "until it is rescued it may still run"
        admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
        assert pq.rescue("q").returned == ids[:2]
    admin.execute("DELETE FROM pgqueue.job WHERE id = ANY (%s)", [ids[:2]])
    assert claimed(pq) == ids[2:], "nothing but rows that live is counted"


def test_an_end_of_a_lease_long_ago_does_not_stop_a_queue_that_nobody_rescues(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ids = enqueue(pq, 2)
    pq.limit_queue("q", running=1)
    assert claimed(pq) == ids[:1]
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '2 minutes'")
    assert [job.id for job in pq.run(limit_ops.claim("q", 9, free=9, lease=30, low_water=LowWater())).jobs] == ids[1:]


def test_a_limit_below_what_runs_starts_nothing_new_and_ends_nothing(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = enqueue(pq, 10)
    pq.limit_queue("q", running=5)
    jobs = pq.claim("q", limit=10)
    pq.limit_queue("q", running=2)
    assert claimed(pq) == []
    pq.complete(jobs[:3])
    assert claimed(pq) == []
    pq.extend(jobs[3:], 60)
    pq.complete(jobs[3])
    assert claimed(pq) == ids[5:6]
    pq.limit_queue("q", running=4)
    assert claimed(pq) == ids[6:8]
    assert running(admin) == 4


def test_a_plain_claim_takes_nothing_from_a_limited_queue_whatever_it_knows(pq: pgqueue.PgQueue) -> None:
    enqueue(pq, 3)

    def plain() -> Any:
        params = {**looks_at("q", 10, 30.0, None, None, []), "relaxed": False}
        return len((yield Step("job_claim", params)))

    pq.limit_queue("q", running=100)
    assert pq.run(plain()) == 0
    pq.limit_queue("q", rate=1e9)
    assert pq.run(plain()) == 0
    pq.unlimit_queue("q")
    assert pq.run(plain()) == 3


def test_a_claim_within_limits_takes_all_there_is_where_there_is_none(pq: pgqueue.PgQueue) -> None:
    ids = enqueue(pq, 30)
    granted = pq.run(limit_ops.claim("q", 20, free=1, lease=30, low_water=LowWater()))
    assert [job.id for job in granted.jobs] == ids[:20]
    assert (granted.limited, granted.bound) == (False, None)
    pq.pause("q")
    assert pq.run(limit_ops.claim("q", 20, free=1, lease=30, low_water=LowWater())).jobs == []


def test_beyond_its_free_runners_a_claimer_gets_a_quarter_of_the_room(pq: pgqueue.PgQueue) -> None:
    enqueue(pq, 200)
    pq.limit_queue("q", running=100)

    def take(limit: int, free: int) -> int:
        return len(pq.run(limit_ops.claim("q", limit, free=free, lease=30, low_water=LowWater())).jobs)

    assert take(1000, 5) == 25
    assert take(1000, 40) == 40
    assert take(10, 0) == 8, "a quarter of 35"
    assert take(1000, 1000) == 27


def test_two_claims_at_once_do_not_overrun_the_limit(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    ids = enqueue(pq, 10)
    pq.limit_queue("q", running=3)
    with psycopg.connect(database) as first:
        first.execute(SQL["limit_lock"], {"queue": "q", "wait": True})
        answer = first.execute(SQL["job_claim_limited"], {**CLAIM, "limit": 2}).fetchone()
        assert answer is not None
        assert answer[1] == 2
        second: list[list[int]] = []
        thread = threading.Thread(target=lambda: second.append(claimed(pq)), daemon=True)
        thread.start()
        wait_until(lambda: waiting(admin), PATIENCE, "the second claim waits for the first")
        assert claimed_elsewhere(pq) == 1, "claims of other queues do not"
        first.commit()
        thread.join(PATIENCE)
    assert second == [ids[2:3]]


def waiting(admin: Admin) -> bool:
    row = admin.execute(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchone()
    return row is not None and row[0] > 0


def claimed_elsewhere(pq: pgqueue.PgQueue) -> int:
    enqueue(pq, 1, "elsewhere")
    pq.limit_queue("elsewhere", running=1)
    return len(pq.claim("elsewhere", limit=5))


def test_claims_of_many_threads_take_the_limit_and_no_more(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 100)
    pq.limit_queue("q", running=7)
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.extend(claimed(pq, 2))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(set(taken)) == len(taken) == running(admin) == 7


CLAIMS = """
import sys

import pgqueue
from pgqueue.ops import limit
from pgqueue.ops.claim import LowWater

with pgqueue.PgQueue(sys.argv[1]) as pq:
    pq.run(limit.claim("q", 8, free=8, lease=300, low_water=LowWater()))
"""


def test_a_process_frozen_in_a_claim_within_limits_holds_up_others_for_seconds_only(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    ids = enqueue(pq, 10)
    pq.limit_queue("q", running=9)
    waits = "SELECT count(*) FROM pg_locks WHERE relation = 'pgqueue.lease'::regclass AND NOT granted"
    with psycopg.connect(database) as holder:
        holder.execute("LOCK TABLE pgqueue.lease IN ACCESS EXCLUSIVE MODE")
        process = subprocess.Popen([sys.executable, "-c", CLAIMS, database])
        try:
            wait_until(lambda: admin.execute(waits).fetchone() == (1,), PATIENCE, "the claim is under way")
            process.send_signal(signal.SIGSTOP)
            holder.rollback()
            taken: list[list[int]] = []
            other = threading.Thread(target=lambda: taken.append(claimed(pq, 8)), daemon=True)
            other.start()
            other.join(PATIENCE)
            assert taken == [ids[:8]], "the server has taken the claim of the frozen one back"
            assert running(admin) == 8
        finally:
            process.kill()
            process.wait()

"""Limits of queues under workers: how they learn of them, wait for them, and what they tell."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.ops import limit as limit_ops
from pgqueue.worker import maintenance
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
WITNESS = """
CREATE TABLE witness (at timestamptz, jobs int);
CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO witness VALUES (NEW.claimed_at, cardinality(NEW.job_ids)); RETURN NEW; END $$;
CREATE TRIGGER witness AFTER INSERT ON pgqueue.lease FOR EACH ROW EXECUTE FUNCTION witness();
"""


class Gauge:
    """How many handlers are inside at once, and the most there ever were."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.most = 0

    def work(self, seconds: float = 0.002) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(seconds)
        with self.lock:
            self.inside -= 1


def assert_within(starts: list[tuple[datetime, int]], rate: float, burst: int) -> None:
    """Between any two starts there are no more than the burst and what the time between brings."""
    sums = [0, *itertools.accumulate(jobs for _, jobs in starts)]
    for first, (began, _) in enumerate(starts):
        for last in range(first, len(starts)):
            seconds = (starts[last][0] - began).total_seconds()
            assert sums[last + 1] - sums[first] <= burst + rate * seconds + 1e-6, (began, seconds)


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_workers_together_run_no_more_jobs_than_the_limit_and_all_are_done(
    colour: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    gauge = Gauge()
    work = define(pq, colour, gauge.work)
    with pgqueue.PgQueue(database) as other:
        define(other, colour, gauge.work)
        pq.limit_queue("q", running=3)
        work.enqueue_many(() for _ in range(200))
        with running(pq, concurrency=4), running(other, concurrency=4):
            wait_for_count(admin, 200, "archive")
    assert 1 <= gauge.most <= 3


def test_in_any_time_no_more_jobs_are_claimed_than_burst_and_rate_allow(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    admin.execute(WITNESS.encode())
    work = define(pq, "plain", lambda: None)
    pq.limit_queue("q", rate=100, burst=10)
    with ExitStack() as stack:
        others = [stack.enter_context(pgqueue.PgQueue(database)) for _ in range(2)]
        for one in others:
            define(one, "plain", lambda: None)
        for one in (pq, *others):
            stack.enter_context(running(one, concurrency=4))
        work.enqueue_many(() for _ in range(150))
        wait_for_count(admin, 150, "archive")
    starts = admin.execute("SELECT at, jobs FROM witness ORDER BY at").fetchall()
    assert sum(jobs for _, jobs in starts) == 150
    assert_within(starts, 100, 10)
    assert starts[-1][0] - starts[0][0] < timedelta(seconds=30), "and they are used"


def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a worker that waits for a limit looks only when it is told to."""
    monkeypatch.setattr(maintenance, "PERIOD", 600.0)
    monkeypatch.setattr(maintenance, "QUIET_PERIOD", 600.0)
    monkeypatch.setattr("pgqueue.limit.LONGEST_WAIT", 600.0)


@pytest.mark.parametrize("change", ["raised", "lifted"])
def test_a_limit_that_is_raised_or_lifted_wakes_workers_at_once(
    change: str, pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    unheard(monkeypatch)
    work = define(pq, "plain", lambda: None)
    pq.limit_queue("q", rate=1, per=86400, burst=1)
    work.enqueue_many(() for _ in range(5))
    with running(pq, poll=600, lease=6000) as watched:
        wait_until(watched.worker._hearing, PATIENCE, "the worker hears")
        wait_for_count(admin, 1, "archive")
        watched.wait_for(EventName.QUEUE_LIMITED)
        if change == "raised":
            pq.limit_queue("q", rate=1000, burst=100)
        else:
            pq.unlimit_queue("q")
        wait_for_count(admin, 5, "archive")


def test_a_limit_that_is_set_under_a_worker_binds_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    gate = threading.Event()
    begun: list[int] = []

    def wait(number: int) -> None:
        begun.append(number)
        assert gate.wait(PATIENCE)

    work = define(pq, "plain", wait)
    with running(pq, concurrency=10, poll=600) as watched:
        wait_until(watched.worker._hearing, PATIENCE, "the worker hears")
        pq.limit_queue("q", running=2)
        work.enqueue_many((number,) for number in range(6))
        watched.wait_for(EventName.QUEUE_LIMITED, queue="q", bound="running", running=2)
        wait_until(lambda: len(begun) == 2, PATIENCE, "two have begun")
        assert count(admin, "job", "lease_id IS NOT NULL") == 2
        pq.limit_queue("q", running=4)
        wait_until(lambda: len(begun) == 4, PATIENCE, "two more begin")
        pq.limit_queue("q", running=1)
        gate.set()
        wait_for_count(admin, 6, "archive")


def test_a_slot_that_another_worker_frees_is_found(pq: pgqueue.PgQueue, admin: Admin) -> None:
    work = define(pq, "plain", lambda: None)
    pq.limit_queue("q", running=1)
    work.enqueue()
    [job] = pq.claim("q", lease=600)
    work.enqueue()
    with running(pq, poll=600) as watched:
        watched.wait_for(EventName.QUEUE_LIMITED)
        pq.complete(job)
        wait_for_count(admin, 2, "archive")


def test_a_limit_is_told_once_while_it_binds(pq: pgqueue.PgQueue, admin: Admin) -> None:
    work = define(pq, "plain", lambda: None)
    pq.limit_queue("q", running=2, rate=50, burst=1)
    with running(pq, concurrency=4) as watched:
        work.enqueue()
        wait_for_count(admin, 1, "archive")
        assert watched.seen(EventName.QUEUE_LIMITED) == [], "nothing waited for it"
        work.enqueue_many(() for _ in range(100))
        wait_for_count(admin, 101, "archive")
        [event] = watched.seen(EventName.QUEUE_LIMITED)
    assert {**event.facts, "bound": "rate"} == {"queue": "q", "bound": "rate", "running": 2, "rate": 50.0, "burst": 1}


def test_a_worker_that_drains_waits_for_a_limit(pq: pgqueue.PgQueue, admin: Admin) -> None:
    work = define(pq, "plain", lambda: None)
    pq.limit_queue("q", running=1, rate=20, burst=1)
    work.enqueue_many(() for _ in range(10))
    with running(pq, drain=True) as watched:
        assert watched.join() == 0
    assert count(admin, "archive") == 10


def test_a_failing_job_and_its_retries_keep_to_the_limits(pq: pgqueue.PgQueue, admin: Admin) -> None:
    admin.execute(WITNESS.encode())

    def fail() -> None:
        raise ValueError("not yet")

    define(pq, "plain", fail, max_attempts=4, retry=pgqueue.Fixed(0)).enqueue_many(() for _ in range(5))
    pq.limit_queue("q", running=2, rate=50, burst=2)
    with running(pq, breaker_failures=0, unfit_failures=0):
        wait_for_count(admin, 5, "dead_letter")
    starts = admin.execute("SELECT at, jobs FROM witness ORDER BY at").fetchall()
    assert sum(jobs for _, jobs in starts) == 20
    assert_within(starts, 50, 2)


# Declared in code


def declare(pq: pgqueue.PgQueue) -> None:
    pq.run(pq.declare_limits_op())


def said(pq: pgqueue.PgQueue) -> list[tuple[int | None, float | None]]:
    return [(limit.running, limit.rate) for limit in pq.limits()]


def silent(admin: Admin) -> None:
    """No worker that has it in its code was seen for more than a minute."""
    admin.execute("UPDATE pgqueue.queue SET limit_affirmed_at = now() - interval '61 s'")


def test_what_an_operator_changed_of_a_declared_limit_stays_until_the_code_says_something_new(
    database: str, admin: Admin
) -> None:
    with pgqueue.PgQueue(database) as old, pgqueue.PgQueue(database) as new:
        old.declare_limit("q", running=5)
        new.declare_limit("q", running=7, rate=2)
        declare(old)
        assert said(old) == [(5, None)]
        assert old.limits()[0].in_code
        old.limit_queue("q", running=1)
        declare(old)
        assert said(old) == [(1, None)], "a restart of the same code"
        old.unlimit_queue("q")
        declare(old)
        assert said(old) == []
        declare(new)
        assert said(old) == [(7, 2.0)]
        declare(old)
        assert said(old) == [(7, 2.0)], "a worker of the version before that restarts"
        silent(admin)
        declare(old)
        declare(new)
        assert said(old) == [(5, None)], "a rollback"


def test_a_declaration_that_was_affirmed_at_the_last_moment_is_not_turned_back(database: str, admin: Admin) -> None:
    with pgqueue.PgQueue(database) as old, pgqueue.PgQueue(database) as new:
        old.declare_limit("q", running=5)
        new.declare_limit("q", running=7)
        declare(old)
        declare(new)
        silent(admin)
        op = limit_ops.declare(old.code_limits, channel=None)
        rows = old.run(only(next(op)))
        assert rows == [("q",)], "nobody has said the newer one for long"
        declare(new)  # but now somebody does
        assert old.run(only(op.send(rows))) == []
        assert said(old) == [(7, None)]


def only(step: Any) -> Any:
    return (yield step)


def test_code_takes_over_what_was_set_by_hand_before_and_keeps_the_bucket(database: str) -> None:
    with pgqueue.PgQueue(database) as pq:
        pq.limit_queue("q", rate=1, per=3600, burst=4)
        pq.task(name="work", queue="q")(lambda: None).enqueue_many(() for _ in range(9))
        assert len(pq.claim("q", limit=9)) == 4
        pq.declare_limit("q", rate=2, per=3600, burst=5)
        declare(pq)
        assert [limit.burst for limit in pq.limits()] == [5]
        assert pq.claim("q", limit=9) == []


def test_workers_that_start_together_write_a_declaration_once(database: str) -> None:
    barrier = threading.Barrier(5)
    written: list[list[str]] = []

    def start() -> None:
        with pgqueue.PgQueue(database) as pq:
            pq.declare_limit("q", running=5)
            barrier.wait(PATIENCE)
            written.append(pq.run(limit_ops.declare(pq.code_limits, channel=None)))

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(written) == [[], [], [], [], ["q"]]


def test_a_worker_writes_what_its_code_declares_before_it_claims_and_affirms_it(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "AFFIRM_EVERY", 0.05)
    monkeypatch.setattr(maintenance, "PERIOD", 0.05)
    monkeypatch.setattr(maintenance, "QUIET_PERIOD", 0.05)
    gauge = Gauge()
    pq.declare_limit("q", running=1)
    define(pq, "plain", gauge.work).enqueue_many(() for _ in range(30))
    with running(pq, concurrency=8) as watched:
        assert len(watched.seen(EventName.QUEUE_LIMIT_SET, queue="q", running=1)) == 1
        wait_for_count(admin, 30, "archive")
        silent(admin)
        wait_for_count(admin, 1, "queue", "limit_affirmed_at > now() - interval '30 s'")
    assert gauge.most == 1

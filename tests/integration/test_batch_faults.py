"""What happens to the jobs of a batch when something goes wrong: timeouts, cancellations, lost leases, stops, circuits."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.worker import claimer
from tests.acceptance.command_line import CommandLine
from tests.batches import LONG, NEVER, Seen, define, rows, take_away
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, running, wait_for_count

Admin = psycopg.Connection[Any]
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])


class Gate:
    """A handler that stays inside until the test lets it go on; `jobs` are those of its last call."""

    def __init__(self) -> None:
        self.jobs: pgqueue.Batch | None = None
        self.let_go = threading.Event()

    def __call__(self, jobs: pgqueue.Batch) -> None:
        self.jobs = jobs
        self.let_go.wait(PATIENCE)

    @contextmanager
    def worker(self, pq: pgqueue.PgQueue, **options: Any) -> Iterator[Watched]:
        """A worker that does not wait for the handler at its end."""
        try:
            with running(pq, **options) as watched:
                yield watched
                self.let_go.set()
        finally:
            self.let_go.set()

    @contextmanager
    def held(self, pq: pgqueue.PgQueue, number: int, **options: Any) -> Iterator[tuple[Watched, pgqueue.Batch]]:
        """A worker that is inside, with so many jobs."""
        with self.worker(pq, **options) as watched:
            jobs = wait_until(lambda: self.jobs, PATIENCE, "the handler is called")
            assert len(jobs) == number
            yield watched, jobs


# Timeouts


def test_the_shortest_timeout_of_its_jobs_cancels_an_async_batch(pq: pgqueue.PgQueue, admin: Admin) -> None:
    @pq.task(name="work", queue="q", batch=3, batch_wait=LONG, retry=NEVER, timeout=LONG)
    async def work(jobs: pgqueue.Batch) -> None:
        jobs[0].complete()
        await asyncio.sleep(LONG)

    ids = [work.enqueue(), work.options(timeout=0.2).enqueue(), work.enqueue()]
    with running(pq):
        wait_for_count(admin, 1, "archive", f"state = 'completed' AND id = {ids[0]}")
        wait_for_count(admin, 2, "job", "attempt = 1 AND errors->0->>'type' = 'TimeoutError' AND run_at IS NOT NULL")


def test_a_plain_batch_past_its_timeout_keeps_its_jobs_and_loses_its_slot(pq: pgqueue.PgQueue, admin: Admin) -> None:
    gate, plain = Gate(), []
    work = define(pq, "plain", gate, batch=2, batch_wait=LONG, timeout=0.2)
    other = pq.task(name="other", queue="q")(plain.append)
    ids = work.enqueue_many([()] * 2)
    with gate.held(pq, 2, concurrency=1) as (watched, jobs):
        for job_id in ids:
            assert watched.wait_for(EventName.JOB_OVERDUE, id=job_id).facts["stuck"] == 1
        assert jobs.cancelled
        other.enqueue(5)
        wait_for_count(admin, 1, "archive", "task = 'other'")
        assert {held.job.id for held in watched.worker.threads.stuck()} == set(ids)
        gate.let_go.set()
        wait_for_count(admin, 2, "archive", "task = 'work' AND state = 'completed' AND attempt = 1")


# Cancellation


@COLOURS
def test_a_cancelled_job_of_a_batch_is_told_alone_and_the_call_goes_on(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    gate = Gate()

    def body(jobs: pgqueue.Batch) -> None:
        gate(jobs)
        for job in jobs:
            if job.cancelled:
                job.fail(RuntimeError("stopped"))

    first, second, third = define(pq, colour, body, batch=3, batch_wait=LONG).enqueue_many([()] * 3)
    with gate.held(pq, 3) as (watched, jobs):
        pq.cancel([second])
        watched.wait_for(EventName.JOB_CANCEL_REQUESTED, id=second)
        wait_until(lambda: jobs[1].cancelled, PATIENCE, "the job is told")
        assert [job.cancelled for job in jobs] == [False, True, False]
        assert not jobs.cancelled
        gate.let_go.set()
        wait_for_count(admin, 3, "archive")
    assert rows(admin, "id, state", "archive") == [(first, "completed"), (second, "cancelled"), (third, "completed")]


def test_an_async_call_is_cancelled_with_the_last_of_its_jobs(pq: pgqueue.PgQueue, admin: Admin) -> None:
    entered, said = threading.Event(), []

    @pq.task(name="work", queue="q", batch=2, batch_wait=LONG)
    async def work(jobs: pgqueue.Batch) -> None:
        entered.set()
        try:
            await asyncio.sleep(LONG)
        finally:
            said.append([job.cancelled for job in jobs])

    first, second = work.enqueue_many([()] * 2)
    with running(pq) as watched:
        assert entered.wait(PATIENCE)
        pq.cancel([first])
        watched.wait_for(EventName.JOB_CANCEL_REQUESTED, id=first)
        assert said == []
        pq.cancel([second])
        wait_for_count(admin, 2, "archive", "state = 'cancelled'")
    assert said == [[True, True]]


def test_a_job_that_is_cancelled_while_its_batch_forms_is_archived_and_the_others_wait_on(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen = Seen()
    ids = define(pq, "plain", seen, batch=3, batch_wait=LONG).enqueue_many([(0,), (1,)])
    with running(pq) as watched:
        wait_until(lambda: len(watched.worker.ledger) == 2, PATIENCE, "both wait for a third")
        assert pq.cancel([ids[0]]) == {ids[0]: "requested"}
        wait_for_count(admin, 1, "archive", f"id = {ids[0]} AND state = 'cancelled'")
        wait_until(lambda: len(watched.worker.ledger) == 1, PATIENCE, "the other waits on")
        assert seen.calls == []


# Leases


def test_a_job_of_a_batch_whose_lease_is_lost_is_told_and_not_settled(pq: pgqueue.PgQueue, admin: Admin) -> None:
    gate = Gate()
    work = define(pq, "plain", gate, batch=2, batch_wait=LONG)
    first = work.enqueue()
    with gate.worker(pq) as watched:
        watched.wait_for(EventName.JOBS_CLAIMED, ids=[first])
        second = work.enqueue()  # under a lease of its own
        jobs = wait_until(lambda: gate.jobs, PATIENCE, "the handler is called")
        take_away(admin, first)
        admin.execute("DELETE FROM pgqueue.lease WHERE id = %s", [jobs[0].token])
        watched.worker.heartbeat.ask()
        watched.wait_for(EventName.LEASE_LOST, ids=[first])
        assert [job.cancelled for job in jobs] == [True, False]
        gate.let_go.set()
        wait_for_count(admin, 1, "archive", f"id = {second} AND state = 'completed'")
    assert rows(admin, "id, attempt, errors") == [(first, 1, None)]


def test_jobs_are_kept_while_their_batch_forms_for_longer_than_a_lease(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen = Seen()
    work = define(pq, "plain", seen, batch=2, batch_wait=LONG)
    work.enqueue(0)
    with running(pq, lease=1.5) as watched:
        watched.wait_for(EventName.JOBS_CLAIMED)
        [(first_end,)] = admin.execute("SELECT max(expires_at) FROM pgqueue.lease").fetchall()
        over = "SELECT clock_timestamp() > %s::timestamptz"
        wait_until(lambda: admin.execute(over, [first_end]).fetchall() == [(True,)], PATIENCE, "the first lease ended")
        work.enqueue(1)
        wait_for_count(admin, 2, "archive", "state = 'completed' AND attempt = 1 AND lost = 0")
        assert not watched.seen(EventName.LEASE_LOST)
    assert seen.calls == [[0, 1]]


# Stops and expiry


def test_a_stop_gives_a_forming_batch_back_and_burns_no_attempt(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen = Seen()
    define(pq, "plain", seen, batch=3, batch_wait=LONG).enqueue_many([(0,), (1,)])
    with running(pq, grace=LONG) as watched:
        wait_until(lambda: len(watched.worker.ledger) == 2, PATIENCE, "both wait for a third")
        watched.worker.stop()
        assert watched.join() == 0
        assert watched.worker.claimer.batches.join(PATIENCE), "its thread has ended too"
    assert rows(admin, "attempt, lease_id, run_at, errors") == [(0, None, None, None)] * 2
    assert seen.calls == []


@COLOURS
def test_the_end_of_the_grace_time_gives_back_the_jobs_of_a_call_that_have_no_answer(
    colour: str, pq: pgqueue.PgQueue, admin: Admin, unhurried: None
) -> None:
    entered = threading.Event()
    over = threading.Event()

    if colour == "async":

        @pq.task(name="work", queue="q", batch=2, batch_wait=LONG)
        async def work(jobs: pgqueue.Batch) -> None:
            jobs[0].complete()
            entered.set()
            await asyncio.sleep(LONG)

    else:

        @pq.task(name="work", queue="q", batch=2, batch_wait=LONG)
        def work(jobs: pgqueue.Batch) -> None:
            jobs[0].complete()
            entered.set()
            over.wait(PATIENCE)

    first, second = work.enqueue_many([()] * 2)
    try:
        with running(pq, grace=0.1) as watched:
            assert entered.wait(PATIENCE)
            watched.worker.stop()
            assert watched.join() == 0
        assert rows(admin, "id, attempt, lease_id, run_at, errors") == [(second, 0, None, None, None)]
        assert rows(admin, "id, state", "archive") == [(first, "completed")]
    finally:
        over.set()


def test_a_job_that_expires_while_its_batch_forms_is_not_handed_over(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen = Seen()
    work = define(pq, "plain", seen, batch=3, batch_wait=1.2)
    expired = work.options(expires_in=0.6).enqueue(0)
    work.enqueue(1)
    with running(pq):
        wait_for_count(admin, 1, "archive", f"id = {expired} AND state = 'expired'")
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    assert seen.calls == [[1]]


# Circuits


def test_a_call_that_raises_is_one_failure_for_the_circuit_and_a_probe_runs_alone(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    seen, down = Seen(), threading.Event()
    down.set()

    def body(jobs: pgqueue.Batch) -> None:
        seen(jobs)
        if down.is_set():
            raise ConnectionError("nobody listens")

    work = define(pq, "plain", body, batch=20, batch_wait=LONG, retry=pgqueue.Fixed(0), max_attempts=100)
    work.enqueue_many((number,) for number in range(20))
    with running(pq, concurrency=1, breaker_failures=3) as watched:
        opened = watched.wait_for(EventName.TASK_CIRCUIT_OPENED, task="work")
        assert opened.facts["failures"] == 3
        assert seen.sizes[:3] == [20, 20, 20]
        watched.wait_for_all(2, EventName.TASK_CIRCUIT_OPENED)
        assert set(seen.sizes[3:]) == {1}
        down.clear()
        watched.wait_for(EventName.TASK_CIRCUIT_CLOSED, task="work")
        work.enqueue(20)
        wait_for_count(admin, 21, "archive", "state = 'completed'")


def test_a_call_with_one_completed_job_counts_as_no_failure(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(jobs: pgqueue.Batch) -> None:
        for job in jobs[1:]:
            job.fail(ValueError("bad"))

    define(pq, "plain", body, batch=10, batch_wait=LONG).enqueue_many([()] * 50)
    with running(pq, concurrency=1, breaker_failures=2) as watched:
        wait_for_count(admin, 5, "archive", "state = 'completed'")
        wait_for_count(admin, 45, "job", "attempt = 1 AND run_at IS NOT NULL")
        assert not watched.seen(EventName.TASK_CIRCUIT_OPENED)


def test_jobs_of_other_tasks_that_a_claim_for_batches_brings_are_not_hoarded(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "HOARD", LONG)  # what goes back because nothing starts for a while is another matter
    go_on = threading.Event()
    # Calls that take their time: after quick ones a worker would rightly hold many.
    work = define(pq, "plain", lambda jobs: time.sleep(0.2), batch=100)
    slow = pq.task(name="slow", queue="other")(lambda: go_on.wait(PATIENCE))
    work.enqueue_many((number,) for number in range(300))
    slow.options(queue="q").enqueue_many([()] * 100)
    try:
        with running(pq, concurrency=2) as watched:
            watched.wait_for(EventName.JOBS_RELEASED, queue="q")
            wait_for_count(admin, 300, "archive", "state = 'completed'")
            wait_until(lambda: len(watched.worker.ledger) <= 10, PATIENCE, "what no slot is free for is given back")
            assert count(admin, "job", "attempt = 0") >= 90
            go_on.set()
            wait_for_count(admin, 400, "archive", "state = 'completed' AND attempt = 1")
    finally:
        go_on.set()


# Processes that die


APP = """
    import os
    import signal

    import psycopg

    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(name="work", queue="images", batch=10, batch_wait=600, retry=pgqueue.Fixed(0), max_attempts=4)
    def work(jobs):
        with psycopg.connect(os.environ["PGQUEUE_DATABASE_URL"], autocommit=True) as connection:
            for job in jobs:
                connection.execute("INSERT INTO run VALUES (%s, %s, %s)", [job.id, len(jobs), os.getpid()])
        if any(job.args == ["poison"] for job in jobs):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_worker_died_in_the_middle_of_a_batch_its_jobs_run_alone_and_only_the_guilty_one_dies(
    pq: pgqueue.PgQueue, database: str, admin: Admin, tmp_path: Path
) -> None:
    admin.execute("CREATE TABLE run (job_id bigint, size int, pid int)")
    cli = CommandLine(tmp_path, database)
    cli.write("shop.py", APP)
    kinds = [("good",)] * 4 + [("poison",)] + [("good",)] * 5
    ids = [pq.enqueue("work", kind, queue="images", max_attempts=3, retry=pgqueue.Fixed(0)) for kind in kinds]
    words = ("worker", "--app", "shop", "--lease", "1.5")
    with cli.started(*words) as program:
        assert program.wait() == -signal.SIGKILL
        killed = program.process.pid
    assert admin.execute("SELECT DISTINCT size, pid FROM run").fetchall() == [(10, killed)]
    with cli.started(*words, "--drain") as program:
        assert program.wait() == 0, program.errors
        assert program.process.pid not in [pid for (pid,) in admin.execute("SELECT DISTINCT pid FROM run").fetchall()]
    assert rows(admin, "id, reason, attempt", "dead_letter") == [(ids[4], "worker lost", 3)]
    done = [(job_id, "completed", 2, 1) for job_id in ids if job_id != ids[4]]
    assert rows(admin, "id, state, attempt, lost", "archive") == done
    later = admin.execute("SELECT size, count(*) FROM run WHERE pid <> %s GROUP BY size", [killed]).fetchall()
    assert later == [(1, 11)]

"""Networks that hang, lose answers and come back: through a proxy, with a worker in this process or the real command."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.worker import WorkerOptions, claimer, listener, loop
from tests.acceptance.command_line import CommandLine
from tests.chaos.proxy import Proxy, target_of
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, running, wait_for_count

LEASE = 5.0
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])
CLAIM, SETTLE, ENQUEUE = b"(queue, worker_id, job_ids", b"width_bucket", b'INSERT INTO "pgqueue".job ('
"""What tells these statements from all others."""
LOOPS = ["claim", "settle", "heartbeat", "maintenance", "schedules", "listen"]
PATIENT = """
    from pgqueue.worker import WorkerOptions
    from shop import pq

    WorkerOptions.deadline = property(lambda self: 600.0)
"""
"""An application whose worker gives every round trip ten minutes."""


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    with Proxy(target_of(database)) as between:
        yield between


@pytest.fixture
def far(proxy: Proxy, database: str) -> Iterator[pgqueue.PgQueue]:
    """The application beyond the proxy. Its statements travel as text, so that the proxy can tell them apart."""
    with pgqueue.PgQueue(proxy.url(database), prepare=False) as queue:
        yield queue


class Handler:
    """A task whose job 0 runs, in its first attempt, until it is told to stop, and then until it is let go."""

    def __init__(self, app: pgqueue.PgQueue, colour: str) -> None:
        self.starts: list[int] = []
        self.told_at = 0.0
        self.let_go = threading.Event()
        self.task = app.task(name="work", queue="q", max_attempts=5)(self.run_async if colour == "async" else self.run)

    def begin(self, number: int) -> bool:
        self.starts.append(number)
        return number == 0 and pgqueue.current_job().attempt == 1

    def told(self) -> None:
        assert pgqueue.current_job().cancelled
        self.told_at = time.monotonic()

    def run(self, number: int) -> None:
        if self.begin(number):
            job = pgqueue.current_job()
            wait_until(lambda: job.cancelled, PATIENCE * 2, "the handler is told")
            self.told()
            assert self.let_go.wait(PATIENCE * 2)

    async def run_async(self, number: int) -> None:
        if self.begin(number):
            try:
                await asyncio.Event().wait()
            finally:
                self.told()
                while not self.let_go.is_set():
                    await asyncio.sleep(0.02)


def hoarding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers claim far ahead, and keep what they have claimed."""
    monkeypatch.setattr(claimer, "AHEAD", 5.0)
    monkeypatch.setattr(claimer, "HOARD", 3600.0)


def settled(watched: Watched) -> set[int]:
    """The jobs whose outcome the worker knows to be stored. The database knows it before."""
    return {job_id for event in watched.seen(EventName.JOBS_SETTLED) for job_id in event.facts["ids"]}


def holding(watched: Watched) -> tuple[list[int], Any]:
    """The ids of what the worker holds, once that is more than one job of one lease; and that lease."""
    leases = watched.worker.ledger._leases
    lease = wait_until(lambda: [one for one in list(leases.values()) if len(one.held) > 1], PATIENCE, "a buffer")[0]
    return sorted(lease.held), lease


@COLOURS
def test_a_worker_whose_network_hangs_longer_than_its_lease_starts_nothing_more_and_says_so(
    colour: str,
    far: pgqueue.PgQueue,
    pq: pgqueue.PgQueue,
    proxy: Proxy,
    admin: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hoarding(monkeypatch)
    cut_off = Handler(far, colour)
    there = Handler(pq, colour)
    with running(far, lease=LEASE, poll=0.2, concurrency=1) as first:
        there.task.enqueue_many([(number,) for number in range(100, 120)])
        wait_until(lambda: len(settled(first)) == 20, PATIENCE, "the worker has heard of the end of the first jobs")
        there.task.enqueue_many([(number,) for number in range(10)])
        wait_until(lambda: 0 in cut_off.starts, PATIENCE, "the first job runs")
        ids, lease = holding(first)
        proxy.stall()
        warm = len(cut_off.starts)
        with running(pq, lease=30.0, poll=0.2, concurrency=1) as second:
            lost = first.wait_for(EventName.LEASE_LOST)
            assert (sorted(lost.facts["ids"]), lost.facts["during"]) == (ids, "not renewed in time")
            wait_until(lambda: cut_off.told_at, PATIENCE, "the handler is told")
            print(f"\ntold {cut_off.told_at - lease.confirmed:+.3f} s after the end of its lease")
            wait_for_count(admin, 30, "archive")
            assert not second.seen(EventName.LEASE_LOST)
        cut_off.let_go.set()
        wait_until(lambda: first.worker.threads.idle() and first.worker.coroutines.idle(), PATIENCE, "all has ended")
        assert len(cut_off.starts) == warm  # all of the buffer was passed over
        proxy.resume()
        late = pq.enqueue("work", [200], queue="q")
        wait_until(lambda: 200 in cut_off.starts, PATIENCE, "it works again by itself")
        wait_for_count(admin, 31, "archive")
        wait_until(lambda: late in settled(first), PATIENCE, "the worker has heard of its end")
        assert len(first.seen(EventName.LEASE_LOST)) == 1
        assert not settled(first) & set(ids)
    [(twice, others)] = admin.execute(
        "SELECT array_agg(id ORDER BY id) FILTER (WHERE attempt = 2 AND lost = 1), count(*) FILTER (WHERE attempt > 2)"
        " FROM pgqueue.archive WHERE id <> %s",
        [late],
    ).fetchall()
    assert (twice, others) == (ids, 0)


@pytest.mark.parametrize("heartbeat", ["hangs in a round trip", "waits between two tries"])
@COLOURS
def test_the_end_of_a_lease_is_noticed_in_time_though_the_heartbeat(
    heartbeat: str, colour: str, far: pgqueue.PgQueue, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler(far, colour)
    handler.let_go.set()
    with running(far, lease=LEASE, poll=0.2, concurrency=1) as watched:
        handler.task.enqueue(0)
        wait_until(lambda: handler.starts, PATIENCE, "the job runs")
        [lease] = watched.worker.ledger._leases.values()
        # Either lasts far longer than the lease, and the test does not wait for it.
        if heartbeat == "hangs in a round trip":
            watched.worker.heartbeat.link.deadline = 600.0
            proxy.stall()
        else:
            monkeypatch.setattr(loop, "LONGEST_PAUSE", 600.0)
            beat = watched.worker.heartbeat
            monkeypatch.setattr(beat, "give_up", lambda: setattr(beat, "_failures", 10))
            proxy.refuse()
            proxy.drop_all()
        wait_until(lambda: handler.told_at, PATIENCE, "the handler is told")
        print(f"\ntold {handler.told_at - lease.confirmed:+.3f} s after the end of its lease")
        assert watched.wait_for(EventName.LEASE_LOST).facts["during"] == "not renewed in time"
        proxy.resume()
        proxy.drop_all()


def test_an_outcome_that_a_hanging_network_kept_back_is_refused_when_another_worker_has_the_job(
    far: pgqueue.PgQueue, pq: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @far.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        assert let_go.wait(PATIENCE)

    job_id = work.enqueue()
    with running(far, lease=LEASE, poll=0.2, concurrency=1) as watched:
        assert begun.wait(PATIENCE)
        proxy.stall()
        let_go.set()
        wait_until(watched.worker.settler.backlog, PATIENCE, "the outcome is on its way, and the lease not over yet")
        job = wait_until(lambda: pq.claim("q", lease=600), PATIENCE, "another owner has the job")[0]
        assert (job.id, job.attempt, job.lost) == (job_id, 2, 1)
        proxy.resume()
        watched.wait_for(EventName.LEASE_LOST, ids=[job_id], during="settle")
        assert not watched.seen(EventName.JOBS_SETTLED)
    pq.complete(job)
    assert count(admin, "archive", "attempt = 2 AND lost = 1") == 1


@pytest.mark.parametrize("busy", ["idle", "busy", "two processes"])
def test_sigterm_ends_a_worker_whose_every_socket_hangs(
    busy: str, proxy: Proxy, database: str, pq: pgqueue.PgQueue, tmp_path: Path
) -> None:
    cli = CommandLine(tmp_path, proxy.url(database))
    cli.write("patient.py", PATIENT)
    words = ["--grace", "1", "--lease", "30", *(["--processes", "2"] if busy == "two processes" else [])]
    with cli.started("worker", "--app", "patient:pq", *words, PGQUEUE_CONNECT_TIMEOUT="600") as worker:
        worker.wait_for("started: queues")
        if busy == "busy":
            pq.enqueue("shop.linger", [600], queue="images")
            cli.wait_for_mark("begun")
        proxy.stall()
        wait_until(lambda: proxy.holding > 1, PATIENCE, "questions hang")
        asked = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        took = time.monotonic() - asked
        print(f"\nleft after {took:.2f} s, grace 1 s")
        assert took < 30.0  # whatever it could wait for lasts 600 s


def test_jobs_whose_claim_was_not_answered_come_back_after_the_lease_with_one_attempt_used(
    far: pgqueue.PgQueue, pq: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    starts: list[tuple[int, int]] = []

    @pq.task(name="work", queue="q")
    def work(number: int) -> None:
        starts.append((pgqueue.current_job().id, pgqueue.current_job().attempt))

    ids = work.enqueue_many([(number,) for number in range(20)])
    proxy.drop_next_replies(20, CLAIM)
    for _ in ids:
        with pytest.raises((psycopg.OperationalError, pgqueue.DatabaseUnavailable)):
            far.claim("q", lease=600.0)
    assert proxy.dropped == 20
    admin.execute("UPDATE pgqueue.lease SET expires_at = clock_timestamp()")  # the first would end amid the others
    with running(pq, poll=0.2):
        wait_for_count(admin, 20, "archive", "attempt = 2 AND lost = 1")
    assert sorted(starts) == [(job_id, 2) for job_id in ids]
    assert count(admin, "job") == count(admin, "lease") == 0


def test_a_worker_that_misses_the_answer_to_its_claim_runs_the_job_when_the_lease_has_ended(
    far: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    work = far.task(name="work", queue="q")(lambda: None)
    with running(far, lease=1.5, poll=600.0) as watched:
        for done in range(1, 11):
            proxy.drop_next_replies(1, CLAIM)
            job_id = work.enqueue()
            wait_for_count(admin, done, "archive")
            if count(admin, "archive", f"id = {job_id} AND attempt = 2 AND lost = 1"):
                break  # else a claim that found nothing was the one whose answer was dropped
        else:
            raise AssertionError("no job came back")
        watched.wait_for(EventName.LOOP_RECOVERED, loop="claim")
    assert count(admin, "job") == count(admin, "lease") == 0


@pytest.mark.parametrize("outcome", ["completed", "retried", "dead"])
def test_an_outcome_whose_answer_was_lost_is_written_once_and_not_called_lost(
    outcome: str, far: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    starts: list[int] = []

    @far.task(name="work", queue="q")
    def work() -> None:
        starts.append(1)
        if outcome != "completed":
            raise pgqueue.Retry(delay=600) if outcome == "retried" else pgqueue.DeadLetter("no")

    with running(far, lease=30.0, poll=0.2) as watched:
        proxy.drop_next_replies(1, SETTLE)
        job_id = work.enqueue()
        watched.wait_for(EventName.JOBS_SETTLED, ids=[job_id])
        assert proxy.dropped == 1
        assert watched.seen(EventName.LOOP_FAILED, loop="settle")
        assert not watched.seen(EventName.LEASE_LOST)
    assert starts == [1]
    tables = {"completed": "archive", "retried": "job", "dead": "dead_letter"}
    assert {table: count(admin, table) for table in tables.values()} == {
        table: int(outcome == name) for name, table in tables.items()
    }
    assert count(admin, tables[outcome], "attempt = 1 AND lost = 0") == 1
    assert count(admin, "lease") == 0


def test_an_outcome_whose_claim_the_server_forgot_is_called_lost_though_an_answer_was_lost_too(
    far: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    """As after a crash of the server: the claim was not on the disk yet, so the job is as it was before."""
    begun, let_go = threading.Event(), threading.Event()

    @far.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        assert let_go.wait(PATIENCE)

    job_id = work.enqueue()
    with running(far, lease=30.0, poll=30.0, concurrency=1) as watched:
        assert begun.wait(PATIENCE)
        far.pause("q")
        with admin.transaction():
            admin.execute("DELETE FROM pgqueue.lease")
            admin.execute("UPDATE pgqueue.job SET lease_id = NULL, attempt = 0")
        proxy.drop_next_replies(1, SETTLE)
        let_go.set()
        watched.wait_for(EventName.LEASE_LOST, ids=[job_id], during="settle")
        assert proxy.dropped == 1
        assert not watched.seen(EventName.JOBS_SETTLED)
    assert count(admin, "job", "attempt = 0 AND lease_id IS NULL") == 1


def test_an_enqueue_whose_answer_was_lost_is_an_error_and_the_job_is_there_once(
    far: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    work = far.task(name="work", queue="q")(lambda number: None)
    far.enqueue("work", [1], queue="q")
    for lost, enqueue in enumerate([lambda: work.enqueue(2), lambda: work.enqueue_many([(2,), (3,)])], 1):
        proxy.drop_next_replies(1, ENQUEUE)
        with pytest.raises((psycopg.OperationalError, pgqueue.DatabaseUnavailable)):
            enqueue()
        assert proxy.dropped == lost
    assert count(admin, "job") == 4
    work.enqueue(4)
    assert count(admin, "job") == 5


@pytest.mark.parametrize("lease", [1.0, 1.5, 3.0, 30.0, 86400.0])
def test_every_round_trip_has_a_deadline_shorter_than_the_lease(lease: float, pq: pgqueue.PgQueue) -> None:
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq, lease=lease) as watched:
        assert set(watched.loops()) == set(LOOPS)
        for name, part in watched.loops().items():
            assert 0 < part.link.deadline <= max(0.5, lease / 3) < lease, name
        assert watched.worker._control.deadline == WorkerOptions(lease=lease).deadline


@pytest.mark.parametrize("fault", ["stall", "to_server", "to_client"])
def test_every_loop_is_cut_off_a_dead_network_and_comes_back(
    fault: str, far: pgqueue.PgQueue, proxy: Proxy, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "PROBE_EVERY", 0.5)
    begun, let_go = threading.Event(), threading.Event()

    @far.task(name="work", queue="q")
    def work(wait: bool) -> None:
        begun.set()
        assert let_go.wait(PATIENCE) or not wait

    work.enqueue(True)
    with running(far, lease=LEASE, poll=0.2) as watched:
        assert begun.wait(PATIENCE)
        since = time.monotonic()
        if fault == "stall":
            proxy.stall()
        else:
            proxy.cut("to_server" if fault == "to_server" else "to_client")
        let_go.set()
        noticed = {}
        for name in LOOPS:
            watched.wait_for(EventName.LOOP_FAILED, loop=name)
            noticed[name] = round(time.monotonic() - since, 2)
        print(f"\nnoticed by {noticed} s, lease {LEASE:g} s")
        proxy.resume()
        proxy.drop_all()
        for name in LOOPS:
            watched.wait_for(EventName.LOOP_RECOVERED, loop=name)
        work.enqueue(False)
        wait_for_count(admin, 2, "archive")
    assert watched.status == 0

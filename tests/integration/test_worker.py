"""A worker in this process: what it does with what tasks return, raise and ask for, and in which order it works."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.events import Bus
from pgqueue.worker.execution import judge, report
from pgqueue.worker.ledger import Held, Lease
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])
NEVER = pgqueue.Fixed(3600)
"""A retry policy under which a test sees each attempt alone."""


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Leaver(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def nested(depth: int) -> BaseException:
    error: BaseException = ValueError("innermost")
    for _ in range(depth):
        error = ExceptionGroup("group", [error])  # type: ignore[list-item]
    return error


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit 0": lambda: SystemExit(0),
    "SystemExit text": lambda: SystemExit("x"),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "TimeoutError": lambda: TimeoutError("its own"),
    "OperationalError": lambda: psycopg.OperationalError("its own"),
    "LeaseLost": lambda: pgqueue.LeaseLost([]),
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "MemoryError": MemoryError,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError("x")]),
    "nested groups": lambda: nested(2000),
    "bare BaseException": lambda: BaseException("bare"),
    "no text": Mute,
    "text that exits": Leaver,
    "NUL": lambda: ValueError("a\0b"),
    "surrogate": lambda: ValueError("a\ud800b"),
    "50 MB": lambda: ValueError("é" * 25_000_000),
    "bytes": lambda: ValueError(b"\xff\x00"),
    "Retry": lambda: pgqueue.Retry(reason="a\0b"),
}


@COLOURS
def test_whatever_a_task_raises_is_one_failed_attempt(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    def work(name: str) -> None:
        if name:
            raise RAISED[name]()

    task = define(pq, colour, work, retry=NEVER, max_attempts=2)
    with running(pq, concurrency=4) as watched:
        ids = {}
        for name in RAISED:
            ids[task.enqueue(name)] = name
            task.enqueue("")
        wait_for_count(admin, len(RAISED), "archive", "state = 'completed'")
        wait_for_count(admin, len(RAISED), "job", "run_at IS NOT NULL AND attempt = 1 AND lost = 0")
        rows = admin.execute("SELECT id, jsonb_array_length(errors), octet_length(errors::text) FROM pgqueue.job")
        assert {(ids[row[0]], row[1]) for row in rows} == {(name, 1) for name in RAISED}
        assert max(row[2] for row in rows.fetchall() or [(0, 0, 0)]) < 20_000
        # The worker lives, and the last attempt is the last.
        admin.execute("UPDATE pgqueue.job SET run_at = '2020-01-01'")
        wait_for_count(admin, len(RAISED), "dead_letter", "attempt = 2 AND jsonb_array_length(errors) = 2")
        assert watched.thread.is_alive()
    assert watched.status == 0
    assert count(admin, "job") == 0


class NamelessType(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("a class without a name")


class Nameless(Exception, metaclass=NamelessType):
    pass


def test_the_report_of_a_failure_survives_an_exception_class_without_a_name() -> None:
    events: list[pgqueue.Event] = []
    bus = Bus()
    bus.subscribe(events.append)
    job = pgqueue.Job(1, "q", "work", 1, 1, 5, 0, 0, 1, None, datetime.now(UTC), None, None, None, None)
    held = Held(job, Lease(1, "q", 0.0))
    report(bus, held, judge(held, Nameless(), prepared=True), Nameless())
    assert [event.name for event in events] == [EventName.JOB_FAILED]


class Exiting(pgqueue.Retry):
    @property
    def delay(self) -> float:  # type: ignore[override]
        raise SystemExit(4)

    @delay.setter
    def delay(self, value: Any) -> None:
        pass


@COLOURS
def test_a_signal_that_exits_when_it_is_read_is_one_failed_attempt(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    def work(exits: bool) -> None:
        if exits:
            raise Exiting

    task = define(pq, colour, work, retry=NEVER, max_attempts=2)
    with running(pq, concurrency=1):
        task.enqueue(True)
        task.enqueue(False)
        wait_for_count(admin, 1, "job", "attempt = 1 AND run_at IS NOT NULL AND errors IS NOT NULL")
        wait_for_count(admin, 1, "archive", "state = 'completed'")


@COLOURS
def test_signals_steer_the_job(colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    signals: dict[str, Callable[[], BaseException]] = {
        "retry": lambda: pgqueue.Retry(delay=3600),
        "snooze": lambda: pgqueue.Snooze(3600),
        "discard": lambda: pgqueue.Discard("of no use"),
        "bury": lambda: pgqueue.DeadLetter("hopeless"),
    }

    def work(name: str) -> None:
        raise signals[name]()

    task = define(pq, colour, work, max_attempts=5)
    ids = {name: task.enqueue(name) for name in signals}
    with running(pq):
        wait_for_count(admin, 2, "job", "run_at IS NOT NULL")
        wait_for_count(admin, 1, "archive")
        wait_for_count(admin, 1, "dead_letter")
    live = admin.execute("SELECT id, attempt, jsonb_array_length(errors) FROM pgqueue.job ORDER BY id").fetchall()
    assert live == [(ids["retry"], 1, 1), (ids["snooze"], 0, None)]
    assert admin.execute("SELECT id, state, reason FROM pgqueue.archive").fetchall() == [
        (ids["discard"], "discarded", "of no use")
    ]
    [(dead, attempt, reason)] = admin.execute("SELECT id, attempt, reason FROM pgqueue.dead_letter").fetchall()
    assert (dead, attempt) == (ids["bury"], 1)
    assert "hopeless" in reason


@COLOURS
def test_a_snooze_burns_no_attempt_however_often_it_comes(
    colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    runs: list[int] = []

    def work() -> None:
        runs.append(pgqueue.current_job().attempt)
        if len(runs) <= 5:
            raise pgqueue.Snooze(0.01 if len(runs) % 2 else 0)

    define(pq, colour, work, max_attempts=2).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed' AND attempt = 1")
    assert runs == [1] * 6


@COLOURS
@pytest.mark.parametrize("max_attempts", [1, 2, 4])
def test_max_attempts_is_the_total_number_of_runs(
    max_attempts: int, colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    runs: list[int] = []

    def work() -> None:
        runs.append(pgqueue.current_job().attempt)
        raise pgqueue.Retry(delay=0)

    define(pq, colour, work, max_attempts=max_attempts).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "dead_letter")
    assert runs == list(range(1, max_attempts + 1))


@COLOURS
def test_a_handler_knows_its_own_job(colour: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    found: dict[str, Any] = {}

    def work(number: int, *, note: str) -> None:
        job = pgqueue.current_job()
        job.extend(60)
        row = admin.execute("SELECT lease_id, attempt FROM pgqueue.job WHERE id = %s", [job.id]).fetchone()
        found[note] = (job.id, job.queue, job.task, job.attempt, job.max_attempts, job.headers, job.cancelled, number)
        assert row == (job.token, job.attempt)

    task = define(pq, colour, work, name="thumbnail", max_attempts=3, headers={"trace": "é😀"})
    with running(pq, concurrency=1):
        ids = [task.enqueue(number, note=f"note {number}") for number in range(3)]
        wait_for_count(admin, 3, "archive")
    assert found == {
        f"note {number}": (job_id, "q", "thumbnail", 1, 3, {"trace": "é😀"}, False, number)
        for number, job_id in enumerate(ids)
    }
    with pytest.raises(pgqueue.PgQueueError, match="inside a task"):
        pgqueue.current_job()


async def forever() -> None:
    await asyncio.Event().wait()


def test_a_timeout_cancels_an_async_task_and_tells_a_plain_one(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    told = threading.Event()

    @pq.task(name="plain", queue="q", timeout=0.2)
    def plain() -> None:
        job = pgqueue.current_job()
        wait_until(lambda: job.cancelled, PATIENCE, "the job sees its timeout")
        told.set()

    pq.task(name="coroutine", queue="q", timeout=0.2, retry=NEVER)(forever)
    plain.enqueue()
    waiting = pq.enqueue("coroutine")
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed'")
        wait_for_count(admin, 1, "job", "attempt = 1 AND errors->0->>'type' = 'TimeoutError'")
    assert told.is_set()
    assert [job.id for job in pq.jobs()] == [waiting]


def test_a_cancelled_job_is_told_and_archived_as_cancelled(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    stops: list[str] = []

    @pq.task(name="plain", queue="q")
    def plain(gives_up: bool) -> None:
        job = pgqueue.current_job()
        wait_until(lambda: job.cancelled, PATIENCE, "the job sees its cancellation")
        stops.append("plain")
        if gives_up:
            raise RuntimeError("stopped half-way")

    @pq.task(name="coroutine", queue="q")
    async def coroutine() -> None:
        try:
            await forever()
        finally:
            assert pgqueue.current_job().cancelled
            stops.append("coroutine")

    done, half, awaited = plain.enqueue(False), plain.enqueue(True), coroutine.enqueue()
    with running(pq, lease=10.0) as watched:
        for job_id in (done, half, awaited):
            watched.wait_for(EventName.JOB_STARTED, id=job_id)
        assert pq.cancel([done, half, awaited]) == dict.fromkeys([done, half, awaited], "requested")
        wait_for_count(admin, 3, "archive")
        # A handler hears of it before the subscribers do.
        for job_id in (done, half, awaited):
            watched.wait_for(EventName.JOB_CANCEL_REQUESTED, id=job_id)
        assert len(watched.seen(EventName.JOB_CANCEL_REQUESTED)) == 3
    assert sorted(stops) == ["coroutine", "plain", "plain"]
    states = dict(admin.execute("SELECT id, state FROM pgqueue.archive").fetchall())
    assert states == {done: "completed", half: "cancelled", awaited: "cancelled"}

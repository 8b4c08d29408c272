"""The application under test: every task records what it does, on connections that know nothing of the queue."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from typing import Any

import psycopg

import pgqueue
from tests.history import planted
from tests.history.record import RECORD

QUEUE = "history"
PATIENCE = 20.0
"""Seconds that a record may wait for the server: longer than any outage of a run."""

planted.plant(os.environ.get(planted.VARIABLE, ""))
pq = pgqueue.PgQueue()
_local = threading.local()


class NotYet(Exception):
    """The failure that the tasks fail with."""


class NoLonger(Exception):
    """The same under another name."""


class RecordLost(Exception):
    """The server was away for too long: this run must not count as done, since nobody could tell."""


def work(seconds: float) -> None:
    """Take that long. Not by time.sleep, which fails where libfaketime bends the clock."""
    threading.Event().wait(seconds)


def execute(statement: str, params: Any) -> list[Any]:
    """On this thread's own connection, past the proxy; again until it is done."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            if getattr(_local, "connection", None) is None:
                _local.connection = psycopg.connect(os.environ["HISTORY_URL"], autocommit=True, connect_timeout=5)
            cursor = _local.connection.execute(statement.encode(), params)
            return cursor.fetchall() if cursor.description else []
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            _local.connection = None
            if time.monotonic() > end:
                raise RecordLost(f"no record for {PATIENCE:g} s") from error
            work(0.05)


class Run:
    """One call of a handler. Its start is recorded, and its fence raised, before anything else."""

    def __init__(self, key: int) -> None:
        job = pgqueue.current_job()
        facts = {"job": job.id, "token": job.token, "attempt": job.attempt}
        self.attempt = job.attempt
        self.facts = {**facts, "key": key, "pid": os.getpid(), "run": secrets.randbits(62)}
        self.note("start")

    def note(self, what: str) -> None:
        """Record it."""
        execute(RECORD, {**self.facts, "what": what})

    def noted(self, what: str) -> bool:
        """Whether an earlier run of this job has recorded that."""
        found = execute(
            "SELECT 1 FROM history.event WHERE job_id = %s AND what = %s LIMIT 1", [self.facts["job"], what]
        )
        return bool(found)

    def fail(self) -> None:
        """Record the failure, and fail: not always with one class, or the circuit of a task that never succeeds stays open
        and keeps its jobs, rightly, where everything shall drain."""
        self.note("fail")
        raise (NotYet if self.facts["job"] % 2 else NoLonger)("not yet")


STURDY: dict[str, Any] = {"queue": QUEUE, "max_attempts": 12, "retry": pgqueue.Fixed(0.1)}


def length(key: int) -> float:
    """Seconds of slow work, from 0.2 to 1."""
    return 0.2 + key % 9 / 10


@pq.task(name="quick", **STURDY)
def quick(key: int) -> None:
    """No work at all."""
    Run(key).note("end")


@pq.task(name="slow", **STURDY)
def slow(key: int) -> None:
    """Work that may be interrupted."""
    run = Run(key)
    work(length(key))
    run.note("end")


@pq.task(name="long", **STURDY)
def long(key: int) -> None:
    """Longer than a lease."""
    run = Run(key)
    work(float(os.environ["HISTORY_LEASE"]) * 1.3)
    run.note("end")


@pq.task(name="fragile", **{**STURDY, "max_attempts": 1})
def fragile(key: int) -> None:
    """Slow work that must not be repeated."""
    run = Run(key)
    work(length(key))
    run.note("end")


@pq.task(name="flaky", **STURDY)
def flaky(key: int) -> None:
    """Fails twice."""
    run = Run(key)
    if run.attempt <= 2:
        run.fail()
    run.note("end")


@pq.task(name="hopeless", **{**STURDY, "max_attempts": 2})
def hopeless(key: int) -> None:
    """Fails always."""
    Run(key).fail()


@pq.task(name="sleepy", **STURDY)
def sleepy(key: int) -> None:
    """Snoozes once."""
    run = Run(key)
    if not run.noted("snooze"):
        run.note("snooze")
        raise pgqueue.Snooze(0.3)
    run.note("end")


@pq.task(name="later", **STURDY)
async def later(key: int) -> None:
    """Asynchronous work."""
    run = await asyncio.to_thread(Run, key)
    await asyncio.sleep(length(key) / 4)
    await asyncio.to_thread(run.note, "end")


TASKS: dict[str, Any] = {task.name: task for task in (quick, slow, long, fragile, flaky, hopeless, sleepy, later)}
WEIGHTS = {
    "quick": 56, "slow": 10, "fragile": 4, "flaky": 9, "hopeless": 3, "sleepy": 5, "later": 13,
}  # fmt: skip

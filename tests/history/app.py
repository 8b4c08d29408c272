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
    """One call of a handler, or its part for one job. Its start is recorded, and its fence raised, before anything else."""

    def __init__(self, key: int, job: pgqueue.CurrentJob | None = None) -> None:
        job = job or pgqueue.current_job()
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


def pack(jobs: pgqueue.Batch) -> list[Run]:
    """Begin with the jobs of a batch; the first attempt of every third fails, alone."""
    runs = []
    for job in jobs:
        run = Run(job.args[0], job)
        if job.attempt == 1 and job.id % 3 == 0:
            run.note("fail")
            job.fail(NotYet("not yet"))
        else:
            runs.append(run)
    return runs


@pq.task(name="crate", batch=12, batch_wait=0.05, **STURDY)
def crate(jobs: pgqueue.Batch) -> None:
    """Many jobs in one call."""
    runs = pack(jobs)
    work(0.1)
    for run in runs:
        run.note("end")


@pq.task(name="carton", batch=4, **STURDY)
async def carton(jobs: pgqueue.Batch) -> None:
    """The same, asynchronous."""
    runs = await asyncio.to_thread(pack, jobs)
    await asyncio.sleep(0.1)
    for run in runs:
        await asyncio.to_thread(run.note, "end")


ALL = (quick, slow, long, fragile, flaky, hopeless, sleepy, later, crate, carton)
TASKS: dict[str, Any] = {task.name: task for task in ALL}
WEIGHTS = {
    "quick": 48, "slow": 10, "fragile": 4, "flaky": 9, "hopeless": 3, "sleepy": 5, "later": 13, "crate": 5, "carton": 3,
}  # fmt: skip

"""Batch tasks of the tests of child processes: more of the application in `isolated`."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pgqueue
from tests.integration.isolated import NEVER, execute, pq, wait_for_gate

APART: dict[str, Any] = {"queue": "batches", "isolation": "process", "retry": NEVER}
LONG = 600.0


def trace(jobs: pgqueue.Batch, what: str) -> None:
    """Leave a trace of every job, with the size of the batch."""
    for job in jobs:
        execute(
            "INSERT INTO trace (job_id, attempt, what, pid, note) VALUES (%s, %s, %s, %s, %s)",
            *(job.id, job.attempt, what, os.getpid(), str(len(jobs))),
        )


def answer(jobs: pgqueue.Batch) -> None:
    """As each job wants it."""
    for job in jobs:
        match job.args[0]:
            case "fail":
                job.fail(KeyError("in a child"))
            case "snooze":
                job.snooze(1000)
            case "discard":
                job.discard("no use")
            case "dead letter":
                job.dead_letter("no hope")


def one_number(number: int) -> None:
    """What a job of `returning` takes."""


@pq.task(name="answering", batch=6, batch_wait=LONG, **APART)
def answering(jobs: pgqueue.Batch) -> None:
    """Each job has its own outcome."""
    trace(jobs, "start")
    answer(jobs)


@pq.task(name="answering_async", batch=6, batch_wait=LONG, **APART)
async def answering_async(jobs: pgqueue.Batch) -> None:
    """The same in an event loop."""
    trace(jobs, "start")
    await asyncio.sleep(0)
    answer(jobs)


@pq.task(name="returning_many", batch=3, batch_wait=0.2, keep_result=60, payload=one_number, **APART)
def returning_many(jobs: pgqueue.Batch) -> list[object]:
    """Results, one of which cannot be stored."""
    trace(jobs, "start")
    jobs[0].extend(60)
    return [{1} if job.args[0] == 1 else job.args[0] for job in jobs]


@pq.task(name="dying_together", batch=3, batch_wait=LONG, **{**APART, "retry": pgqueue.Fixed(0)}, max_attempts=3)
def dying_together(jobs: pgqueue.Batch) -> None:
    """One of them ends the process."""
    trace(jobs, "start")
    jobs[0].complete()
    if any(job.args == ["poison"] for job in jobs):
        os.kill(os.getpid(), signal.SIGKILL)


@pq.task(name="late", batch=2, batch_wait=LONG, timeout=LONG, **APART)
def late(jobs: pgqueue.Batch) -> None:
    """Lasts."""
    trace(jobs, "start")
    time.sleep(LONG)


@pq.task(name="watching", batch=3, batch_wait=LONG, **APART)
def watching(jobs: pgqueue.Batch) -> None:
    """Lasts until one is cancelled; each says how far it is."""
    trace(jobs, "start")
    for number, job in enumerate(jobs):
        job.progress(number, f"number {number}")
    while not any(job.cancelled for job in jobs):
        time.sleep(0.01)
    for job in jobs:
        if job.cancelled:
            job.fail(RuntimeError("stopped"))
    trace(jobs, f"told of {sum(job.cancelled for job in jobs)}, all: {jobs.cancelled}")


@pq.task(name="cancelled_async", batch=2, batch_wait=LONG, **APART)
async def cancelled_async(jobs: pgqueue.Batch) -> None:
    """Lasts; says when it is cancelled."""
    trace(jobs, "start")
    try:
        await asyncio.sleep(LONG)
    finally:
        trace(jobs, "cleaned up")


@pq.task(name="settling_many", batch=3, batch_wait=LONG, **APART)
def settling_many(jobs: pgqueue.Batch) -> None:
    """Two are completed in a transaction, and the process dies after its commit."""
    jobs[0].snooze(1000)
    with jobs.transaction() as connection:
        connection.execute("INSERT INTO trace (job_id, what) VALUES (%s, 'own')", (jobs[1].id,))
    wait_for_gate()
    os.kill(os.getpid(), signal.SIGKILL)

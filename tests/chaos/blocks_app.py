"""The application of workers that die around the commits of their transaction blocks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

import psycopg

import pgqueue

pq = pgqueue.PgQueue()
URL = os.environ.get("PGQUEUE_DATABASE_URL", "")
DEATHS = ("in the block", "after the block", "after the commit")

BUSINESS = """
CREATE TABLE balance (account int PRIMARY KEY, booked int NOT NULL DEFAULT 0);
INSERT INTO balance SELECT n FROM generate_series(0, 9) AS n;
CREATE TABLE booking (job_id bigint, attempt int);
"""
BOOK = "UPDATE balance SET booked = booked + 1 WHERE account = %s"
NOTE = "INSERT INTO booking VALUES (%s, %s)"


def may_die(where: str, chance: float) -> None:
    """Kill this process, at random."""
    if random.random() < chance:
        os.kill(os.getpid(), signal.SIGKILL)


@pq.task(name="follow_up", queue="later")
def follow_up(origin: int) -> None:
    """What a booking enqueues; nobody runs it here."""


@pq.task(name="book", queue="chaos", max_attempts=50, retry=pgqueue.Fixed(0), keep_result=3600)
def book(account: int, chance: float) -> None:
    """Books once, in a transaction of its own connection or of the worker's."""
    job = pgqueue.current_job()
    job.set_result(account)
    if account % 2:
        with job.transaction() as own:
            write(own, job, account)
            may_die("in the block", chance)
    else:
        with psycopg.connect(URL) as connection:
            with job.transaction(using=connection):
                write(connection, job, account)
                may_die("in the block", chance)
            may_die("after the block", chance)
            if random.random() < chance:
                raise ValueError("not committed")
    may_die("after the commit", chance)


@pq.task(name="book_async", queue="chaos", max_attempts=50, retry=pgqueue.Fixed(0), keep_result=3600)
async def book_async(account: int, chance: float) -> None:
    """The same in the event loop."""
    job = pgqueue.current_job()
    job.set_result(account)
    async with await psycopg.AsyncConnection.connect(URL) as connection:
        async with job.transaction(using=connection):
            await connection.execute(BOOK, (account,))
            await connection.execute(NOTE, (job.id, job.attempt))
            async with pgqueue.AsyncPgQueue(URL) as other:
                await other.enqueue("follow_up", (job.id,), queue="later", using=connection)
            may_die("in the block", chance)
        await asyncio.sleep(random.random() / 100)
        may_die("after the block", chance)


def write(connection: psycopg.Connection[Any], job: pgqueue.CurrentJob, account: int) -> None:
    """The business of a booking."""
    connection.execute(BOOK, (account,))
    connection.execute(NOTE, (job.id, job.attempt))
    follow_up.enqueue(job.id, using=connection)

"""The application of the poison tests: two hundred good jobs beside one that kills whatever process it runs in."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import psycopg

import pgqueue

pq = pgqueue.PgQueue()

TRACES = "CREATE TABLE start (job_id bigint, attempt int, pid int, at timestamptz DEFAULT clock_timestamp())"


def trace() -> None:
    """Leave a trace that the death of this process cannot take back."""
    job = pgqueue.current_job()
    with psycopg.connect(os.environ["PGQUEUE_DATABASE_URL"], autocommit=True) as connection:
        connection.execute("INSERT INTO start VALUES (%s, %s, %s)", [job.id, job.attempt, os.getpid()])


@pq.task(name="good", queue="poison", retry=pgqueue.Fixed(0))
def good() -> None:
    """Work that takes a moment."""
    trace()
    time.sleep(0.05)


@pq.task(name="good_async", queue="poison", retry=pgqueue.Fixed(0))
async def good_async() -> None:
    """The same in an event loop."""
    trace()


@pq.task(name="kill", queue="poison", max_attempts=3, retry=pgqueue.Fixed(0))
def kill() -> None:
    """As the out-of-memory killer does."""
    trace()
    os.kill(os.getpid(), signal.SIGKILL)


@pq.task(name="segfault", queue="poison", max_attempts=3, retry=pgqueue.Fixed(0))
def segfault() -> None:
    """As a bug in an extension does."""
    trace()
    ctypes.string_at(0)


@pq.task(name="greedy", queue="poison", max_attempts=3, retry=pgqueue.Fixed(0), isolation="process", memory_limit=2**26)
def greedy() -> None:
    """Takes memory until there is no more, and dies of it as a program in C would."""
    trace()
    blocks = []
    try:
        while True:
            blocks.append(bytearray(2**22))
    except MemoryError:
        os.abort()


@pq.task(name="endless", queue="poison", isolation="process")
def endless() -> None:
    """Holds the interpreter, so that no other thread of its process ever runs again."""
    trace()
    ctypes.PyDLL(None).sleep(3600)


@pq.task(name="sleeping", queue="poison", isolation="process")
def sleeping() -> None:
    """Lasts."""
    trace()
    time.sleep(3600)

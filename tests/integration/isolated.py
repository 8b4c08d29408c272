"""The application of the tests of child processes, which import it. Its runs leave traces in the test's database."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psycopg

import pgqueue

pq = pgqueue.PgQueue()
NEVER = pgqueue.Fixed(3600)
"""A retry policy under which a test sees each attempt alone."""
MIB = 2**20

TRACES = """
CREATE TABLE trace (
    job_id bigint, attempt int, what text, pid int, note text, at timestamptz DEFAULT clock_timestamp()
);
CREATE TABLE gate (name text);
"""


def execute(statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """On a connection of its own, to where this application enqueues."""
    url = pq.settings.database_url
    assert url is not None
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


def trace(what: str, note: str = "") -> None:
    """Leave a trace of the current job."""
    job = pgqueue.current_job()
    execute(
        "INSERT INTO trace (job_id, attempt, what, pid, note) VALUES (%s, %s, %s, %s, %s)",
        *(job.id, job.attempt, what, os.getpid(), note),
    )


def wait_for_gate() -> None:
    """Until the test has opened the gate."""
    while not execute("SELECT 1 FROM gate"):
        time.sleep(0.02)


@pq.task(name="good", queue="apart", isolation="process", max_attempts=3, retry=NEVER)
def good(note: str = "") -> None:
    """Leaves its traces and ends."""
    trace("start", note)
    trace("end", note)


@pq.task(name="good_async", queue="apart", isolation="process", retry=NEVER)
async def good_async(note: str) -> None:
    trace("start", note)
    await asyncio.sleep(0.01)
    trace("end", note)


@pq.task(name="about_itself", queue="apart", isolation="process", retry=NEVER, headers={"trace": "é😀"})
def about_itself(number: int, *, note: str) -> None:
    job = pgqueue.current_job()
    job.extend(60)
    facts = [job.id, job.queue, job.task, job.attempt, job.max_attempts, job.token, job.headers, job.cancelled]
    trace("self", json.dumps([*facts, number, note, threading.current_thread() is threading.main_thread()]))
    good.enqueue("enqueued in a child")


@pq.task(name="failing", queue="apart", isolation="process", retry=NEVER)
def failing(kind: str) -> None:
    """Raises."""
    errors: dict[str, BaseException] = {
        "text": ValueError("a\0b"),
        "long": ValueError("é" * 5_000_000),
        "exit": SystemExit(0),
        "interrupt": KeyboardInterrupt(),
        "snooze": pgqueue.Snooze(3600),
    }
    raise errors[kind]


@pq.task(name="failing_async", queue="apart", isolation="process", retry=NEVER)
async def failing_async(kind: str) -> None:
    """Raises, in an event loop."""
    failing.function(kind)


@pq.task(name="dying", queue="apart", isolation="process", max_attempts=2, retry=pgqueue.Fixed(0))
def dying(how: str) -> None:
    """Ends its process without an outcome."""
    trace("start", how)
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "leave":
            os._exit(0)
        case "close":
            os.closerange(0, 4096)
        case "babble":
            for descriptor in range(3, 64):
                try:
                    os.write(descriptor, b"x" * 64)
                except OSError:
                    continue
            time.sleep(600)


@pq.task(name="forking", queue="apart", isolation="process", max_attempts=1)
def forking() -> None:
    """Comes back from a fork twice, and dies in the process of the job only: the copy may speak for nobody."""
    trace("start")
    if os.fork() == 0:
        return
    time.sleep(0.2)
    os._exit(1)


@pq.task(name="growing", queue="apart", isolation="process", memory_limit=64 * MIB, max_attempts=1)
def growing(size: int) -> None:
    """Takes so many bytes."""
    trace("start")
    block = bytearray(size)
    trace("end", str(len(block)))


@pq.task(name="sleeping", queue="apart", isolation="process", retry=NEVER)
def sleeping(seconds: float) -> None:
    """Lasts, and has a process of its own that lasts longer."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as below:
        trace("start", str(below.pid))
        time.sleep(seconds)
        below.kill()
    trace("end")


@pq.task(name="sleeping_async", queue="apart", isolation="process", retry=NEVER)
async def sleeping_async(seconds: float) -> None:
    """Lasts; cleans up when it is cancelled."""
    trace("start")
    try:
        await asyncio.sleep(seconds)
    finally:
        trace("cleaned up")


@pq.task(name="listening", queue="apart", isolation="process", retry=NEVER)
def listening() -> None:
    """Lasts until it is asked to stop."""
    trace("start")
    while not pgqueue.current_job().cancelled:
        time.sleep(0.01)
    trace("told")
    raise RuntimeError("stopped half-way")


@pq.task(name="gated", queue="apart", isolation="process", retry=NEVER)
def gated() -> None:
    """Lasts until the gate is open."""
    trace("start")
    wait_for_gate()
    trace("end")


@pq.task(name="printing", queue="apart", isolation="process")
def printing(text: str) -> None:
    """Prints."""
    print(text)
    print(text, file=sys.stderr)


@pq.task(name="shared", queue="shared", retry=NEVER)
def shared() -> None:
    """A task in threads."""
    trace("start")
    trace("end")


@pq.task(name="stubborn", queue="stubborn", max_attempts=5, retry=NEVER)
def stubborn(fails: bool = False) -> None:
    """A task in threads that goes on past its timeout, until the gate is open."""
    earlier = execute("SELECT pid FROM trace WHERE job_id = %s AND what = 'start'", pgqueue.current_job().id)
    trace("start", "overlap" if any(os.path.exists(f"/proc/{pid}") for (pid,) in earlier) else "")  # noqa: PTH110
    wait_for_gate()
    if fails:
        raise ValueError("too late, and in vain")
    trace("end")


@pq.task(name="lingering", queue="stubborn")
def lingering(seconds: float) -> None:
    """A task in threads that lasts, and has no timeout."""
    trace("start")
    time.sleep(seconds)
    trace("end")


@pq.task(name="returning", queue="apart", isolation="process", keep_result=60)
def returning(size: int | None) -> object:
    """Returns text of so many times three characters, or what cannot be stored."""
    return {1} if size is None else '"\\é' * size


@pq.task(name="returning_async", queue="apart", isolation="process", keep_result=60)
async def returning_async(value: object) -> object:
    """The same in an event loop."""
    return value


@pq.task(name="settling", queue="apart", isolation="process", keep_result=60, retry=NEVER)
def settling(how: str) -> str:
    """Completes its job in a transaction, and dies or not before or after the commit."""
    job = pgqueue.current_job()
    if how == "by itself":
        with job.transaction() as own:
            own.execute("INSERT INTO trace (job_id, what) VALUES (%s, 'own')", (job.id,))
        raise ValueError("after the commit")
    url = pq.settings.database_url
    assert url is not None
    with psycopg.connect(url) as connection:
        with job.transaction(using=connection):
            connection.execute("INSERT INTO trace (job_id, what) VALUES (%s, 'business')", (job.id,))
            job.set_result("set in the block")
        if how == "dies before the commit":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "rolls back":
            connection.rollback()
        connection.commit()
        if how == "dies after the commit":
            os.kill(os.getpid(), signal.SIGKILL)
    return "too late"


@pq.task(name="reporting", queue="apart", isolation="process", retry=NEVER)
def reporting() -> None:
    """Says very often how far it is, and then nothing until the gate is open."""
    job = pgqueue.current_job()
    for number in range(5000):
        job.progress(number / 50, f"step {number}")
    trace("start")
    wait_for_gate()


@pq.task(name="wait_superseded", queue="apart", isolation="process", retry=NEVER)
def wait_superseded(seconds: float) -> None:
    trace("begun")
    end = time.monotonic() + seconds * 30
    while not pgqueue.current_job().superseded and time.monotonic() < end:
        time.sleep(0.01)
    trace("told", str(pgqueue.current_job().superseded))

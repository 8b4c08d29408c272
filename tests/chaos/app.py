"""The application of the worker processes under fire: every run leaves its own traces, on a connection of its own.

Traces do not depend on the queue: they say what really happened, and the queue's story is compared with them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psycopg

import pgqueue

pq = pgqueue.PgQueue()

TRACES = """
CREATE TABLE trace (
    job_id bigint, attempt int, token bigint, what text, pid int, at timestamptz DEFAULT clock_timestamp()
);
CREATE TABLE gate (name text);
"""

_local = threading.local()


def execute(statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """On a connection of this thread, opened again when it is gone."""
    while True:
        try:
            if getattr(_local, "connection", None) is None or _local.connection.closed:
                _local.connection = psycopg.connect(os.environ["PGQUEUE_DATABASE_URL"], autocommit=True)
            cursor = _local.connection.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []
        except psycopg.OperationalError:
            _local.connection = None
            time.sleep(0.05)


def trace(what: str) -> None:
    job = pgqueue.current_job()
    execute(
        "INSERT INTO trace (job_id, attempt, token, what, pid) VALUES (%s, %s, %s, %s, %s)",
        *(job.id, job.attempt, job.token, what, os.getpid()),
    )


@pq.task(name="steady", queue="chaos")
def steady(seconds: float) -> None:
    """Work that takes a while. Not by `time.sleep`, which libfaketime makes fail now and then, for zero seconds too."""
    trace("start")
    threading.Event().wait(seconds)
    trace("end")


@pq.task(name="deadly", queue="chaos", retry=pgqueue.Fixed(0))
def deadly(attempts: list[int]) -> None:
    """Kills its worker in these attempts, and fails in those before the last of them."""
    trace("start")
    attempt = pgqueue.current_job().attempt
    if attempt in attempts:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt < max(attempts):
        raise ValueError("not yet")
    trace("end")


@pq.task(name="gated", queue="chaos")
def gated() -> None:
    """In its first attempt it lasts until the gate of the test is open; later ones do not wait."""
    trace("start")
    if pgqueue.current_job().attempt == 1:
        while not execute("SELECT 1 FROM gate WHERE name = 'open'"):
            time.sleep(0.02)
    trace("end")


@pq.task(name="blind", queue="chaos")
def blind(seconds: float) -> None:
    """Like `steady`, but it does not need the database to end."""
    trace("start")
    time.sleep(seconds)

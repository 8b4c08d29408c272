"""The application of the worker processes whose clocks are wrong, or that are frozen with a full buffer."""

from __future__ import annotations

import re
import threading
import time

import pgqueue
from pgqueue.worker import claimer
from tests.chaos.app import pq, trace

claimer.AHEAD, claimer.HOARD = 5.0, 3600.0
"""Claim far ahead, and keep what was claimed: there must be something in the buffer when the process is stopped."""


@pq.task(name="flaky", queue="chaos", retry=pgqueue.Fixed(3))
def flaky() -> None:
    """Fails in its first attempt."""
    trace("start")
    if pgqueue.current_job().attempt == 1:
        raise ValueError("not yet")


@pq.task(name="long", queue="chaos", max_attempts=5)
def long(seconds: float) -> None:
    """Work that takes a while. Not by `time.sleep`, which libfaketime makes fail."""
    trace("start")
    threading.Event().wait(seconds)


@pq.task(name="watchful", queue="chaos", max_attempts=5)
def watchful() -> None:
    """In its first attempt it lasts until it is told to stop."""
    trace("start")
    job = pgqueue.current_job()
    while job.attempt == 1 and not job.cancelled:
        time.sleep(0.02)
    trace("told")


@pq.task(name="catastrophe", queue="chaos", max_attempts=5)
def catastrophe(seconds: float) -> None:
    """C code that keeps the interpreter for at least so long: no other thread of the process runs meanwhile."""
    trace("start")
    length, took = 16, 0.0
    while took < seconds:
        length += 1
        began = time.monotonic()
        re.match("(a+)+$", "a" * length + "b")
        took = time.monotonic() - began
    trace("end")

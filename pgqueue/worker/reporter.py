"""The reporter: writes what running jobs say of their progress, in batches, without holding up a handler."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

import psycopg

from pgqueue.errors import DatabaseUnavailable
from pgqueue.events import Bus
from pgqueue.job import Job
from pgqueue.ops import result as result_ops
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop

EVERY = 0.5
"""Seconds between two reports of one job that are written."""
IDLE = 5.0
PASSING = (psycopg.OperationalError, psycopg.InterfaceError, DatabaseUnavailable)


class Reporter(Loop):
    """One thread and one connection, both there from the first report on. Of each job the last report waits; the first one
    is written at once."""

    name: ClassVar[str] = "progress"

    def __init__(self, link: Link, events: Bus, fatal: Callable[[str, BaseException], None]) -> None:
        super().__init__(events, fatal)
        self.link = link
        self._lock = threading.Lock()
        self._waiting: dict[Job, result_ops.Report] = {}
        self._written: dict[Job, float] = {}
        self._bell = threading.Event()

    def put(self, job: Job, percent: float | None, message: str) -> None:
        """Write this report, or a later one of the same job; from any thread."""
        with self._lock:
            self._waiting[job] = result_ops.Report(job.id, job.token, percent, message)
            if self._thread.ident is None and not self.stopping.is_set():
                self.start()
        self._bell.set()

    def turn(self) -> None:
        """Write what is due, then wait for more."""
        self._bell.clear()
        self._write(time.monotonic())
        with self._lock:
            next_at = min((self._written.get(job, 0.0) + EVERY for job in self._waiting), default=None)
        if next_at is None:
            self._bell.wait(IDLE)
        else:
            self.stopping.wait(max(0.01, next_at - time.monotonic()))

    def stop(self) -> None:
        """End after the turn under way; what still waits is written."""
        super().stop()
        self._bell.set()

    def finish(self) -> None:
        """Write the last reports, once, and close the connection."""
        try:
            self._write(float("inf"))
        except (*PASSING, psycopg.Error):
            pass  # a report that is missing harms nobody
        finally:
            self.link.close()

    def _write(self, now: float) -> None:
        with self._lock:
            self._written = {job: at for job, at in self._written.items() if at + EVERY > now}
            due = {job: report for job, report in self._waiting.items() if job not in self._written}
            for job in due:
                del self._waiting[job]
        by_queue: dict[str, list[result_ops.Report]] = {}
        for job, report in due.items():
            by_queue.setdefault(job.queue, []).append(report)
        try:
            for queue, reports in by_queue.items():
                self.link.run(result_ops.write_progress(queue, reports))
        except PASSING:
            with self._lock:
                self._waiting = {**due, **self._waiting}
            raise
        self._written.update(dict.fromkeys(due, now))

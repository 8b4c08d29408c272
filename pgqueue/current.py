"""The job that runs right now, as its handler sees it."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from pgqueue.errors import PgQueueError
from pgqueue.job import Job


class CurrentJob:
    """What a handler may ask and do about its own job.

    `cancelled` is true once somebody asked for cancellation, the lease is lost, or the task's `timeout` has passed: the
    handler should stop soon, and what it still writes should carry `token` as a fence.
    """

    __slots__ = ("_cancelled", "_deadline", "_extend", "_job")

    def __init__(self, job: Job, extend: Callable[[Job, float], None]) -> None:
        self._job = job
        self._extend = extend
        self._cancelled = False
        self._deadline = None if job.timeout is None else time.monotonic() + job.timeout

    @property
    def job(self) -> Job:
        """The job itself, for pq.complete and its like."""
        return self._job

    @property
    def id(self) -> int:
        """The job's id."""
        return self._job.id

    @property
    def queue(self) -> str:
        """The queue it came from."""
        return self._job.queue

    @property
    def task(self) -> str:
        """The name of its task."""
        return self._job.task

    @property
    def attempt(self) -> int:
        """Which run this is, from 1."""
        return self._job.attempt

    @property
    def max_attempts(self) -> int:
        """How many runs there may be in all."""
        return self._job.max_attempts

    @property
    def token(self) -> int:
        """The fencing token of this claim; a later claim has a larger one."""
        return self._job.token

    @property
    def headers(self) -> dict[str, Any]:
        """What travels with the job beside its arguments."""
        return self._job.headers

    @property
    def scheduled_for(self) -> datetime | None:
        """The tick of the schedule that made this job, in UTC; None for any other job."""
        text = self._job.headers.get("scheduled_for")
        try:
            return datetime.fromisoformat(text) if isinstance(text, str) else None
        except ValueError:  # a header of the application's own
            return None

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop."""
        return self._cancelled or (self._deadline is not None and time.monotonic() > self._deadline)

    def cancel(self) -> None:
        """Make `cancelled` true; called by the worker."""
        self._cancelled = True

    def extend(self, seconds: float) -> None:
        """Move the end of the lease to `seconds` from now, if that is later. LeaseLost when it is not ours any more.

        A worker's heartbeat does this by itself; only a handler that knows that it will starve the process needs it.
        """
        self._extend(self._job, seconds)


_current: contextvars.ContextVar[CurrentJob] = contextvars.ContextVar("pgqueue_current_job")


def current_job() -> CurrentJob:
    """The job that runs in this thread or asyncio task; PgQueueError outside of a handler."""
    try:
        return _current.get()
    except LookupError:
        raise PgQueueError("current_job() works inside a task that a worker runs, and no job runs here") from None


def enter(current: CurrentJob) -> contextvars.Token[CurrentJob]:
    """Make `current` the answer of current_job() in this context, until `leave`."""
    return _current.set(current)


def leave(token: contextvars.Token[CurrentJob]) -> None:
    """End what `enter` began."""
    _current.reset(token)

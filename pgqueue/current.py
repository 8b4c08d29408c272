"""The job that runs right now, as its handler sees it."""

from __future__ import annotations

import contextvars
import enum
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Protocol

from pgqueue.errors import PgQueueError
from pgqueue.job import Job

UNSET: Any = object()
NO_DESK = "this works inside a task that a worker runs"
MANY_JOBS = "current_job() is for the handler of one job: a batch handler asks the jobs that it was given"


class Transaction(Protocol):
    """What `CurrentJob.transaction` returns: to be entered by `with`, or by `async with` where the connection is async."""

    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def __aenter__(self) -> Any: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Desk(Protocol):
    """What a worker does for its handlers. `app`: the queue object that it serves."""

    app: Any

    def transaction(self, jobs: Sequence[CurrentJob], using: Any) -> Transaction:
        """The block of `CurrentJob.transaction`, for all of these jobs."""

    def settling(self, current: CurrentJob) -> None:
        """The handler is about to settle its job itself: look into the database before writing an outcome."""

    def progress(self, current: CurrentJob, percent: float | None, message: str) -> None:
        """Write this report, or the one after it."""


class Stage(enum.Enum):
    """Who settles a job that runs. SETTLED: its handler has, or is about to; whether that is so the database knows."""

    WORKER = 1
    INSIDE = 2
    SETTLED = 3
    BY_HAND = 4


class CurrentJob:
    """What a handler may ask and do about its own job.

    `cancelled` is true once somebody asked for cancellation, the lease is lost, or the task's `timeout` has passed: the
    handler should stop soon, and what it still writes should carry `token` as a fence.
    """

    __slots__ = ("_cancelled", "_deadline", "_desk", "_extend", "_frees", "_job", "_result", "_stage", "_superseded")

    def __init__(self, job: Job, extend: Callable[[Job, float], None], desk: Desk | None = None) -> None:
        self._job = job
        self._extend = extend
        self._desk = desk
        self._stage = Stage.WORKER
        self._result = UNSET
        self._frees = False
        self._cancelled = False
        self._superseded = False
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
    def served_by(self) -> Any:
        """The PgQueue or AsyncPgQueue that the worker was started with; None in a child process."""
        return None if self._desk is None else self._desk.app

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

    @property
    def superseded(self) -> bool:
        """True once a newer job of the same unique key waits for the end of this run (`on_conflict="supersede"`).

        Whatever this run ends with, it is not tried again and does not count as the newest: the handler may stop early.
        """
        return self._superseded

    def supersede(self) -> None:
        """Make `superseded` true; called by the worker."""
        self._superseded = True

    def cancel(self) -> None:
        """Make `cancelled` true; called by the worker."""
        self._cancelled = True

    def extend(self, seconds: float) -> None:
        """Move the end of the lease to `seconds` from now, if that is later. LeaseLost when it is not ours any more.

        A worker's heartbeat does this by itself; only a handler that knows that it will starve the process needs it.
        """
        self._extend(self._job, seconds)

    def progress(self, percent: float | None = None, message: str = "") -> None:
        """Say how far the work is: 0 to 100 `percent`, a `message`, or both; seen by pq.progress and `pgqueue jobs`.

        Returns at once. What is said more often than twice a second is left out, but for the last, which is written within
        half a second. A job whose lease is lost reports nothing. ConfigurationError for a percentage that is none.
        """
        if self._desk is None:
            raise PgQueueError(NO_DESK)
        self._desk.progress(self, percent, message)

    def set_result(self, value: Any) -> None:
        """Keep `value` as the result of this job instead of what the function returns; only where the task keeps results.

        Needed before the end of a `transaction` block, which completes the job before the function returns.
        """
        self._result = value

    def transaction(self, using: Any = None) -> Transaction:
        """A block whose writes, and enqueues with the same `using`, are committed together with the completion of this job.

        `using` is a connection or session of yours, in a transaction of yours: at its end the block adds the completion,
        checked against the token, and your commit makes all of it true. Without `using` the block yields a psycopg
        connection, commits at its end, and rolls back on an exception. `async with` for asynchronous ones.

        LeaseLost is raised at the end of the block, before any commit, when the job is not ours any more. Afterwards it
        counts as settled: nothing that the function raises or returns changes that, unless the transaction is not
        committed, which is a failed attempt. PgQueueError for a second block, ConfigurationError for a connection in
        autocommit.
        """
        if self._desk is None:
            raise PgQueueError(NO_DESK)
        return self._desk.transaction([self], using)

    # Who settles: what the worker asks, and what the blocks say

    @property
    def result(self) -> Any:
        """What `set_result` was given; UNSET where it was not called."""
        return self._result

    @property
    def stage(self) -> Stage:
        """Who settles the job."""
        return self._stage

    @property
    def frees(self) -> bool:
        """Whether a lane has a free slot once what the handler settled is committed."""
        return self._frees

    @frees.setter
    def frees(self, value: bool) -> None:
        self._frees = value

    def note(self, stage: Stage) -> None:
        """The same as a child process has said it."""
        self._stage = stage

    def enter_block(self) -> None:
        """A transaction block begins."""
        if self.stage is Stage.INSIDE:
            raise PgQueueError("this job is in a transaction block already: a handler has one, and blocks do not nest")
        if self.stage is not Stage.WORKER:
            raise PgQueueError("this job was settled by its handler already: a handler has one transaction block")
        self._stage = Stage.INSIDE

    def leave_block(self) -> None:
        """It has ended without a completion: the worker settles."""
        self._stage = Stage.WORKER

    def settle(self, stage: Stage) -> None:
        """The handler settles its job, now. Said before the statement is sent: the worker must not wait for its locks."""
        self._stage = stage
        if self._desk is not None:
            self._desk.settling(self)

    @property
    def settled(self) -> bool:
        """True once the handler has settled its job, or is about to."""
        return self.stage is Stage.SETTLED or self.stage is Stage.BY_HAND


_current: contextvars.ContextVar[CurrentJob] = contextvars.ContextVar("pgqueue_current_job")
_batch: contextvars.ContextVar[Sequence[CurrentJob]] = contextvars.ContextVar("pgqueue_batch", default=())


def running_job() -> CurrentJob | None:
    """The same as current_job; None outside of a handler, and in that of a batch."""
    return _current.get(None)


def current_job() -> CurrentJob:
    """The job that runs in this thread or asyncio task; PgQueueError outside of a handler, and in that of a batch."""
    try:
        return _current.get()
    except LookupError:
        if _batch.get():
            raise PgQueueError(MANY_JOBS) from None
        raise PgQueueError("current_job() works inside a task that a worker runs, and no job runs here") from None


def enter(current: CurrentJob) -> contextvars.Token[CurrentJob]:
    """Make `current` the answer of current_job() in this context, until `leave`."""
    return _current.set(current)


def leave(token: contextvars.Token[CurrentJob]) -> None:
    """End what `enter` began."""
    _current.reset(token)


def enter_batch(jobs: Sequence[CurrentJob]) -> None:
    """Make these the jobs that a batch handler runs in this context."""
    _batch.set(jobs)


def settles_itself(jobs: Iterable[Job]) -> list[CurrentJob]:
    """To be called before jobs are settled by pq.complete and its like: those that run here, and are among them for the
    first time. Their worker is told to look before it writes an outcome. PgQueueError inside a transaction block, which
    completes its job."""
    current = _current.get(None)
    running = _batch.get() if current is None else (current,)
    if not running:
        return []
    wanted = {(job.id, job.token) for job in jobs}
    own = [one for one in running if (one.id, one.token) in wanted]
    if any(one.stage is Stage.INSIDE for one in own):
        raise PgQueueError("a transaction block completes its job at its end: raise in it, or settle the job outside")
    fresh = [one for one in own if one.stage is Stage.WORKER]
    for one in fresh:
        one.settle(Stage.BY_HAND)
    return fresh

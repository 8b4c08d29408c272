"""The jobs of one call of a batch handler, as it sees them, and what it answers for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, overload

from pgqueue import failure, payload
from pgqueue.config import shown
from pgqueue.current import NO_DESK, UNSET, CurrentJob, Desk, Stage, Transaction
from pgqueue.errors import ConfigurationError, LeaseLost, PgQueueError
from pgqueue.job import Job
from pgqueue.outcome import DeadLetter, Discard, Failed, Retry, Snooze
from pgqueue.task import split_call

SETTLED = "this job was settled by its handler already, in a transaction block or by hand: an answer comes too late"
IN_A_BLOCK = "a transaction block completes its jobs at its end: answer before or after it"
NONE_LEFT = "no job of this batch is left for a transaction block: each was answered or settled already"


class BatchJob(CurrentJob):
    """One job of a batch: what `current_job()` is elsewhere, with its arguments, and with an answer of its own.

    A job that got no answer goes the way of the call: completed when that returns, a failed attempt when it raises. The last
    answer counts, and it stays when the call raises afterwards. PgQueueError for an answer after the job was settled.
    """

    __slots__ = ("_answer", "_args", "_kwargs")

    def __init__(self, job: Job, extend: Callable[[Job, float], None], desk: Desk | None = None) -> None:
        super().__init__(job, extend, desk)
        self._args: list[Any] = []
        self._kwargs: dict[str, Any] = {}
        self._answer: Any = UNSET

    def __repr__(self) -> str:
        """Without the payload, which may hold secrets."""
        return f"<BatchJob {self.id} of task {self.task!r}, attempt {self.attempt}>"

    @property
    def args(self) -> list[Any]:
        """The positional arguments."""
        return self._args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments."""
        return self._kwargs

    @property
    def priority(self) -> int:
        """The priority that it was claimed with."""
        return self._job.priority

    @property
    def created_at(self) -> datetime | None:
        """When it was enqueued; None where the row holds a time that Python cannot, such as infinity."""
        return self._job.created_at

    def complete(self, result: Any = UNSET) -> None:
        """This job is done, whatever becomes of the call. `result`: as by set_result. PgQueueError in a transaction block,
        which completes its jobs itself."""
        if self.stage is Stage.INSIDE:
            raise PgQueueError(IN_A_BLOCK)
        self._say(None)
        if result is not UNSET:
            self.set_result(result)

    def fail(self, error: BaseException | str) -> None:
        """This attempt failed with `error`, as if the handler of this job alone had raised it: the retry policy of the task
        decides, or the signal (Retry, Snooze, Discard, DeadLetter) that it is."""
        if not isinstance(error, (BaseException, str)):
            raise ConfigurationError(f"fail takes an exception or a text, not {shown(error)}")
        self._say(Failed(failure.clean(error, 2048)) if isinstance(error, str) else error)

    def retry(self, delay: float | timedelta | None = None, reason: str = "") -> None:
        """Again after `delay` (seconds or a timedelta; None asks the retry policy); the attempt is spent."""
        self._say(Retry(delay=delay, reason=reason))

    def snooze(self, delay: float | timedelta) -> None:
        """Again after `delay`, without an attempt burned."""
        self._say(Snooze(delay))

    def discard(self, reason: str = "") -> None:
        """Finish this job: it is of no use any more."""
        self._say(Discard(reason))

    def dead_letter(self, reason: str = "") -> None:
        """Into the dead letters, now."""
        self._say(DeadLetter(reason))

    @property
    def answered(self) -> bool:
        """True once the handler has answered for this job."""
        return self._answer is not UNSET

    @property
    def answer(self) -> BaseException | None:
        """The answer: what this job counts as having raised; None where it is complete, or has no answer."""
        return None if self._answer is UNSET else self._answer

    def fill_in(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Give it its arguments; called by the worker."""
        self._args, self._kwargs = args, kwargs

    def end_by(self, deadline: float | None) -> None:
        """Make `cancelled` true from then on, by the monotonic clock; called by the worker."""
        self._deadline = deadline

    def _say(self, error: BaseException | None) -> None:
        if self.settled:
            raise PgQueueError(SETTLED)
        if self.stage is Stage.INSIDE:
            self.leave_block()  # the block completes the others
        self._answer = error


class Batch(Sequence[BatchJob]):
    """What a batch handler is called with: jobs of one queue and one task, in the order of their places in line."""

    __slots__ = ("_jobs",)

    def __init__(self, jobs: Iterable[BatchJob]) -> None:
        self._jobs = tuple(jobs)

    @classmethod
    def of(cls, calls: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Batch:
        """A batch for tests of a handler, without a database: `calls` as for enqueue_many. The arguments travel through JSON
        as they do in the queue; afterwards `job.answer` and `job.result` say what the handler said."""
        jobs = []
        for number, call in enumerate(calls, 1):
            args_json, kwargs_json = payload.encode_call(*split_call(call), max_bytes=2**30)
            job = Job(number, "", "", number, 1, 20, 0, 0, number, None, None, args_json, kwargs_json, None, None)
            jobs.append(BatchJob(job, _nothing))
            jobs[-1].fill_in(job.args, job.kwargs)
        return cls(jobs)

    @overload
    def __getitem__(self, index: int) -> BatchJob: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BatchJob]: ...
    def __getitem__(self, index: int | slice) -> BatchJob | Sequence[BatchJob]:
        """A job, or some of them."""
        return self._jobs[index]

    def __len__(self) -> int:
        """How many jobs there are: at least one, at most as many as the task says."""
        return len(self._jobs)

    def __iter__(self) -> Iterator[BatchJob]:
        """One after the other."""
        return iter(self._jobs)

    def __repr__(self) -> str:
        """Without the payloads."""
        return f"<Batch of {len(self)}: {', '.join(str(job.id) for job in self._jobs[:10])}{', …' * (len(self) > 10)}>"

    @property
    def cancelled(self) -> bool:
        """True once every job of the batch is cancelled, or the timeout of the call has passed: the handler should stop."""
        return all(job.cancelled for job in self._jobs)

    def extend(self, seconds: float) -> None:
        """Move the end of all leases to `seconds` from now, if that is later. LeaseLost, after all are tried, names the jobs
        that are not ours any more."""
        lost: list[Job] = []
        for token in dict.fromkeys(job.token for job in self._jobs):
            jobs = [job for job in self._jobs if job.token == token]
            try:
                jobs[0].extend(seconds)
            except LeaseLost:
                lost += [job.job for job in jobs]
        if lost:
            raise LeaseLost(lost)

    def transaction(self, using: Any = None) -> Transaction:
        """As CurrentJob.transaction, for all jobs of the batch that have no answer: their completions are committed together
        with the writes of the block.

        A job that is answered inside the block, other than by its end, is left out of it. When one of the jobs is not ours
        any more, LeaseLost names it at the end of the block, and nothing may be committed: the others are failed attempts.
        PgQueueError where no job is left to complete.
        """
        jobs = [job for job in self._jobs if not job.answered and not job.settled]
        if not jobs:
            raise PgQueueError(NONE_LEFT)
        desk = jobs[0]._desk
        if desk is None:
            raise PgQueueError(NO_DESK)
        return desk.transaction(jobs, using)


def _nothing(job: Job, seconds: float) -> None: ...

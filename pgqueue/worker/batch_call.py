"""One call of a batch handler: its jobs, the call itself, and what becomes of each of them.

How it is called is the same in a thread, in the event loop and in a child process; there are no leases in the last one.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pgqueue.batch import Batch, BatchJob
from pgqueue.current import enter_batch
from pgqueue.events import EventName
from pgqueue.failure import describe, one_line
from pgqueue.outcome import COMPLETED, RELEASED, Outcome
from pgqueue.task import BaseTask
from pgqueue.worker.batches import Group
from pgqueue.worker.desk import Desk, NoResult
from pgqueue.worker.execution import Runner, check_result, judge, limited, prepare, tell_failed
from pgqueue.worker.ledger import Held
from pgqueue.worker.wrapping import through, through_async

Ended = tuple[Held, Outcome, str | None]
"""What came of a job, and the class of its error."""


def call(task: BaseTask[..., Any], batch: Batch) -> Any:
    """Call a plain function, in a context of its own; what it returned."""
    context = contextvars.copy_context()
    context.run(enter_batch, batch)
    if task.chain is not None and task.chain.batches:
        return context.run(through, task.chain.batches, batch, task.function, (batch,), {})
    result = context.run(task.function, batch)
    check_result(result)
    return result


async def call_async(task: BaseTask[..., Any], batch: Batch, timeout: float | None) -> Any:
    """Call an `async def`, in the context of the asyncio task that this runs in; what it returned."""
    enter_batch(batch)
    if task.chain is not None and task.chain.batches_async:
        work = through_async(task.chain.batches_async, batch, task.function, (batch,), {})
    else:
        work = task.function(batch)
    return await limited(work, timeout)


def fill_in(task: BaseTask[..., Any], job: BatchJob) -> None:
    """Decode the arguments; raises what concerns this job alone."""
    _, args, kwargs = prepare(lambda name: task, job.job)
    job.fill_in(args, kwargs)


def shortest(jobs: Sequence[BatchJob]) -> float | None:
    """The timeout of a call with these jobs: the shortest of theirs. None where none has one."""
    return min((job.job.timeout for job in jobs if job.job.timeout is not None), default=None)


def begin_clock(jobs: Iterable[BatchJob], timeout: float | None) -> None:
    """The call begins."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for job in jobs:
        job.end_by(deadline)


def answers(batch: Batch, error: BaseException | None) -> Iterator[tuple[BatchJob, BaseException | None]]:
    """What each job counts as having raised, when the call ended with `error`."""
    for job in batch:
        yield job, job.answer if job.answered else error


def results(batch: Batch, value: object, *, keeps: bool) -> Sequence[Any]:
    """The results of the jobs, of a handler that returned `value`, whose task `keeps` them or not."""
    if value is None or not keeps:
        return [None] * len(batch)
    if isinstance(value, (list, tuple)) and len(value) == len(batch):
        return value
    what = f"{len(value)} results" if isinstance(value, (list, tuple)) else f"a value of type {type(value).__name__}"
    reason = (
        f"its batch handler returned {what} for {len(batch)} jobs: a list with one for each, in their order, is kept"
    )
    return [NoResult(reason)] * len(batch)


class BatchCall:
    """See the module. `batch` is empty when no job is to be run here (any more)."""

    def __init__(self, runner: Runner, group: Group, *, stop: object | None = None, decode: bool = True) -> None:
        """Take the jobs of the group up. `stop`: see Held.stop; this object where none is given. `decode`: their arguments
        are read here, and what cannot be read fails alone."""
        self.runner = runner
        self.task = group.task
        self.queue = group.queue
        self.end_call: Callable[[], object] | None = None
        self.helds: list[Held] = []
        jobs: list[BatchJob] = []
        for held in group.close():
            held.stop = self if stop is None else stop
            job = runner.begin_as(BatchJob, held)
            if job is not None and (not decode or self._filled_in(held, job)):
                self.helds.append(held)
                jobs.append(job)
        self.batch = Batch(jobs)
        self.timeout = shortest(jobs)
        begin_clock(jobs, self.timeout)
        if jobs and runner.events.wanted(EventName.BATCH_STARTED):
            ids = [job.id for job in jobs]
            facts: dict[str, Any] = {"queue": self.queue, "task": self.task.name, "ids": ids, "count": len(ids)}
            runner.events.emit(EventName.BATCH_STARTED, **facts)

    def _filled_in(self, held: Held, job: BatchJob) -> bool:
        try:
            fill_in(self.task, job)
        except BaseException as error:  # noqa: BLE001 - the others are called without it
            self.runner.end(held, self.runner.raised(held, None, error), error)
            return False
        return True

    def run(self) -> None:
        """In this thread."""
        try:
            value = call(self.task, self.batch)
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt too: failed attempts, never a dead runner
            self._ended(None, error)
        else:
            self._ended(value, None)

    async def run_async(self) -> None:
        """In this asyncio task."""
        current = asyncio.current_task()
        loop = asyncio.get_running_loop()
        if current is not None:
            self.end_call = functools.partial(loop.call_soon_threadsafe, current.cancel)
            if self._all_cancelled():  # it was asked for before there was anything to cancel
                current.cancel()
        try:
            value = await call_async(self.task, self.batch, self.timeout)
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the loop and every job in it
            self._ended(None, error)
        else:
            self._ended(value, None)

    def cancel(self) -> None:
        """One of the jobs is cancelled, or lost: end the call if it was the last one. From any thread."""
        if self.end_call is not None and self._all_cancelled():
            self.end_call()

    def _all_cancelled(self) -> bool:
        return all(held.current is not None and held.current.cancelled for held in self.helds)

    def _ended(self, value: object, error: BaseException | None) -> None:
        runner = self.runner
        ended: list[Ended] = []
        kept = results(self.batch, value, keeps=self.task.keeps is not None)
        for held, (job, said), result in zip(self.helds, answers(self.batch, error), kept, strict=True):
            if said is None:
                outcome = COMPLETED if self.task.keeps is None else runner.desk.returned(job, result)
                ended.append((held, outcome, None))
                continue
            ended.append((held, runner.raised(held, self.task, said), one_line(describe(said).type)))
        self.settle(ended)

    def settle(self, ended: Sequence[Ended]) -> None:
        """This came of the jobs. For the circuit of their task it is one attempt."""
        runner, counts = self.runner, True
        finished: list[Ended] = []
        for held, outcome, error in ended:
            if not runner.ledger.take(held):
                continue
            if runner.doubted(held, outcome, error, counts=counts):
                counts = False
            else:
                finished.append((held, outcome, error))
        runner.finish_call([(held, outcome) for held, outcome, _ in finished])
        for held, outcome, error in finished:
            if error is not None:
                tell_failed(runner.events, held, outcome, error)


def given_back(held: Held, task: BaseTask[..., Any] | None, desk: Desk) -> Outcome:
    """The outcome of a job whose call is not waited for any more: released, unless its handler has answered for it."""
    job = held.current
    if task is None or not isinstance(job, BatchJob) or not job.answered:
        return RELEASED
    return desk.returned(job, None) if job.answer is None else judge(held, job.answer, prepared=True, task=task)


def rescue(runner: Runner, item: Held | Group, error: BaseException) -> None:
    """Something of ours failed around a job or a batch: see Runner.rescue."""
    for held in item.helds if isinstance(item, Group) else (item,):
        runner.rescue(held, error)

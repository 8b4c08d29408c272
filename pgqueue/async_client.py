"""AsyncPgQueue: the same queue for asyncio; the same methods, awaited."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from pgqueue.batch import Batch, BatchJob
from pgqueue.controls import as_ids
from pgqueue.core import Jobs, failed, selection, snoozed
from pgqueue.drivers.execute import AsyncConnection, Foreign, run_async, whole_async
from pgqueue.drivers.hearing import Hearing
from pgqueue.drivers.pool import AsyncPool
from pgqueue.drivers.resolve import async_connection, note_failure_async
from pgqueue.job import Job
from pgqueue.limit_methods import AsyncLimits
from pgqueue.ops import Op
from pgqueue.ops import dead_letter as dead_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import result as result_ops
from pgqueue.ops import status as status_ops
from pgqueue.ops.cancel import Cancelled, Found
from pgqueue.ops.dead_letter import DeadLetter, Redriven
from pgqueue.ops.rescue import Rescued
from pgqueue.ops.status import LiveJob, QueueStatus, WorkerStatus
from pgqueue.outcome import COMPLETED, RELEASED
from pgqueue.result import JobResult, Progress
from pgqueue.task import BaseTask, Calls, TaskOptions
from pgqueue.topic_methods import AsyncTopics

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class AsyncTask(BaseTask[P, R], Generic[P, R]):
    """A task of an AsyncPgQueue: as Task, with `enqueue` and `enqueue_many` to be awaited."""

    def __init__(self, app: AsyncPgQueue, function: Callable[P, R], name: str, options: TaskOptions) -> None:
        super().__init__(function, name, options)
        self.app = app
        self.chain = app.chain

    @overload
    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> int: ...
    @overload
    async def enqueue(self, *args: Any, using: Any, **kwargs: Any) -> int: ...
    async def enqueue(self, *args: Any, using: Any = None, **kwargs: Any) -> int:
        """As Task.enqueue; `using` is an async connection or session."""
        op = self.app.enqueue_op(self, self.defaults, args, kwargs)
        return await self.app.run(op, self.using if using is None else using)

    async def enqueue_many(self, calls: Calls, *, using: Any = None) -> list[int]:
        """As Task.enqueue_many."""
        op, atomic = self.app.enqueue_many_op(self, self.defaults, calls)
        return await self.app.run(op, self.using if using is None else using, atomic=atomic)

    def options(self, *, using: Any = None, **changes: Any) -> Self:
        """As Task.options."""
        task = type(self)(self.app, self.function, self.name, self.defaults.for_call(changes))
        task.using = self.using if using is None else using
        return task


class AsyncBatchTask(AsyncTask[P, R], Generic[P, R]):
    """As BatchTask."""

    def __call__(self, jobs: Sequence[BatchJob]) -> R:  # type: ignore[override]
        """Run the function here and now, with these."""
        function: Callable[..., R] = self.function
        return function(jobs)


class AsyncPgQueue(AsyncLimits, AsyncTopics):
    """A queue in the database at `database_url` (or PGQUEUE_DATABASE_URL); see Settings for the other options.

    Nothing is connected before the first call that needs it. Belongs to the event loop of its first use, and once that is
    closed to the next one.
    """

    def __init__(self, database_url: str | None = None, **options: Any) -> None:
        super().__init__(database_url, **options)
        self._pool = AsyncPool(self.settings)
        self._hearing: Hearing | None = None

    @overload
    def task(self, function: Callable[P, R], /) -> AsyncTask[P, R]: ...
    @overload
    def task(
        self, *, batch: int, payload: Callable[P, Any], **options: Any
    ) -> Callable[[Callable[[Batch], R]], AsyncBatchTask[P, R]]: ...
    @overload
    def task(self, *, batch: int, **options: Any) -> Callable[[Callable[[Batch], R]], AsyncBatchTask[..., R]]: ...
    @overload
    def task(
        self, *, name: str | None = None, aliases: Sequence[str] = (), **options: Any
    ) -> Callable[[Callable[P, R]], AsyncTask[P, R]]: ...
    def task(self, *function: Any, **options: Any) -> Any:
        """Register a function as a task, under `name` or its module and qualified name. Options: see TaskOptions.

        `aliases`: names that the task had before; stored jobs that carry one run by this function.
        """
        return self.registered(function, options, AsyncTask, AsyncBatchTask)

    async def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """Run one operation in the transaction of `using`, or on a connection of our own (`atomic`: in one transaction)."""
        if using is None:
            async with self._pool.connection() as own:
                return await self._run(own, op, atomic)
        connection = await async_connection(using)
        try:
            return await self._run(connection, op, atomic)
        except BaseException as error:
            await note_failure_async(using, error)
            raise

    async def _run(self, connection: AsyncConnection | Foreign, op: Op[T], atomic: bool) -> T:
        if not atomic:
            return await run_async(connection, op, self.settings.schema)
        async with whole_async(connection):
            return await run_async(connection, op, self.settings.schema)

    async def enqueue(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: Any = None,
        **options: Any,
    ) -> int:
        """Enqueue by the name of a task, which another process may define; otherwise as Task.enqueue."""
        return await self.run(self.enqueue_named_op(task, args, kwargs or {}, options), using)

    async def claim(
        self, queues: Sequence[str] | str, *, limit: int = 1, lease: float = 30.0, using: Any = None
    ) -> list[Job]:
        """Claim up to `limit` ready jobs, from the queues in their order, for `lease` seconds.

        What is not settled by then is taken back. Called often enough, it also rescues and promotes by itself. In a
        caller's transaction (`using`) the jobs stay locked until that ends, and its rollback is as if never claimed.
        """
        return await self.run(self.claim_op(queues, limit=limit, lease=lease, own=using is None), using)

    async def complete(self, jobs: Jobs, *, using: Any = None) -> None:
        """The work is done. LeaseLost names the jobs that are not ours any more; the others are complete all the same."""
        await self.run(self.settle_op(jobs, lambda _: COMPLETED), using)

    async def fail(
        self, jobs: Jobs, error: BaseException | str, *, delay: float | timedelta | None = None, using: Any = None
    ) -> None:
        """The attempt failed: retry by the job's policy or after `delay`, or the dead letters after the last attempt."""
        await self.run(self.settle_op(jobs, failed(error, delay, random.random)), using)

    async def snooze(self, jobs: Jobs, delay: float | timedelta, *, using: Any = None) -> None:
        """Again after `delay`, without an attempt burned."""
        await self.run(self.settle_op(jobs, lambda _: snoozed(delay)), using)

    async def release(self, jobs: Jobs, *, using: Any = None) -> None:
        """Give jobs back as if they had not been claimed: same place in line, no attempt burned."""
        await self.run(self.settle_op(jobs, lambda _: RELEASED), using)

    async def extend(self, jobs: Jobs, lease: float | timedelta, *, using: Any = None) -> None:
        """Hold on for `lease` seconds from now. Reaches every job of the same claim. LeaseLost as in complete."""
        await self.run(self.extend_op(jobs, lease), using)

    async def cancel(self, ids: int | Iterable[int], *, using: Any = None) -> dict[int, str]:
        """Cancel live jobs by id: "cancelled" if it waited, "requested" if it runs; ids that are not live are left out."""
        return await self.run(self.cancel_op(ids), using)

    async def cancel_all(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ordering_key: str | None = None,
        concurrency_key: str | None = None,
        unique_key: str | None = None,
        everything: bool = False,
        using: Any = None,
    ) -> Cancelled:
        """Cancel the live jobs for which all of this is true; returns how many were cancelled, and how many asked to stop.

        Concerned is what is live at the call. In bounded steps, each a transaction of its own; all in one with `using`.
        """
        op = self.cancel_all_op(
            queue=queue,
            task=task,
            ordering_key=ordering_key,
            concurrency_key=concurrency_key,
            unique_key=unique_key,
            everything=everything,
        )
        return await self.run(op, using)

    async def count_live(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ordering_key: str | None = None,
        concurrency_key: str | None = None,
        unique_key: str | None = None,
        everything: bool = False,
    ) -> Found:
        """How many live jobs wait and how many run, of those that cancel_all would concern."""
        op = self.count_live_op(
            queue=queue,
            task=task,
            ordering_key=ordering_key,
            concurrency_key=concurrency_key,
            unique_key=unique_key,
            everything=everything,
        )
        return await self.run(op)

    async def result(self, job_id: int) -> JobResult | None:
        """How a job ended, and what its handler returned where its task keeps results; None while it is not over, and where
        nothing is known of it any more."""
        return await self.run(result_ops.end(*as_ids(job_id)))

    @overload
    async def wait(self, ids: int, timeout: float | timedelta | None = None) -> JobResult: ...
    @overload
    async def wait(self, ids: Iterable[int], timeout: float | timedelta | None = None) -> dict[int, JobResult]: ...
    async def wait(self, ids: Any, timeout: float | timedelta | None = None) -> Any:
        """As PgQueue.wait."""
        watch = self.watch(ids, timeout)
        if not await self.run(watch.look()):
            bell = asyncio.Event()
            ring = partial(asyncio.get_running_loop().call_soon_threadsafe, bell.set)
            self._hearing = self._hearing or Hearing(self.settings)
            with self._hearing.subscribed(lambda payload: bool(watch.concerns(payload) and ring())):
                while not await self.run(watch.look()):
                    pause = watch.pause()  # its own TimeoutError is not to be suppressed
                    with suppress(TimeoutError):
                        await asyncio.wait_for(bell.wait(), pause)
                    bell.clear()
        return watch.ended[ids] if isinstance(ids, int) else watch.ended

    async def progress(self, job_id: int) -> Progress | None:
        """What a live job has last said of itself; None where it said nothing, or has ended."""
        return (await self.run(result_ops.progress(as_ids(job_id)))).get(job_id)

    async def rescue(self, queue: str, *, using: Any = None) -> Rescued:
        """Take back what expired leases of this queue hold; workers and `claim` do this once a second."""
        op = rescue_ops.rescue(queue, archive=self.settings.archive, channel=self.channel)
        return await self.run(op, using)

    async def promote(self, queue: str, *, using: Any = None) -> list[int]:
        """Put the due jobs of this queue into line; workers and `claim` do this once a second."""
        return await self.run(rescue_ops.promote(queue, channel=self.channel), using)

    async def dead_letters(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        limit: int = 50,
    ) -> list[DeadLetter]:
        """The newest dead letters of a queue, of a task, of these ids, or of all."""
        return await self.run(dead_ops.dead_letters(selection(queue, task, ids), limit=limit))

    async def redrive(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        limit: int | None = None,
        using: Any = None,
    ) -> Redriven:
        """Put dead letters back into their queues under their ids, with all attempts anew; returns the ids."""
        op = dead_ops.redrive(selection(queue, task, ids), limit=limit, channel=self.channel)
        return await self.run(op, using)

    async def purge(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        older_than: float | timedelta = 0.0,
        using: Any = None,
    ) -> int:
        """Delete dead letters for good, in batches; returns how many."""
        return await self.run(dead_ops.purge(selection(queue, task, ids), older_than=older_than), using)

    async def count_dead_letters(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        older_than: float | timedelta = 0.0,
    ) -> int:
        """How many dead letters a redrive or purge of the same selection would concern."""
        return await self.run(dead_ops.count(selection(queue, task, ids), older_than=older_than))

    async def status(self, queues: Sequence[str] | None = None) -> list[QueueStatus]:
        """Counts of these queues, or of every queue that holds something."""
        return await self.run(status_ops.status(queues))

    async def jobs(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        state: str | None = None,
        ids: int | Iterable[int] | None = None,
        limit: int = 50,
    ) -> list[LiveJob]:
        """Live jobs in the order of their ids; `state` is ready, scheduled, blocked or running."""
        return await self.run(
            status_ops.jobs(queue=queue, task=task, state=state, ids=None if ids is None else as_ids(ids), limit=limit)
        )

    async def workers(self) -> list[WorkerStatus]:
        """Every worker that has a row."""
        return await self.run(status_ops.workers())

    async def pause(
        self,
        queue: str,
        *,
        task: str | None = None,
        until: datetime | None = None,
        seconds: float | timedelta | None = None,
    ) -> None:
        """Stop claims from this queue everywhere, or of one task of it; what runs goes on.

        The pause ends by itself `until` then (an aware datetime) or after so many `seconds`, by the database's clock;
        otherwise it lasts until `resume`. Of several calls the last one decides about the end.
        """
        await self.run(self.pause_op(queue, task, until, seconds))

    async def resume(self, queue: str, *, task: str | None = None) -> bool:
        """Let claims go on; False when there was no pause to lift.

        Tasks that were paused one by one stay so when their queue is resumed.
        """
        return await self.run(self.resume_op(queue, task))

    async def set_queue(self, queue: str, *, ageing: float | timedelta | None) -> None:
        """`ageing`: after so many seconds in line a job moves up by one priority, and so on; None, the default: never."""
        await self.run(self.set_queue_op(queue, ageing=ageing))

    async def expire(self, queue: str, *, using: Any = None) -> list[int]:
        """Archive what waits in this queue and is too old; workers and `claim` do this once a second."""
        return await self.run(self.expire_op(queue), using)

    async def close(self) -> None:
        """Close our own connections. The next call opens them again."""
        await self._pool.close()
        if self._hearing is not None:
            await asyncio.to_thread(self._hearing.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

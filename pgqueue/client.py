"""PgQueue: the queue for synchronous code, and its tasks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from pgqueue.batch import Batch, BatchJob
from pgqueue.controls import as_ids
from pgqueue.core import Jobs, failed, selection, snoozed
from pgqueue.drivers.execute import SyncConnection, run, whole
from pgqueue.drivers.hearing import Hearing
from pgqueue.drivers.pool import SyncPool
from pgqueue.drivers.resolve import note_failure, sync_connection
from pgqueue.job import Job
from pgqueue.limit_methods import SyncLimits
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
from pgqueue.topic_methods import SyncTopics

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Task(BaseTask[P, R], Generic[P, R]):
    """A task of a PgQueue. Calling it runs the function; `enqueue` makes a job of the call."""

    def __init__(self, app: PgQueue, function: Callable[P, R], name: str, options: TaskOptions) -> None:
        super().__init__(function, name, options)
        self.app = app
        self.chain = app.chain

    @overload
    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> int: ...
    @overload
    def enqueue(self, *args: Any, using: Any, **kwargs: Any) -> int: ...
    def enqueue(self, *args: Any, using: Any = None, **kwargs: Any) -> int:
        """Enqueue one call; returns the job's id.

        With `using` the job belongs to that connection's transaction: it exists once that commits, and never if it does
        not. Without, it is durable when this returns. ArgumentsDoNotBind and PayloadError are raised before anything is
        sent, so the caller's transaction stays usable. A type checker sees the arguments beside `using` only where that is
        given as ``task.options(using=…).enqueue(…)``.
        """
        op = self.app.enqueue_op(self, self.defaults, args, kwargs)
        return self.app.run(op, self.using if using is None else using)

    def enqueue_many(self, calls: Calls, *, using: Any = None) -> list[int]:
        """Enqueue many calls, all or nothing; returns the ids in their order.

        `calls`: tuples of positional arguments or mappings of keywords, also from a generator, which is read in chunks.
        With `using`, a bad element raises after earlier chunks were sent: roll your transaction (or savepoint) back then.
        """
        op, atomic = self.app.enqueue_many_op(self, self.defaults, calls)
        return self.app.run(op, self.using if using is None else using, atomic=atomic)

    def options(self, *, using: Any = None, **changes: Any) -> Self:
        """The same task with other options for calls on the copy (see TaskOptions), or in the transaction of `using`."""
        task = type(self)(self.app, self.function, self.name, self.defaults.for_call(changes))
        task.using = self.using if using is None else using
        return task


class BatchTask(Task[P, R], Generic[P, R]):
    """A task whose function is called with many jobs. `enqueue` makes one job; its arguments are those of `payload`."""

    def __call__(self, jobs: Sequence[BatchJob]) -> R:  # type: ignore[override]
        """Run the function here and now, with these."""
        function: Callable[..., R] = self.function
        return function(jobs)


class PgQueue(SyncLimits, SyncTopics):
    """A queue in the database at `database_url` (or PGQUEUE_DATABASE_URL); see Settings for the other options.

    Nothing is connected before the first call that needs it. Safe to share between threads, and over a fork.
    """

    def __init__(self, database_url: str | None = None, **options: Any) -> None:
        super().__init__(database_url, **options)
        self._pool = SyncPool(self.settings)
        self._hearing: Hearing | None = None

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self, *, batch: int, payload: Callable[P, Any], **options: Any
    ) -> Callable[[Callable[[Batch], R]], BatchTask[P, R]]: ...
    @overload
    def task(self, *, batch: int, **options: Any) -> Callable[[Callable[[Batch], R]], BatchTask[..., R]]: ...
    @overload
    def task(
        self, *, name: str | None = None, aliases: Sequence[str] = (), **options: Any
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(self, *function: Any, **options: Any) -> Any:
        """Register a function as a task, under `name` or its module and qualified name. Options: see TaskOptions.

        `aliases`: names that the task had before; stored jobs that carry one run by this function.
        """
        return self.registered(function, options, Task, BatchTask)

    def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """Run one operation in the transaction of `using`, or on a connection of our own (`atomic`: in one transaction)."""
        if using is None:
            with self._pool.connection() as connection:
                return self._run(connection, op, atomic)
        connection = sync_connection(using)
        try:
            return self._run(connection, op, atomic)
        except BaseException as error:
            note_failure(using, error)
            raise

    def _run(self, connection: SyncConnection, op: Op[T], atomic: bool) -> T:
        if not atomic:
            return run(connection, op, self.settings.schema)
        with whole(connection):
            return run(connection, op, self.settings.schema)

    def enqueue(
        self,
        task: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: Any = None,
        **options: Any,
    ) -> int:
        """Enqueue by the name of a task, which another process may define; otherwise as Task.enqueue."""
        return self.run(self.enqueue_named_op(task, args, kwargs or {}, options), using)

    def claim(
        self, queues: Sequence[str] | str, *, limit: int = 1, lease: float = 30.0, using: Any = None
    ) -> list[Job]:
        """Claim up to `limit` ready jobs, from the queues in their order, for `lease` seconds.

        What is not settled by then is taken back. Called often enough, it also rescues and promotes by itself. In a
        caller's transaction (`using`) the jobs stay locked until that ends, and its rollback is as if never claimed.
        """
        return self.run(self.claim_op(queues, limit=limit, lease=lease, own=using is None), using)

    def complete(self, jobs: Jobs, *, using: Any = None) -> None:
        """The work is done. LeaseLost names the jobs that are not ours any more; the others are complete all the same."""
        self.run(self.settle_op(jobs, lambda _: COMPLETED), using)

    def fail(
        self, jobs: Jobs, error: BaseException | str, *, delay: float | timedelta | None = None, using: Any = None
    ) -> None:
        """The attempt failed: retry by the job's policy or after `delay`, or the dead letters after the last attempt."""
        self.run(self.settle_op(jobs, failed(error, delay, random.random)), using)

    def snooze(self, jobs: Jobs, delay: float | timedelta, *, using: Any = None) -> None:
        """Again after `delay`, without an attempt burned."""
        self.run(self.settle_op(jobs, lambda _: snoozed(delay)), using)

    def release(self, jobs: Jobs, *, using: Any = None) -> None:
        """Give jobs back as if they had not been claimed: same place in line, no attempt burned."""
        self.run(self.settle_op(jobs, lambda _: RELEASED), using)

    def extend(self, jobs: Jobs, lease: float | timedelta, *, using: Any = None) -> None:
        """Hold on for `lease` seconds from now. Reaches every job of the same claim. LeaseLost as in complete."""
        self.run(self.extend_op(jobs, lease), using)

    def cancel(self, ids: int | Iterable[int], *, using: Any = None) -> dict[int, str]:
        """Cancel live jobs by id: "cancelled" if it waited, "requested" if it runs; ids that are not live are left out."""
        return self.run(self.cancel_op(ids), using)

    def cancel_all(
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
        return self.run(op, using)

    def count_live(
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
        return self.run(op)

    def result(self, job_id: int) -> JobResult | None:
        """How a job ended, and what its handler returned where its task keeps results; None while it is not over, and where
        nothing is known of it any more."""
        return self.run(result_ops.end(*as_ids(job_id)))

    @overload
    def wait(self, ids: int, timeout: float | timedelta | None = None) -> JobResult: ...
    @overload
    def wait(self, ids: Iterable[int], timeout: float | timedelta | None = None) -> dict[int, JobResult]: ...
    def wait(self, ids: Any, timeout: float | timedelta | None = None) -> Any:
        """Wait until a job, or all of several, have ended in whatever way; their results, for several by id.

        WaitTimeout, a TimeoutError, names those that are open after `timeout` seconds. A job that is not there counts as
        ended, and so does one whose enqueue is not committed yet. In a handler this blocks a slot of the worker.
        """
        watch = self.watch(ids, timeout)
        if not self.run(watch.look()):
            bell = threading.Event()
            self._hearing = self._hearing or Hearing(self.settings)
            with self._hearing.subscribed(lambda payload: bell.set() if watch.concerns(payload) else None):
                while not self.run(watch.look()):
                    bell.wait(watch.pause())
                    bell.clear()
        return watch.ended[ids] if isinstance(ids, int) else watch.ended

    def progress(self, job_id: int) -> Progress | None:
        """What a live job has last said of itself; None where it said nothing, or has ended."""
        return self.run(result_ops.progress(as_ids(job_id))).get(job_id)

    def rescue(self, queue: str, *, using: Any = None) -> Rescued:
        """Take back what expired leases of this queue hold; workers and `claim` do this once a second."""
        op = rescue_ops.rescue(queue, archive=self.settings.archive, channel=self.channel)
        return self.run(op, using)

    def promote(self, queue: str, *, using: Any = None) -> list[int]:
        """Put the due jobs of this queue into line; workers and `claim` do this once a second."""
        return self.run(rescue_ops.promote(queue, channel=self.channel), using)

    def dead_letters(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        limit: int = 50,
    ) -> list[DeadLetter]:
        """The newest dead letters of a queue, of a task, of these ids, or of all."""
        return self.run(dead_ops.dead_letters(selection(queue, task, ids), limit=limit))

    def redrive(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        limit: int | None = None,
        using: Any = None,
    ) -> Redriven:
        """Put dead letters back into their queues under their ids, with all attempts anew; returns the ids.

        A dead letter whose unique key has a live job stays; `.skipped` of the answer names those.
        """
        op = dead_ops.redrive(selection(queue, task, ids), limit=limit, channel=self.channel)
        return self.run(op, using)

    def purge(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        older_than: float | timedelta = 0.0,
        using: Any = None,
    ) -> int:
        """Delete dead letters for good, in batches; returns how many."""
        return self.run(dead_ops.purge(selection(queue, task, ids), older_than=older_than), using)

    def count_dead_letters(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        ids: int | Iterable[int] | None = None,
        older_than: float | timedelta = 0.0,
    ) -> int:
        """How many dead letters a redrive or purge of the same selection would concern."""
        return self.run(dead_ops.count(selection(queue, task, ids), older_than=older_than))

    def status(self, queues: Sequence[str] | None = None) -> list[QueueStatus]:
        """Counts of these queues, or of every queue that holds something."""
        return self.run(status_ops.status(queues))

    def jobs(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        state: str | None = None,
        ids: int | Iterable[int] | None = None,
        limit: int = 50,
    ) -> list[LiveJob]:
        """Live jobs in the order of their ids; `state` is ready, scheduled, blocked or running."""
        return self.run(
            status_ops.jobs(queue=queue, task=task, state=state, ids=None if ids is None else as_ids(ids), limit=limit)
        )

    def workers(self) -> list[WorkerStatus]:
        """Every worker that has a row."""
        return self.run(status_ops.workers())

    def pause(
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
        self.run(self.pause_op(queue, task, until, seconds))

    def resume(self, queue: str, *, task: str | None = None) -> bool:
        """Let claims go on; False when there was no pause to lift.

        Tasks that were paused one by one stay so when their queue is resumed.
        """
        return self.run(self.resume_op(queue, task))

    def set_queue(self, queue: str, *, ageing: float | timedelta | None) -> None:
        """`ageing`: after so many seconds in line a job moves up by one priority, and so on; None, the default: never."""
        self.run(self.set_queue_op(queue, ageing=ageing))

    def expire(self, queue: str, *, using: Any = None) -> list[int]:
        """Archive what waits in this queue and is too old; workers and `claim` do this once a second."""
        return self.run(self.expire_op(queue), using)

    def close(self) -> None:
        """Close our own connections. The next call opens them again."""
        self._pool.close()
        if self._hearing is not None:
            self._hearing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

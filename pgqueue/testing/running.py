"""run_jobs: a worker for tests, in the thread of the test, that ends when nothing is left to be done."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import psycopg

from pgqueue.async_client import AsyncPgQueue
from pgqueue.client import PgQueue
from pgqueue.config import validate_count
from pgqueue.core import Core
from pgqueue.drivers.execute import AsyncConnection, Foreign
from pgqueue.drivers.execute import run as run_on
from pgqueue.drivers.pool import SyncPool
from pgqueue.drivers.resolve import async_connection, sync_connection
from pgqueue.errors import ConfigurationError, LeaseLost, PgQueueError
from pgqueue.job import Job
from pgqueue.ops import Op
from pgqueue.ops import claim as claim_ops
from pgqueue.ops import result as result_ops
from pgqueue.ops import settle as settle_ops
from pgqueue.outcome import RELEASED
from pgqueue.testing import tending
from pgqueue.testing.calling import (
    LOST,
    Ask,
    Await,
    Caller,
    Guard,
    Plan,
    Ran,
    TooManyJobs,
    settled_by_handler,
    to_raise,
)
from pgqueue.testing.loops import Loop, driven, driven_async, in_new_task
from pgqueue.testing.pointing import OneAsyncPool, OnePool, bound, home_of, using_of
from pgqueue.worker.desk import Desk

T = TypeVar("T")
MOST = 1000
SAVEPOINT = "SAVEPOINT pgqueue_run"
BACK = "ROLLBACK TO SAVEPOINT pgqueue_run"
RELEASE = "RELEASE SAVEPOINT pgqueue_run"
PROBE = "SAVEPOINT pgqueue_probe"
NOT_THERE = "ROLLBACK TO SAVEPOINT pgqueue_probe; RELEASE SAVEPOINT pgqueue_probe"
TRANSACTION = "SELECT txid_current()"
COLOUR = "an AsyncPgQueue is asynchronous: await run_jobs_async(…)"
ON_ASYNCPG = (
    "run_jobs_async works in a transaction of psycopg's only: leave using= out, so that it commits, or give the engine of "
    "your tests the driver psycopg (postgresql+psycopg://…)"
)
SCHEDULED = (
    "schedules have made more than {} jobs: was the clock moved far, with missed='all'? run_jobs(limit=…) allows more, and "
    "schedules=False makes none"
)
LEFT_OPEN = "the handler of job {} settled it in a transaction that it left open"
ENDED = (
    "a handler has ended the transaction in which the jobs of this test run: give it a savepoint to commit (SQLAlchemy: "
    "join_transaction_mode='create_savepoint'), or run the jobs without using="
)


def run_jobs(
    pq: PgQueue,
    *,
    queues: Iterable[str] | None = None,
    using: Any = None,
    raise_errors: bool = True,
    limit: int = MOST,
    schedules: bool = True,
) -> list[Ran]:
    """Run the jobs that are due in this thread until none is left; what ran, in that order.

    Each is claimed, called and settled as by a worker, one after the other; what is due later by the database's clock stays.
    `queues`: all, unless given. `using`: a connection in whose transaction all of that happens; also what the handlers do
    with `pq` then. Without it, it is committed, unless `pq` is bound to a connection or Django is in an atomic block.
    `raise_errors`: raise what a handler raised, after its outcome is written. TooManyJobs once more than `limit` would run.
    `schedules` False: jobs of schedules are not made.
    """
    app = home_of(pq)
    if not isinstance(app, PgQueue):
        raise ConfigurationError(COLOUR)
    using = using_of(app) if using is None else using
    binding = contextlib.nullcontext(app) if using is None else bound(app, using)
    with binding, _Sync(app, using) as loop:
        return loop.do(_Drain(app, loop.caller, queues, raise_errors, limit, schedules).plan())


async def run_jobs_async(
    pq: Core,
    *,
    queues: Iterable[str] | None = None,
    using: Any = None,
    raise_errors: bool = True,
    limit: int = MOST,
    schedules: bool = True,
) -> list[Ran]:
    """The same in the running event loop, for an AsyncPgQueue, whose `using` is an asynchronous connection, or a PgQueue.
    Plain functions block the loop while they run."""
    pq = home_of(pq)
    using = using_of(pq) if using is None else using
    binding = contextlib.nullcontext(pq) if using is None else bound(pq, using)
    with binding:
        if isinstance(pq, PgQueue):
            with _Sync(pq, using) as loop:
                return await loop.do_async(_Drain(pq, loop.caller, queues, raise_errors, limit, schedules).plan())
        if not isinstance(pq, AsyncPgQueue):
            raise ConfigurationError("run_jobs_async needs an AsyncPgQueue or a PgQueue")
        connection = None if using is None else await async_connection(using)
        if isinstance(connection, Foreign):
            raise ConfigurationError(ON_ASYNCPG)
        async with _Async(pq, connection) as other:
            return await other.do(_Drain(pq, other.caller, queues, raise_errors, limit, schedules).plan())


class _Drain:
    """What run_jobs does, for a loop of either colour."""

    def __init__(
        self,
        app: Core,
        caller: Caller,
        queues: Iterable[str] | None,
        raise_errors: bool,
        limit: int,
        schedules: bool,
    ) -> None:
        self.app = app
        self.caller = caller
        self.queues = None if queues is None else [queues] if isinstance(queues, str) else list(queues)
        self.raise_errors = raise_errors
        self.limit = validate_count("limit", limit)
        self.schedules = schedules
        self.ran: list[Ran] = []
        self.made = 0
        # As a worker does it, what has settled here wakes nobody: there is nobody else.
        self.options = settle_ops.SettleOptions(archive=app.settings.archive)

    def plan(self) -> Plan[list[Ran]]:
        """Round after round, until one brings nothing."""
        yield Ask(tending.begin(self.app))
        moved = True
        while moved:
            moved = self.schedules and (yield from self._tick())
            moved = (yield Ask(tending.replay())) or moved
            for queue in self.queues or (yield Ask(tending.queues(self.app))):
                yield Ask(tending.tend(self.app, queue))
                while jobs := (yield from self._claim(queue)):
                    yield from self._run(jobs)
                    moved = True
        return self.ran

    def _tick(self) -> Plan[bool]:
        ticked, made = yield Ask(tending.tick(self.app, self.limit - self.made))
        self.made += made
        if self.made > self.limit:
            raise TooManyJobs(SCHEDULED.format(self.limit))
        return bool(ticked)

    def _claim(self, queue: str) -> Plan[list[Job]]:
        jobs: list[Job] = yield Ask(tending.claim(queue, 1))
        if not jobs:
            return []
        task = self.app.tasks.get(jobs[0].task)
        if task is not None and task.defaults.batch is not None and not jobs[0].lost and task.defaults.batch_fill > 1:
            others = [name for name, other in self.app.tasks.items() if other is not task]
            more: list[Job] = yield Ask(tending.claim(queue, task.defaults.batch - 1, left_out=others))
            strange = [job for job in more if self.app.tasks.get(job.task) is not task or job.lost]
            if strange:
                yield Ask(self._released(strange))
            jobs += [job for job in more if job not in strange]
        if len(self.ran) + len(jobs) > self.limit:
            yield Ask(self._released(jobs))
            last = ", ".join(dict.fromkeys(one.task for one in self.ran[-50:]))
            raise TooManyJobs(
                f"{self.limit} jobs ran and more are ready: do they enqueue each other without end? The last were of "
                f"{last}; run_jobs(limit=…) allows more"
            )
        return jobs

    def _run(self, jobs: Sequence[Job]) -> Plan[None]:
        yield from self.caller.call(jobs)
        told = yield from self._settle()
        self.ran += told
        error = to_raise(told, wanted=self.raise_errors)
        if error is not None:
            raise error
        lost = [job for job in jobs if any(one.id == job.id and one.outcome == LOST for one in told)]
        if lost and self.raise_errors:
            raise LeaseLost(lost)

    def _settle(self) -> Plan[list[Ran]]:
        """Write what came of the jobs of the last call."""
        caller = self.caller
        decided = list(caller.decided)
        told: list[Ran] = []
        for held, outcome in caller.doubts:
            job = held.job
            said: dict[int, str] = yield Ask(settle_ops.doubt(job.queue, [(job.id, job.token)]))
            fate = said.get(job.id)
            if fate == "open":
                raise PgQueueError(LEFT_OPEN.format(job.id))
            if fate == "ours":
                decided.append((held, outcome))
            else:
                told.append(caller.ran(job, settled_by_handler(held)))
        if decided:
            pairs = [(held.job, outcome) for held, outcome in decided]
            tokens = {job.token for job, _ in pairs}
            queue = pairs[0][0].queue
            settled = yield Ask(settle_ops.settle(queue, pairs, finished=tokens, options=self.options))
            lost = {job.id for job in settled.lost}
            told += [caller.ran(job, LOST if job.id in lost else outcome.kind.value) for job, outcome in pairs]
        return sorted(told, key=lambda one: one.id)

    def _released(self, jobs: Sequence[Job]) -> Op[None]:

        for queue in dict.fromkeys(job.queue for job in jobs):
            pairs = [(job, RELEASED) for job in jobs if job.queue == queue]
            yield from settle_ops.settle(queue, pairs, finished={job.token for job, _ in pairs}, options=self.options)


def _desk(app: Core, connection: Any, write: Callable[[Op[Any]], Any], *, asynchronous: bool) -> Desk:
    def report(job: Job, percent: float | None, message: str) -> None:
        write(result_ops.write_progress(job.queue, [result_ops.Report(job.id, job.token, percent, message)]))

    def missing(job: Job) -> None:
        """The result says it itself."""

    def keeps(job: Job) -> float | None:
        return None if (task := app.tasks.get(job.task)) is None else task.keeps

    desk = Desk(app.settings, connections=2, keeps=keeps, report=report, missing=missing, app=app)
    desk.options = dataclasses.replace(desk.options, channel=None, lanes_channel=None)
    if connection is not None:
        desk.pool = OnePool(None if asynchronous else connection)  # type: ignore[assignment]
        desk.async_pool = OneAsyncPool(connection if asynchronous else None)  # type: ignore[assignment]
    return desk


def _extending(write: Callable[[Op[Any]], Any]) -> Callable[[Job, float], None]:
    def extend(job: Job, seconds: float) -> None:
        held = write(claim_ops.extend(job.queue, [(job.id, job.token)], lease=seconds))
        if held is not None and job.id not in held:
            raise LeaseLost([job])

    return extend


class _Sync:
    """Does what a plan asks for, for a PgQueue."""

    def __init__(self, app: PgQueue, using: Any) -> None:
        self._app = app
        self._connection = None if using is None else sync_connection(using)
        self._transaction: object = None
        self._desk = _desk(app, self._connection, app.run, asynchronous=False)
        self._loop = Loop()
        self.caller = Caller(app, self._desk, _extending(app.run))

    def __enter__(self) -> _Sync:
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.close(self._desk.close_async)
        self._desk.close()

    def do(self, plan: Plan[T]) -> T:
        """To its end."""
        return driven(plan, self._answer)

    async def do_async(self, plan: Plan[T]) -> T:
        """The same in the running loop."""
        try:
            return await driven_async(plan, self._answer_in_loop)
        finally:
            await self._desk.close_async()

    def _answer(self, wish: Ask | Await | Guard) -> Any:
        if isinstance(wish, Ask):
            return self._app.run(wish.op)
        if isinstance(wish, Guard):
            return self._guard(wish)
        return self._loop.run(wish.work)

    async def _answer_in_loop(self, wish: Ask | Await | Guard) -> Any:
        return await in_new_task(wish.work) if isinstance(wish, Await) else self._answer(wish)

    def _guard(self, guard: Guard) -> None:
        """What a handler does to the connection that it shares with us must not keep its outcome from being written."""
        connection = self._connection
        if connection is None:
            return
        if guard.begins:
            self._transaction = connection.execute(TRANSACTION).fetchone()
            connection.execute(SAVEPOINT)
            return
        try:
            if connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                connection.execute(BACK)
            if connection.execute(TRANSACTION).fetchone() == self._transaction:
                connection.execute(PROBE)
                try:
                    connection.execute(RELEASE)
                except psycopg.errors.InvalidSavepointSpecification:  # with one of the handler's own, from before it
                    connection.execute(NOT_THERE)
                return
        except psycopg.errors.InvalidSavepointSpecification:
            pass
        raise PgQueueError(ENDED)


class _Async:
    """The same for an AsyncPgQueue. `connection`: the one in whose transaction all happens."""

    def __init__(self, app: AsyncPgQueue, connection: AsyncConnection | None) -> None:
        self._app = app
        self._connection = connection
        self._transaction: object = None
        self._pool = SyncPool(app.settings)
        write = self._nowhere if connection is not None else self._write
        self._desk = _desk(app, connection, write, asynchronous=True)
        self.caller = Caller(app, self._desk, _extending(write))

    async def __aenter__(self) -> _Async:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._desk.close_async()
        self._desk.close()
        self._pool.close()

    async def do(self, plan: Plan[T]) -> T:
        """To its end."""
        return await driven_async(plan, self._answer)

    async def _answer(self, wish: Ask | Await | Guard) -> Any:
        if isinstance(wish, Ask):
            return await self._app.run(wish.op)
        if isinstance(wish, Await):
            return await in_new_task(wish.work)
        return await self._guard(wish)

    async def _guard(self, guard: Guard) -> None:
        connection = self._connection
        if connection is None:
            return
        if guard.begins:
            self._transaction = await (await connection.execute(TRANSACTION)).fetchone()
            await connection.execute(SAVEPOINT)
            return
        try:
            if connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR:
                await connection.execute(BACK)
            if await (await connection.execute(TRANSACTION)).fetchone() == self._transaction:
                await connection.execute(PROBE)
                try:
                    await connection.execute(RELEASE)
                except psycopg.errors.InvalidSavepointSpecification:
                    await connection.execute(NOT_THERE)
                return
        except psycopg.errors.InvalidSavepointSpecification:
            pass
        raise PgQueueError(ENDED)

    def _write(self, op: Op[T]) -> T:
        """What a handler asks for without awaiting it: over a connection of its own, as in a worker."""
        with self._pool.connection() as connection:
            return run_on(connection, op, self._app.settings.schema)

    def _nowhere(self, op: Op[Any]) -> None:
        """In a transaction over an asynchronous connection there is no way to do it."""
        op.close()

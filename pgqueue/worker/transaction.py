"""The block of `current_job().transaction(…)`: what a handler writes, and the completion of its job, in one transaction.

The completion is written at the end of the block. On a connection of the caller's that is all: whether it becomes true is
decided by the caller's commit, and found out by the settler. The lease row is left alone: an open transaction that held
it would stop the heartbeats of all the jobs that were claimed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pgqueue.current import CurrentJob, Stage
from pgqueue.drivers.execute import AsyncConnection, Foreign, SyncConnection, commits_by_itself, run, run_async
from pgqueue.drivers.resolve import async_connection, sync_connection
from pgqueue.errors import ConfigurationError, LeaseLost, UnsupportedConnection
from pgqueue.ops import Op
from pgqueue.ops import settle as settle_ops
from pgqueue.outcome import Outcome, OutcomeKind

if TYPE_CHECKING:
    from pgqueue.worker.desk import Desk

COLOURS = "a transaction block is entered by `async with` where the connection is asynchronous, and by `with` elsewhere"
AUTOCOMMIT = (
    "this connection is in autocommit, and outside of a transaction every statement would commit alone: begin one around "
    "the block (psycopg: connection.transaction(), Django: transaction.atomic())"
)


class Block:
    """See `CurrentJob.transaction`. Entered once."""

    def __init__(self, desk: Desk, jobs: Sequence[CurrentJob], using: Any) -> None:
        self._desk = desk
        self._jobs = jobs
        self._using = using
        self._connection: Any = None
        self._own: Any = None

    def __enter__(self) -> Any:
        self._enter()
        try:
            self._connection = self._own_connection() if self._using is None else self._callers()
        except BaseException:
            self._leave()
            raise
        return self._connection if self._using is None else self._using

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave()
            if self._own is not None:
                self._own.__exit__(kind, error, trace)
            return
        with self._own or nullcontext():  # commits, or rolls back for what is raised here
            run(self._connection, self._complete(self._inside(settle=True)), self._desk.settings.schema)

    async def __aenter__(self) -> Any:
        self._enter()
        try:
            self._connection = await (self._own_async() if self._using is None else self._callers_async())
        except BaseException:
            self._leave()
            raise
        return self._connection if self._using is None else self._using

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._leave()
            if self._own is not None:
                await self._own.__aexit__(kind, error, trace)
            return
        async with self._own or nullcontext():
            await run_async(self._connection, self._complete(self._inside(settle=True)), self._desk.settings.schema)

    def _enter(self) -> None:
        entered: list[CurrentJob] = []
        try:
            for current in self._jobs:
                current.enter_block()
                entered.append(current)
        except BaseException:
            for current in entered:
                current.leave_block()
            raise

    def _leave(self) -> None:
        for current in self._inside():
            current.leave_block()

    def _inside(self, *, settle: bool = False) -> list[CurrentJob]:
        """The jobs that the block completes: those that its handler has not answered for meanwhile."""
        inside = [current for current in self._jobs if current.stage is Stage.INSIDE]
        for current in inside if settle else ():
            current.settle(Stage.SETTLED)
        return inside

    def _complete(self, inside: Sequence[CurrentJob]) -> Op[None]:
        if not inside:
            return
        kept = [Outcome(OutcomeKind.COMPLETED, kept=self._desk.kept(current)) for current in inside]
        pairs = [(current.job, outcome) for current, outcome in zip(inside, kept, strict=True)]
        settled = yield from settle_ops.settle(inside[0].queue, pairs, options=self._desk.options)
        if settled.lost:
            lost = {job.id for job in settled.lost}
            # Nothing was written for these: what comes of the handler is the worker's affair again. The others are written,
            # unless the transaction is rolled back, as it should be now: only the database knows.
            for current in inside:
                if current.id in lost:
                    current.leave_block()
            raise LeaseLost(settled.lost)
        for current in inside:
            current.frees = settled.freed

    # Connections

    def _own_connection(self) -> SyncConnection:
        with ExitStack() as opening:
            connection = opening.enter_context(self._desk.pool.connection())
            opening.enter_context(connection.transaction())
            self._own = opening.pop_all()
            return connection

    async def _own_async(self) -> AsyncConnection:
        async with AsyncExitStack() as opening:
            connection = await opening.enter_async_context(self._desk.async_pool.connection())
            await opening.enter_async_context(connection.transaction())
            self._own = opening.pop_all()
            return connection

    def _callers(self) -> SyncConnection:
        try:
            connection = sync_connection(self._using)
        except UnsupportedConnection as error:
            raise UnsupportedConnection(f"{error}; {COLOURS}") from None
        if commits_by_itself(connection):
            raise ConfigurationError(AUTOCOMMIT)
        return connection

    async def _callers_async(self) -> AsyncConnection | Foreign:
        try:
            connection = await async_connection(self._using)
        except UnsupportedConnection as error:
            raise UnsupportedConnection(f"{error}; {COLOURS}") from None
        if commits_by_itself(connection):
            raise ConfigurationError(AUTOCOMMIT)
        return connection

"""What a worker does for its handlers while they run: transaction blocks, results, progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pgqueue.config import Settings
from pgqueue.core import Core
from pgqueue.current import UNSET, CurrentJob
from pgqueue.drivers.pool import AsyncPool, SyncPool
from pgqueue.errors import ConfigurationError
from pgqueue.failure import one_line
from pgqueue.job import Job
from pgqueue.ops.settle import SettleOptions
from pgqueue.outcome import COMPLETED, Outcome, OutcomeKind
from pgqueue.result import Kept, keep
from pgqueue.worker.transaction import Block

MESSAGE_BYTES = 200
NO_VALUE = "it was completed in a transaction block, and no set_result(…) came before the end of that"
Report = Callable[[Job, float | None, str], None]
"""Where progress goes: the job, the percentage if there is one, and the message."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoResult:
    """Stands for a result that is not there: why."""

    reason: str


class Desk:
    """`keeps` says for how many seconds the result of a job is kept. `missing` is told of results that cannot be stored,
    `settling` of every handler that settles its job itself, before it does. `app` is what the worker serves."""

    def __init__(
        self,
        settings: Settings,
        *,
        connections: int,
        keeps: Callable[[Job], float | None],
        report: Report,
        missing: Callable[[Job], None],
        settling: Callable[[CurrentJob], None] | None = None,
        app: Core | None = None,
    ) -> None:
        self.app = app
        self.settings = settings
        channel = settings.schema if settings.notify else None
        # Others are told of free slots by the commit itself: it may come when this worker is gone.
        self.options = SettleOptions(archive=settings.archive, channel=channel, lanes_channel=channel)
        own = dataclasses.replace(settings, pool_size=connections)  # every runner may be in a block
        self.pool = SyncPool(own)
        self.async_pool = AsyncPool(own)
        self._keeps = keeps
        self._report = report
        self._missing = missing
        self._settling = settling

    def transaction(self, jobs: Sequence[CurrentJob], using: Any) -> Block:
        """See `CurrentJob.transaction`."""
        return Block(self, jobs, using)

    def settling(self, current: CurrentJob) -> None:
        """See `pgqueue.current.Desk`."""
        if self._settling is not None:
            self._settling(current)

    def progress(self, current: CurrentJob, percent: float | None, message: str) -> None:
        """See `CurrentJob.progress`."""
        if percent is not None and (type(percent) not in (int, float) or not 0 <= percent <= 100):
            raise ConfigurationError("percent must be a number from 0 to 100, or None")
        self._report(current.job, percent, one_line(str(message), MESSAGE_BYTES))

    def kept(self, current: CurrentJob, value: Any = UNSET) -> Kept | None:
        """What is kept of a job that is done: of what it set as its result, or else of `value`; None where nothing is."""
        seconds = self._keeps(current.job)
        if seconds is None:
            return None
        chosen = value if current.result is UNSET else current.result
        if chosen is UNSET:
            return Kept(seconds, None, NO_VALUE)
        if isinstance(chosen, NoResult):
            self._missing(current.job)
            return Kept(seconds, None, chosen.reason)
        kept = keep(chosen, seconds=seconds, max_bytes=self.settings.max_result_bytes)
        if kept.error is not None:
            self._missing(current.job)
        return kept

    def returned(self, current: CurrentJob, value: object) -> Outcome:
        """The outcome of a function that returned `value`, of a task that keeps results."""
        kept = None if current.settled else self.kept(current, value)
        return COMPLETED if kept is None else Outcome(OutcomeKind.COMPLETED, kept=kept)

    def close(self) -> None:
        """Close the connections of blocks in threads."""
        self.pool.close()

    async def close_async(self) -> None:
        """Close those of blocks in the event loop, in that loop."""
        await self.async_pool.close()

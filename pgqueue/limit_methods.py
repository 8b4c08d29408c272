"""What both clients can do with limits of queues and of keys: a line a method, in their colour; and the declaration."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from pgqueue.config import validate_count, validate_name
from pgqueue.core import Core
from pgqueue.errors import ConfigurationError
from pgqueue.keys import CONCURRENCY, FAIRNESS, ORDERING, validate_key
from pgqueue.limit import limit_of, rate_of
from pgqueue.ops import Op
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import limit as ops
from pgqueue.ops.admission import LaneStatus
from pgqueue.ops.limit import QueueLimit
from pgqueue.schedule_methods import AsyncSchedules, SyncSchedules

T = TypeVar("T")
KINDS = {CONCURRENCY: "concurrency_key", ORDERING: "ordering_key", FAIRNESS: "fairness_key"}


class Limits(Core):
    """What needs no connection."""

    def declare_limit(
        self,
        queue: str,
        *,
        running: int | None = None,
        rate: float | None = None,
        per: float | timedelta = 1.0,
        burst: int | None = None,
    ) -> None:
        """What the code says of a queue; see `limit_queue`. Workers write it to the database when they start.

        What an operator changed stays until the code says something new. ConfigurationError, here and now, for numbers that
        cannot be, and where the queue was declared otherwise before.
        """
        limit = limit_of(running, rate=rate, per=per, burst=burst)
        if self.code_limits.setdefault(validate_name("queue", queue), limit) != limit:
            raise ConfigurationError(f"queue {queue!r} is declared with two limits: leave one of them out")

    def _key_limit_op(
        self, queue: str, keys: tuple[str | None, str | None, str | None], limit: int | None, **pace: Any
    ) -> Op[None]:
        validate_name("queue", queue)
        given = [(kind, key) for kind, key in zip(KINDS, keys, strict=True) if key is not None]
        if len(given) != 1:
            raise ConfigurationError(f"which key? give one of {', '.join(KINDS.values())}")
        [(kind, key)] = given
        if limit is not None and kind != CONCURRENCY:
            raise ConfigurationError(f"limit is for a concurrency_key: of {KINDS[kind]} only the rate is limited")
        if limit is not None:
            validate_count("limit", limit)
        lane = kind + validate_key(KINDS[kind], key)
        return admission_ops.set_limit(queue, lane, limit, rate_of(**pace), channel=self.channel)


class SyncLimits(SyncSchedules, Limits):
    """The methods of PgQueue."""

    if TYPE_CHECKING:

        def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T: ...

    def limit_queue(
        self,
        queue: str,
        *,
        running: int | None = None,
        rate: float | None = None,
        per: float | timedelta = 1.0,
        burst: int | None = None,
        using: Any = None,
    ) -> None:
        """At most `running` jobs of this queue run at once, and at most `rate` start in `per` seconds, on all workers.

        After a time without starts `burst` may start at once: what a second brings, and at least one, unless given. What is
        left out is not limited. It holds from the commit on; what runs goes on.
        """
        self.run(self.limit_op(queue, limit_of(running, rate=rate, per=per, burst=burst)), using)

    def unlimit_queue(self, queue: str, *, using: Any = None) -> bool:
        """Take the limits of this queue back; False when there was none."""
        return self.run(self.unlimit_op(queue), using)

    def limits(self, *, using: Any = None) -> list[QueueLimit]:
        """Every queue that is limited."""
        return self.run(ops.limits(), using)

    def limit_key(
        self,
        queue: str,
        concurrency_key: str | None = None,
        limit: int | None = None,
        *,
        ordering_key: str | None = None,
        fairness_key: str | None = None,
        rate: float | None = None,
        per: float | timedelta = 1.0,
        burst: int | None = None,
        using: Any = None,
    ) -> None:
        """At most `limit` jobs of this key at once, whatever its jobs say; None: what they say. Admitted ones stay so.

        At most `rate` of its jobs are admitted in `per` seconds, and `burst` at once, as in `limit_queue`; None: no rate. A
        rate may also be that of an ordering key or of a fairness key.
        """
        keys = (concurrency_key, ordering_key, fairness_key)
        self.run(self._key_limit_op(queue, keys, limit, rate=rate, per=per, burst=burst), using)

    def lanes(self, queue: str, *, limit: int = 50) -> list[LaneStatus]:
        """The keys of this queue that have jobs, or of which something was said: parked ones first."""
        return self.run(admission_ops.lanes(queue, limit=limit))

    def unpark(self, queue: str, ordering_key: str) -> bool:
        """Let the jobs of this ordering key go on; False when it was not parked."""
        return self.run(admission_ops.resume(queue, ORDERING + ordering_key, channel=self.channel))


class AsyncLimits(AsyncSchedules, Limits):
    """The methods of AsyncPgQueue."""

    if TYPE_CHECKING:

        async def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T: ...

    async def limit_queue(
        self,
        queue: str,
        *,
        running: int | None = None,
        rate: float | None = None,
        per: float | timedelta = 1.0,
        burst: int | None = None,
        using: Any = None,
    ) -> None:
        """As PgQueue.limit_queue."""
        await self.run(self.limit_op(queue, limit_of(running, rate=rate, per=per, burst=burst)), using)

    async def unlimit_queue(self, queue: str, *, using: Any = None) -> bool:
        """As PgQueue.unlimit_queue."""
        return await self.run(self.unlimit_op(queue), using)

    async def limits(self, *, using: Any = None) -> list[QueueLimit]:
        """As PgQueue.limits."""
        return await self.run(ops.limits(), using)

    async def limit_key(
        self,
        queue: str,
        concurrency_key: str | None = None,
        limit: int | None = None,
        *,
        ordering_key: str | None = None,
        fairness_key: str | None = None,
        rate: float | None = None,
        per: float | timedelta = 1.0,
        burst: int | None = None,
        using: Any = None,
    ) -> None:
        """As PgQueue.limit_key."""
        keys = (concurrency_key, ordering_key, fairness_key)
        await self.run(self._key_limit_op(queue, keys, limit, rate=rate, per=per, burst=burst), using)

    async def lanes(self, queue: str, *, limit: int = 50) -> list[LaneStatus]:
        """As PgQueue.lanes."""
        return await self.run(admission_ops.lanes(queue, limit=limit))

    async def unpark(self, queue: str, ordering_key: str) -> bool:
        """As PgQueue.unpark."""
        return await self.run(admission_ops.resume(queue, ORDERING + ordering_key, channel=self.channel))

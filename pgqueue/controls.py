"""What operators do to queues and to jobs at large, as operations that also tell subscribers."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from pgqueue.config import Settings, validate_count, validate_name
from pgqueue.events import Bus, EventName
from pgqueue.limit import Limit
from pgqueue.ops import Op
from pgqueue.ops import ageing as ageing_ops
from pgqueue.ops import cancel as cancel_ops
from pgqueue.ops import expiry as expiry_ops
from pgqueue.ops import limit as limit_ops
from pgqueue.ops import pause as pause_ops
from pgqueue.ops import settle as settle_ops

T = TypeVar("T")


def as_ids(ids: int | Iterable[int]) -> list[int]:
    """A list of job ids; ConfigurationError for anything that is not a whole number, a string of digits included."""
    chosen = [ids] if isinstance(ids, (int, str, bytes)) else list(ids)
    return [validate_count("a job id", one, least=-(2**63), most=2**63 - 1) for one in chosen]


class Controls:
    """A part of the core. Whatever can be refused is refused before the operation exists."""

    settings: Settings
    events: Bus
    code_limits: dict[str, Limit]

    def told(self) -> dict[str, Any]:
        """What a child process of a worker is told of the application before it imports anything, as JSON has it."""
        return {}

    @property
    def channel(self) -> str | None:
        """The NOTIFY channel, which is the schema's name; None when notifications are off."""
        return self.settings.schema if self.settings.notify else None

    @property
    def settle_options(self) -> settle_ops.SettleOptions:
        """How settles are written here."""
        return settle_ops.SettleOptions(archive=self.settings.archive, channel=self.channel)

    def pause_op(
        self, queue: str, task: str | None, until: datetime | None, seconds: float | timedelta | None
    ) -> Op[None]:
        """Stop claims from a queue, or of one task of it."""
        op = pause_ops.pause(queue, task, until=until, seconds=seconds, channel=self.channel)
        return self._told(op, EventName.QUEUE_PAUSED, queue=queue, task=task, until=until, seconds=seconds)

    def resume_op(self, queue: str, task: str | None) -> Op[bool]:
        """Let them go on."""
        op = pause_ops.resume(queue, task, channel=self.channel)
        return self._told(op, EventName.QUEUE_RESUMED, queue=queue, task=task)

    def set_queue_op(self, queue: str, *, ageing: float | timedelta | None) -> Op[None]:
        """Set what a queue is like."""
        return ageing_ops.set_ageing(queue, ageing, channel=self.channel)

    def limit_op(self, queue: str, limit: Limit) -> Op[None]:
        """Limit a queue from now on."""
        op = limit_ops.set_limit(queue, limit, channel=self.channel)
        return self._told(op, EventName.QUEUE_LIMIT_SET, queue=queue, **limit.said())

    def unlimit_op(self, queue: str) -> Op[bool]:
        """Take the limits of a queue back."""
        op = limit_ops.lift_limit(validate_name("queue", queue), channel=self.channel)
        return self._told(op, EventName.QUEUE_LIMIT_SET, queue=queue)

    def declare_limits_op(self) -> Op[None]:
        """Write the limits of the code, where they are new."""
        if self.code_limits:
            for queue in (yield from limit_ops.declare(self.code_limits, channel=self.channel)):
                self.events.emit(EventName.QUEUE_LIMIT_SET, queue=queue, **self.code_limits[queue].said())

    def expire_op(self, queue: str) -> Op[list[int]]:
        """Archive what waits in this queue and is too old."""
        expired = yield from expiry_ops.expire(queue, archive=self.settings.archive, channel=self.channel)
        if expired:
            self.events.emit(EventName.JOBS_EXPIRED, queue=queue, ids=expired, count=len(expired))
        return expired

    def cancel_op(self, ids: int | Iterable[int]) -> Op[dict[int, str]]:
        """Cancel live jobs by id."""
        return self._cancel(as_ids(ids))

    def _cancel(self, ids: list[int]) -> Op[dict[int, str]]:
        answer = yield from settle_ops.cancel(ids, self.settle_options)
        fates = list(answer.values())
        self._tell_cancelled(fates.count("cancelled"), fates.count("requested"))
        return answer

    def cancel_all_op(self, **selection: Any) -> Op[cancel_ops.Cancelled]:
        """Cancel all live jobs of a selection."""
        return self._cancel_all(cancel_ops.LiveSelection(**selection))

    def _cancel_all(self, selection: cancel_ops.LiveSelection) -> Op[cancel_ops.Cancelled]:
        answer = yield from cancel_ops.cancel_selected(selection, self.settle_options)
        self._tell_cancelled(*answer)
        return answer

    def count_live_op(self, **selection: Any) -> Op[cancel_ops.Found]:
        """Count them."""
        return cancel_ops.count_selected(cancel_ops.LiveSelection(**selection))

    def _tell_cancelled(self, cancelled: int, requested: int) -> None:
        if cancelled or requested:
            self.events.emit(EventName.JOBS_CANCELLED, cancelled=cancelled, requested=requested)

    def _told(self, op: Op[T], name: EventName, **facts: Any) -> Op[T]:
        answer = yield from op
        self.events.emit(name, **{fact: value for fact, value in facts.items() if value is not None})
        return answer

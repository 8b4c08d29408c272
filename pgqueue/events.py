"""Events: every change of state emits one, by name. Logging, metrics and tracing are subscribers.

`EventName` is the list; `docs/events.md` says of each when it is emitted and which facts it carries.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger("pgqueue")


class EventName(enum.StrEnum):
    """Every event there is. Facts hold ids, names, counts and seconds; never arguments and never a URL."""

    JOBS_CLAIMED = "jobs.claimed"
    JOB_STARTED = "job.started"
    BATCH_STARTED = "batch.started"
    JOB_FAILED = "job.failed"
    JOB_OVERDUE = "job.overdue"
    JOBS_SETTLED = "jobs.settled"
    JOBS_RELEASED = "jobs.released"
    LEASE_LOST = "lease.lost"
    JOB_CANCEL_REQUESTED = "job.cancel_requested"
    JOB_SUPERSEDED = "job.superseded"
    JOBS_RESCUED = "jobs.rescued"
    JOBS_ADOPTED = "jobs.adopted"
    JOBS_PROMOTED = "jobs.promoted"
    SCHEDULE_TICKED = "schedule.ticked"
    SCHEDULE_SKIPPED = "schedule.skipped"
    SCHEDULE_DEFINED = "schedule.defined"
    SCHEDULE_FAILED = "schedule.failed"
    SUBSCRIPTION_DEFINED = "subscription.defined"
    SUBSCRIPTION_REPLAYED = "subscription.replayed"
    SUBSCRIPTION_CAUGHT_UP = "subscription.caught_up"
    TOPIC_ROLLED = "topic.rolled"
    JOBS_EXPIRED = "jobs.expired"
    JOBS_AGED = "jobs.aged"
    JOBS_CANCELLED = "jobs.cancelled"
    QUEUE_PAUSED = "queue.paused"
    QUEUE_RESUMED = "queue.resumed"
    QUEUE_LIMIT_SET = "queue.limit_set"
    QUEUE_LIMITED = "queue.limited"
    TASK_POLICY_FAILED = "task.policy_failed"
    JOBS_FOLLOWED = "jobs.followed"
    TASK_CIRCUIT_OPENED = "task.circuit_opened"
    TASK_CIRCUIT_CLOSED = "task.circuit_closed"
    WORKER_POOLED = "worker.pooled"
    WORKER_STARTED = "worker.started"
    WORKER_STOPPING = "worker.stopping"
    WORKER_STOPPED = "worker.stopped"
    WORKER_FAILED = "worker.failed"
    WORKER_STUCK = "worker.stuck"
    WORKER_UNFIT = "worker.unfit"
    LOOP_FAILED = "loop.failed"
    LOOP_RECOVERED = "loop.recovered"
    SETTLE_ABANDONED = "settle.abandoned"
    RESULT_MISSING = "result.missing"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name and its facts."""

    name: EventName
    facts: Mapping[str, Any] = field(default_factory=dict)


Subscriber = Callable[[Event], None]
Wants = Callable[[EventName], bool]


class Bus:
    """Hands events to subscribers, in the thread that emits them; what a subscriber raises is logged and goes no further."""

    def __init__(self) -> None:
        self._subscribers: tuple[tuple[Subscriber, Wants], ...] = ()

    def subscribe(self, subscriber: Subscriber, *, wants: Wants | None = None) -> Callable[[], None]:
        """Call `subscriber` with every event from now on; returns the function that ends it.

        `wants` is asked, each time, whether an event of this name is of interest: the frequent ones cost nothing where it
        says no.
        """
        entry = (subscriber, wants or _everything)
        self._subscribers = (*self._subscribers, entry)

        def unsubscribe() -> None:
            self._subscribers = tuple(known for known in self._subscribers if known is not entry)

        return unsubscribe

    def wanted(self, name: EventName) -> bool:
        """True while anybody wants events of this name: lets the hot path skip building facts."""
        for _, wants in self._subscribers:  # noqa: SIM110 - a generator would cost more than the question
            if wants(name):
                return True
        return False

    def emit(self, name: EventName, **facts: Any) -> None:
        """Tell every subscriber that wants it."""
        if not self._subscribers:
            return
        event = Event(name, facts)
        for subscriber, wants in self._subscribers:
            try:
                if wants(name):
                    subscriber(event)
            except BaseException:
                logger.exception("a subscriber failed on %s", name)


def _everything(name: EventName) -> bool:
    return True

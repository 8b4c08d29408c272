"""What operators look at: queues, live jobs, workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from pgqueue.ops import Int8s, Op, Step
from pgqueue.ops.ageing import ageing
from pgqueue.ops.limit import QueueLimit, limits
from pgqueue.ops.pause import Pause, paused

MOST = 100_000
"""Counts stop here, so that looking never costs more than this many index entries."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """A worker that claims no job of `task` from a queue for now, since `failures` attempts in a row failed there.

    `reason` is the class of the exception. It is so for `seconds`; `pause` seconds pass between single jobs that are tried.
    """

    task: str
    worker_id: int
    worker: str
    reason: str
    failures: int
    seconds: float
    pause: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Counts of one queue, each at most `MOST`; `oldest_ready` is the age in seconds of the next job to run, `blocked` jobs
    wait for their key.

    `held_back`: the tasks that live workers leave out for now. `paused_until`: when the pause of the queue ends; None for
    one without an end, and where there is none. `paused_tasks`: the tasks that are paused. `ageing`: seconds after which a
    waiting job moves up by one priority; None where priorities do not age. `limit`: what the queue is limited to, if it is.
    """

    queue: str
    ready: int
    scheduled: int
    running: int
    dead: int
    paused_at: datetime | None
    oldest_ready: float | None
    blocked: int = 0
    held_back: list[HeldBack] = field(default_factory=list)
    paused_until: datetime | None = None
    paused_tasks: list[Pause] = field(default_factory=list)
    ageing: float | None = None
    limit: QueueLimit | None = None


@dataclass(frozen=True, slots=True)
class LiveJob:
    """A row of the job table as an operator sees it.

    `hidden`: this database role may not read arguments and errors, so they are None whatever the job has.
    """

    id: int
    queue: str
    task: str
    state: str
    priority: int
    attempt: int
    max_attempts: int
    lost: int
    run_at: datetime | None
    created_at: datetime | None
    cancel_requested: bool
    args_json: str | None
    kwargs_json: str | None
    errors_json: str | None
    unique_key: str | None = None
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker's row; `silent` is the age of its last heartbeat in seconds, `held` what its leases list."""

    id: int
    name: str
    hostname: str
    pid: int
    version: str
    queues: list[str]
    concurrency: int
    lease_seconds: float
    started_at: datetime
    seen_at: datetime
    silent: float
    held: int


def queue_names() -> Op[list[str]]:
    """Every queue that holds something or has a setting."""
    rows = yield Step("queue_names", {})
    return [row[0] for row in rows]


def status(queues: Sequence[str] | None = None) -> Op[list[QueueStatus]]:
    """The counts of these queues, or of all."""
    held_back: dict[str, list[HeldBack]] = {}
    for queue, *facts in (yield Step("circuit_list", {})):
        held_back.setdefault(queue, []).append(HeldBack(*facts))
    names = list(queues) if queues is not None else sorted({*(yield from queue_names()), *held_back})
    pauses = yield from paused()
    ages = yield from ageing()
    limited = {one.queue: one for one in (yield from limits(queues))}
    answer = []
    for name in names:
        rows = yield Step("queue_status", {"queue": name, "most": MOST})
        here = [pause for pause in pauses if pause.queue == name]
        counts = QueueStatus(name, *rows[0])
        until = [pause.until for pause in here if pause.task is None]
        answer.append(
            replace(
                counts,
                held_back=held_back.get(name, []),
                paused_until=until[0] if until else None,
                paused_tasks=[pause for pause in here if pause.task is not None],
                ageing=ages.get(name),
                limit=limited.get(name),
            )
        )
    return answer


def jobs(
    *,
    queue: str | None = None,
    task: str | None = None,
    state: str | None = None,
    ids: Sequence[int] | None = None,
    limit: int = 50,
) -> Op[list[LiveJob]]:
    """Live jobs in the order of their ids."""
    params = {"queue": queue, "task": task, "state": state, "ids": None if ids is None else Int8s(ids), "limit": limit}
    may_read = yield Step("payload_rights", {})
    rows = (yield Step("job_list", params)) if may_read[0][0] else (yield Step("job_list_bare", params))
    return [LiveJob(*row) for row in rows]


def workers() -> Op[list[WorkerStatus]]:
    """Every worker that has a row."""
    rows = yield Step("worker_list", {})
    return [WorkerStatus(*row) for row in rows]


def drained(queue: str) -> Op[bool]:
    """True when nothing is ready or running and no retry waits.

    A paused queue counts as drained, and so do parked lanes, jobs of paused tasks, and what waits behind those in its lane.
    """
    rows = yield Step("queue_drained", {"queue": queue})
    return bool(rows[0][0])

"""What workers do beside running jobs, as operations: done before the claims of run_jobs, and only then."""

from __future__ import annotations

from collections.abc import Sequence

from pgqueue.core import Core
from pgqueue.errors import ConfigurationError
from pgqueue.job import Job
from pgqueue.ops import Op
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import ageing as ageing_ops
from pgqueue.ops import claim as claim_ops
from pgqueue.ops import limit as limit_ops
from pgqueue.ops import replay as replay_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import result as result_ops
from pgqueue.ops import schedule as schedule_ops
from pgqueue.ops import status as status_ops
from pgqueue.ops import topic as topic_ops
from pgqueue.ops import unique as unique_ops

LEASE = 30.0
PIECES = 1000
"""Of a replay or an admission, at most: more would not be a test."""


def begin(app: Core) -> Op[None]:
    """What a worker writes when it starts: results that are kept, limits, subscriptions and schedules of the code."""
    yield from result_ops.declare({name: task.keeps for name, task in app.tasks.items()})
    yield from app.declare_limits_op()
    if app.code_subscriptions:
        yield from topic_ops.define(app.code_subscriptions, channel=None)
    if app.code_schedules:
        yield from schedule_ops.define(app.code_schedules)


def queues(app: Core) -> Op[list[str]]:
    """Those of the tasks, and those that hold something."""
    known = yield from status_ops.queue_names()
    return sorted({*known, *app.tasks.queues()})


def tick(app: Core, room: int) -> Op[tuple[bool, int]]:
    """Make the jobs of the schedules that are due: whether any was, and how many jobs; no further once there is no room."""
    ticked, made = False, 0
    names = list(app.code_schedules)
    while True:
        found = yield from schedule_ops.tick(names, channel=None)
        if found.failed:
            raise ConfigurationError("; ".join(f"schedule {name}: {why}" for name, why in found.failed.items()))
        ticked = ticked or bool(found.ticked)
        made += sum(len(one.ids) for one in found.ticked)
        if not found.ticked or made > room:
            return ticked, made


def replay() -> Op[bool]:
    """Deliver what topics hold back for subscriptions: replays, and messages that were committed late."""
    moved = False
    agenda = yield from replay_ops.agenda(now=True)
    for due in agenda.due:
        for _ in range(PIECES):
            turn = yield from replay_ops.turn(due.topic, channel=None)
            moved = moved or bool(turn.late) or turn.replayed is not None
            if turn.replayed is None:
                break
    return moved


def tend(app: Core, queue: str) -> Op[None]:
    """Take back, expire, let go on, promote and admit what is due in this queue."""
    archive = app.settings.archive
    yield from rescue_ops.rescue(queue, archive=archive)
    yield from app.expire_op(queue)
    yield from unique_ops.follow(queue, archive=archive)
    agenda = yield from rescue_ops.agenda(queue)
    if agenda.age_in is not None and agenda.age_in <= 0:
        yield from ageing_ops.age(queue)
    yield from rescue_ops.promote(queue, channel=None)
    mark = admission_ops.AdmissionMark(share=0)
    for _ in range(PIECES):
        admitted = yield from admission_ops.admit(queue, mark, room=1, channel=None)
        if not admitted.jobs and not admitted.more:
            return


def claim(queue: str, limit: int, *, left_out: Sequence[str] = ()) -> Op[list[Job]]:
    """Claim from the beginning of the line, within the limits of the queue."""
    mark = claim_ops.LowWater(share=0)
    if (yield from limit_ops.is_limited(queue)):
        granted = yield from limit_ops.claim(queue, limit, free=limit, lease=LEASE, low_water=mark, left_out=left_out)
        return granted.jobs
    return (yield from claim_ops.claim(queue, limit, lease=LEASE, low_water=mark, left_out=left_out))

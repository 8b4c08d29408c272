"""Priority ageing: a setting of a queue, and the batches in which maintenance moves jobs up."""

from __future__ import annotations

from datetime import timedelta

from pgqueue.config import validate_duration, validate_name
from pgqueue.ops import Op, Step

BATCH = 500
BATCHES = 10
"""Of a backlog so much is moved in one turn of maintenance; the rest comes in the next one."""
LEAST = 0.1


def set_ageing(queue: str, after: float | timedelta | None, *, channel: str | None) -> Op[None]:
    """Move what has waited for `after` up by one priority; None: nothing moves."""
    validate_name("queue", queue)
    return _set_ageing(queue, None if after is None else validate_duration("ageing", after, least=LEAST), channel)


def _set_ageing(queue: str, seconds: float | None, channel: str | None) -> Op[None]:
    yield Step("queue_set_ageing", {"queue": queue, "ageing": seconds, "channel": channel})


def ageing() -> Op[dict[str, float]]:
    """The queues whose priorities age, with the seconds."""
    rows = yield Step("ageing_list", {})
    return dict(rows)


def age(queue: str) -> Op[int]:
    """Begin a tick if it is time, and move what is to be moved, a bounded number; returns how many jobs moved up."""
    yield Step("ageing_tick", {"queue": queue})
    moved = 0
    for _ in range(BATCHES):
        rows = yield Step("job_age", {"queue": queue, "limit": BATCH})
        ids, level = rows[0] if rows else (None, None)
        moved += len(ids or ())
        if level is None:
            break
    return moved

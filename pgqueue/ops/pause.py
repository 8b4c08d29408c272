"""Pauses of queues and of tasks, with or without an end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from pgqueue.config import shown, validate_name
from pgqueue.errors import ConfigurationError
from pgqueue.ops import Op, Step
from pgqueue.retry import seconds as in_seconds


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in force: of a queue, or of one task of it. `until` None: it has no end."""

    queue: str
    task: str | None
    since: datetime | None
    until: datetime | None


def pause(
    queue: str, task: str | None, *, until: datetime | None, seconds: float | timedelta | None, channel: str | None
) -> Op[None]:
    """Stop claims from this queue, or of one task of it, on all workers: until it is resumed, or until the end."""
    validate_name("queue", queue)
    if task is not None:
        validate_name("task", task)
    if until is not None and seconds is not None:
        raise ConfigurationError("give until or seconds, not both")
    if until is not None and (not isinstance(until, datetime) or until.utcoffset() is None):
        raise ConfigurationError(f"until must be a datetime with a time zone, not {shown(until)}")
    return _pause(queue, task, until, None if seconds is None else in_seconds("seconds", seconds), channel)


def _pause(
    queue: str, task: str | None, until: datetime | None, seconds: float | None, channel: str | None
) -> Op[None]:
    params = {"queue": queue, "until": until, "seconds": seconds, "channel": channel}
    if task is None:
        yield Step("queue_pause", params)
    else:
        yield Step("queue_pause_task", {**params, "task": task})


def resume(queue: str, task: str | None, *, channel: str | None) -> Op[bool]:
    """Let claims go on; False when there was no pause to lift."""
    params = {"queue": queue, "channel": channel}
    if task is None:
        rows = yield Step("queue_resume", params)
    else:
        rows = yield Step("queue_resume_task", {**params, "task": task})
    return bool(rows)


def paused() -> Op[list[Pause]]:
    """Every pause in force."""
    rows = yield Step("pause_list", {})
    return [Pause(*row) for row in rows]

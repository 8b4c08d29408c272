"""Dead letters: list, redrive, purge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from pgqueue.ops import Int8s, Op, Step
from pgqueue.retry import seconds

BATCH = 1_000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that could not be done, with its reason and the errors of its last attempts (JSON texts).

    `hidden`: this database role may not read payloads, so the texts are None and the reason is empty.
    """

    id: int
    queue: str
    task: str
    args_json: str | None
    kwargs_json: str | None
    priority: int
    attempt: int
    max_attempts: int
    lost: int
    headers_json: str | None
    errors_json: str | None
    created_at: datetime | None
    reason: str
    died_at: datetime
    hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters: all, or those of a queue, of a task, of these ids."""

    queue: str | None = None
    task: str | None = None
    ids: Sequence[int] | None = None

    def params(self) -> dict[str, Any]:
        """The parameters that every dead letter statement shares."""
        return {"queue": self.queue, "task": self.task, "ids": None if self.ids is None else Int8s(self.ids)}


def dead_letters(selection: Selection, *, limit: int) -> Op[list[DeadLetter]]:
    """The newest dead letters of the selection."""
    params = {**selection.params(), "limit": limit}
    may_read = yield Step("payload_rights", {})
    rows = (yield Step("dead_list", params)) if may_read[0][1] else (yield Step("dead_list_bare", params))
    return [DeadLetter(*row) for row in rows]


class Redriven(list[int]):
    """The ids of the dead letters that are back in their queues; `skipped` are those that stay, since their unique key has a
    live job."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[int] = []


def redrive(selection: Selection, *, limit: int | None, channel: str | None) -> Op[Redriven]:
    """Back into their queues, oldest first, in batches; returns the ids."""
    moved = Redriven()
    after_at, after_id = "-infinity", -(2**63)
    while limit is None or len(moved) < limit:
        batch = BATCH if limit is None else min(BATCH, limit - len(moved))
        place = {"after_at": after_at, "after_id": after_id}
        rows = yield Step("dead_redrive", {**selection.params(), **place, "limit": batch, "channel": channel})
        for job_id, is_back, died_at, *_ in rows:
            (moved if is_back else moved.skipped).append(job_id)
            after_at, after_id = died_at, job_id
        if len(rows) < batch:
            break
    return moved


def purge(selection: Selection, *, older_than: float | timedelta) -> Op[int]:
    """Delete for good what died at least `older_than` ago (seconds or a timedelta), in batches; returns how many."""
    return _purge(selection, seconds("older_than", older_than))


def _purge(selection: Selection, older_than: float) -> Op[int]:
    purged = 0
    while True:
        rows = yield Step("dead_purge", {**selection.params(), "older_than": older_than, "limit": BATCH})
        purged += len(rows)
        if len(rows) < BATCH:
            return purged


def count(selection: Selection, *, older_than: float | timedelta = 0.0) -> Op[int]:
    """How many dead letters a purge or redrive of this selection would concern."""
    return _count(selection, seconds("older_than", older_than))


def _count(selection: Selection, older_than: float) -> Op[int]:
    rows = yield Step("dead_count", {**selection.params(), "older_than": older_than})
    return int(rows[0][0])

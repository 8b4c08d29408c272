"""Cancellation in bulk: a walk over all live jobs, in bounded steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgqueue.config import validate_name
from pgqueue.errors import ConfigurationError
from pgqueue.keys import CONCURRENCY, ORDERING, validate_key
from pgqueue.ops import Op, Step
from pgqueue.ops.settle import SettleOptions, cancellation

PAGE = 5_000
START = -(2**63)


class Cancelled(NamedTuple):
    """How many jobs ended at once, because they waited, and how many were asked to stop, because they run."""

    cancelled: int
    requested: int


class Found(NamedTuple):
    """How many live jobs a selection means: those that wait, and those that run."""

    waiting: int
    running: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSelection:
    """Which live jobs: those for which all of this is true. ConfigurationError for two keys of which a job has one, and for
    nothing at all unless `everything`."""

    queue: str | None = None
    task: str | None = None
    ordering_key: str | None = None
    concurrency_key: str | None = None
    unique_key: str | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        if self.queue is not None:
            validate_name("queue", self.queue)
        if self.task is not None:
            validate_name("task", self.task)
        keys = ("ordering_key", "concurrency_key", "unique_key")
        for name in keys:
            if getattr(self, name) is not None:
                validate_key(name, getattr(self, name))
        if self.ordering_key is not None and self.concurrency_key is not None:
            raise ConfigurationError("give ordering_key or concurrency_key, not both: a job has one of them at most")
        named = any(getattr(self, name) is not None for name in ("queue", "task", *keys))
        if named == bool(self.everything):
            raise ConfigurationError(
                "everything=True means all live jobs: leave out the rest"
                if named
                else "say which jobs: queue, task, ordering_key, concurrency_key, unique_key, or everything=True"
            )

    def params(self) -> dict[str, Any]:
        """What the walk is given."""
        lane = None
        if self.ordering_key is not None:
            lane = ORDERING + self.ordering_key
        elif self.concurrency_key is not None:
            lane = CONCURRENCY + self.concurrency_key
        return {"queue": self.queue, "task": self.task, "lane": lane, "unique_key": self.unique_key}


Piece = tuple[str, int, list[int]]
"""A queue, how many of these jobs run, and the ids."""


def cancel_selected(selection: LiveSelection, options: SettleOptions) -> Op[Cancelled]:
    """Cancel what the selection means of what is live now; each step is a statement of its own."""
    newest = (yield Step("job_newest", {}))[0][0]
    fates: Counter[str] = Counter()
    after: int | None = START
    while after is not None:
        pieces, after = yield from _page(selection, newest, after)
        for queue, _, ids in pieces:
            rows = yield cancellation(queue, ids, options)
            fates.update(row[1] for row in rows)
    return Cancelled(fates["cancelled"], fates["requested"])


def count_selected(selection: LiveSelection) -> Op[Found]:
    """How many live jobs a cancellation of the same selection would concern."""
    newest = (yield Step("job_newest", {}))[0][0]
    waiting = running = 0
    after: int | None = START
    while after is not None:
        pieces, after = yield from _page(selection, newest, after)
        running += sum(held for _, held, _ in pieces)
        waiting += sum(len(ids) - held for _, held, ids in pieces)
    return Found(waiting, running)


def _page(selection: LiveSelection, newest: int, after: int) -> Op[tuple[list[Piece], int | None]]:
    """What one step of the walk found, queue by queue, and where the next one begins; None at the end."""
    rows = yield Step("job_page", {**selection.params(), "newest": newest, "after": after, "limit": PAGE})
    pieces = sorted((queue, held, ids) for queue, held, _, ids in rows if ids is not None)
    [(looked_at, last)] = [(number, highest) for _, number, highest, ids in rows if ids is None]
    return pieces, last if looked_at == PAGE else None

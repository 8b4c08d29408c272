"""Admission: who of a lane stands in line. See admission.sql for the rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from pgqueue.ops import Op, Step, Stream, Texts

ROWS = 200
"""Rows of `admission` per transaction: so many lanes are locked at once, and other workers wait for them."""
FULL_PASS_EVERY = 1.0
LANES_PER_REPAIR = 1000


class AdmissionMark:
    """What one worker remembers of one queue: the last row it took. Dead rows before it, which an old snapshot keeps alive,
    are visited by a full pass only, once a second; that one finds what committed late."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._last = 0
        self._full_at = float("-inf")

    def after(self) -> int:
        """The row behind which to begin; 0 when a full pass is due."""
        now = self.clock()
        if now >= self._full_at:
            self._full_at = now + FULL_PASS_EVERY
            return 0
        return self._last

    def took(self, last: int | None) -> None:
        """Rows up to this one were taken."""
        if last is not None:
            self._last = last


class Admitted(NamedTuple):
    """How many `jobs` were given a place in line. `more`: rows were left for the next turn."""

    jobs: int
    more: bool


def admit(queue: str, mark: AdmissionMark, *, room: int, channel: str | None) -> Op[Admitted]:
    """Admit jobs of lanes in which something has changed, in a transaction of its own: never on a caller's connection.

    Others are told when more was admitted than the `room` that the caller has itself.
    """
    params = {"queue": queue, "after": mark.after(), "limit": ROWS}
    taken = yield Stream([Step("admission_begin", {}, silent=True), Step("admission_take", params)])
    lanes, last, rows, _ = taken[-1]
    if not lanes:
        yield Step("admission_commit", {}, silent=True)
        return Admitted(0, False)
    mark.took(last)
    shared = {"queue": queue, "lanes": Texts(lanes)}
    answer = yield Stream(
        [
            Step("lane_lock", shared),
            Step("lane_admit", {**shared, "room": room, "channel": channel}),
            Step("admission_commit", {}, silent=True),
        ]
    )
    return Admitted(int(answer[-1][0]), rows == ROWS)


def repair(queue: str) -> Op[int]:
    """Have lanes looked at that stand still although nothing stands in their way; returns how many."""
    after, stalled = "", 0
    last: str
    looked_at: int
    found: int
    while True:
        rows = yield Step("lane_repair", {"queue": queue, "after": after, "limit": LANES_PER_REPAIR})
        last, looked_at, found = rows[0]
        stalled += found
        if looked_at < LANES_PER_REPAIR:
            return stalled
        after = last


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A line of jobs that share a key. `kind`: "ordering", "concurrency" or "fairness". `width`: how many may be admitted at
    once, if an operator has said so. `admitted` are in line or in work, `blocked` wait for a slot (counted up to 10,000).
    `parked_by`: the dead letter that has stopped it."""

    kind: str
    key: str
    width: int | None
    parked_at: datetime | None
    parked_by: int | None
    admitted: int
    blocked: int


KINDS = {"o": "ordering", "c": "concurrency", "f": "fairness"}


def lanes(queue: str, *, limit: int) -> Op[list[LaneStatus]]:
    """The lanes of a queue: parked ones first."""
    rows = yield Step("lane_list", {"queue": queue, "limit": limit, "most": 10_000})
    return [LaneStatus(KINDS.get(lane[:1], "unknown"), lane[1:], *facts) for lane, *facts in rows]


def set_width(queue: str, lane: str, width: int | None, *, channel: str | None) -> Op[None]:
    """How many jobs of this lane may be admitted at once from now on; None: what its jobs say."""
    yield Step("lane_set", {"queue": queue, "lane": lane, "width": width, "channel": channel})


def resume(queue: str, lane: str, *, channel: str | None) -> Op[bool]:
    """Let a parked lane go on; False when it was not parked."""
    rows = yield Step("lane_resume", {"queue": queue, "lane": lane, "channel": channel})
    return bool(rows)

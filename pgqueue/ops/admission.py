"""Admission: who of a lane stands in line. See admission.sql for the rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import NamedTuple

from pgqueue.limit import Rate
from pgqueue.ops import Op, Step, Texts
from pgqueue.ops.claim import FULL_PASS_SHARE, LONGEST_PAUSE

ROWS = 64
"""Rows of `admission` per transaction, and so at most as many locks as a server has for each of its connections."""
JOBS_PER_ROW = 16
"""Jobs that are admitted per transaction, for each of its rows."""
FULL_PASS_EVERY = 1.0
LONGEST_BACK_OFF = 1.0
LANES_PER_REPAIR = 1000


class AdmissionMark:
    """What one worker remembers of one queue: the last row it took, and how many it may take at once.

    A hinted pass begins behind that row, and so does not visit the dead rows before it, which an old snapshot keeps alive. A
    pass from the start finds what committed late. It is due at the beginning, after a hinted pass that came up short, and at
    least once a second, but takes one part in `share` of the time at most. A caller that may never ask again passes 0: each
    of its passes is a full one, so that it is never told "nothing" while a lane could go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, share: int = FULL_PASS_SHARE) -> None:
        self.clock = clock
        self.share = share
        self.rows = ROWS
        self._last = 0
        self._owed = True
        self._full_end = float("-inf")
        self._cost = 0.0
        self._refused = 0
        self._not_before = float("-inf")
        self._again_at = float("inf")

    def after(self) -> int:
        """The row behind which to begin; 0 for a full pass."""
        if self.clock() >= self._again_at:
            self._again_at, self._owed = float("inf"), True
        if self.share and self._full_pass_in() > 0:
            return self._last
        self._owed = False
        return 0

    def owed_in(self) -> float | None:
        """Seconds until there is to be looked again, unasked; None when that is not necessary."""
        ahead = [self._full_pass_in()] if self._owed else []
        if self._again_at < float("inf"):
            ahead.append(self._again_at - self.clock())
        return max(0.0, min(ahead)) if ahead else None

    def look_again_in(self, seconds: float | None) -> None:
        """A lane of the last pass waits for a token: whoever knows of it looks by itself."""
        if seconds is not None:
            self._again_at = min(self._again_at, self.clock() + seconds)

    def took(self, last: int | None, *, full: bool, short: bool, refused: bool, began: float) -> None:
        """Learn from a pass: the last row that it saw, whether it was full, whether it saw less rows than it might have
        taken, whether others were at some of its lanes."""
        now = self.clock()
        if full:
            self._full_end, self._cost = now, now - began
        elif short:
            self._owed = True
        if last is not None:
            self._last = last
        self._refused = self._refused + 1 if refused else 0
        if refused:
            self._owed = True
            self._not_before = now + min(LONGEST_BACK_OFF, 0.005 * 2.0 ** min(self._refused, 10))

    def worked(self) -> None:
        """An admission came to its end: a little more at once."""
        self.rows = min(ROWS, self.rows + 1)

    def failed(self) -> None:
        """One that takes longer than its caller waits would never succeed: less at once."""
        self.rows = max(1, self.rows // 2)

    def _full_pass_in(self) -> float:
        pause = min(self.share * self._cost, LONGEST_PAUSE)
        at = self._full_end + (pause if self._owed else max(FULL_PASS_EVERY, pause))
        return max(at, self._not_before) - self.clock()


class Admitted(NamedTuple):
    """How many `jobs` were given a place in line. `more`: something was left for the next turn."""

    jobs: int
    more: bool


def admit(queue: str, mark: AdmissionMark, *, room: int, channel: str | None) -> Op[Admitted]:
    """Admit jobs of lanes in which something has changed, in a transaction of its own: never on a caller's connection.

    It waits for nobody: lanes that somebody else is at are left for a later turn. Others are told when more was admitted
    than the `room` that the caller has itself.
    """
    try:
        return (yield from _admit(queue, mark, room, channel))
    except Exception:
        mark.failed()
        raise


def _admit(queue: str, mark: AdmissionMark, room: int, channel: str | None) -> Op[Admitted]:
    began, after, limit = mark.clock(), mark.after(), mark.rows
    params = {"queue": queue, "after": after, "limit": limit}
    # One by one and never in a pipeline: what a client that is frozen has sent of one runs and keeps its locks, and while
    # the server waits for the rest no timeout of a session that is idle in a transaction ends that.
    yield Step("admission_begin", {}, silent=True)
    taken = yield Step("admission_take", params)
    lanes, last, rows, refused = taken[-1][:4]
    mark.took(last, full=after == 0, short=rows < limit, refused=refused > 0, began=began)
    if not lanes:
        yield Step("admission_commit", {}, silent=True)
        return Admitted(0, rows == limit and not refused)
    most = max(1, limit * JOBS_PER_ROW // len(lanes))
    chosen = {"queue": queue, "lanes": Texts(lanes), "most": most, "room": room, "channel": channel}
    answer = yield Step("lane_admit", chosen)
    yield Step("admission_commit", {}, silent=True)
    jobs, cut_short, again_in = answer[-1][:3]
    mark.worked()
    mark.look_again_in(again_in)
    return Admitted(int(jobs), cut_short or (rows == limit and not refused))


def repair(queue: str) -> Op[int]:
    """Have lanes looked at that stand still although nothing stands in their way; returns how many."""
    begin: str | None = ""
    stalled = 0
    while begin is not None:
        part = yield from repair_part(queue, begin)
        stalled, begin = stalled + part.stalled, part.next
    return stalled


class Repaired(NamedTuple):
    """How many lanes are looked at again, and where the next part begins; None: that was the last one."""

    stalled: int
    next: str | None


def repair_part(queue: str, begin: str) -> Op[Repaired]:
    """The same for so many lanes, from this one on; the empty text is before all others."""
    rows = yield Step("lane_repair", {"queue": queue, "begin": begin, "limit": LANES_PER_REPAIR})
    last, looked_at, stalled = rows[0]
    # No text stands between these two in the order of bytes.
    return Repaired(stalled, last + "\x01" if looked_at == LANES_PER_REPAIR else None)


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """A line of jobs that share a key. `kind`: "ordering", "concurrency" or "fairness". `width`: how many may be admitted at
    once, if an operator has said so; `rate`: how many a second, `burst`: how many at a moment. `admitted` are in line or in
    work, `blocked` wait for a slot (counted up to 10,000). `parked_by`: the dead letter that has stopped it."""

    kind: str
    key: str
    width: int | None
    rate: float | None
    burst: int | None
    parked_at: datetime | None
    parked_by: int | None
    admitted: int
    blocked: int


KINDS = {"o": "ordering", "c": "concurrency", "f": "fairness"}


def lanes(queue: str, *, limit: int) -> Op[list[LaneStatus]]:
    """The lanes of a queue: parked ones first."""
    rows = yield Step("lane_list", {"queue": queue, "limit": limit, "most": 10_000})
    return [LaneStatus(KINDS.get(lane[:1], "unknown"), lane[1:], *facts) for lane, *facts in rows]


def set_limit(queue: str, lane: str, width: int | None, rate: Rate | None, *, channel: str | None) -> Op[None]:
    """How many jobs of this lane may be admitted at once from now on (None: what its jobs say), and how often."""
    pace = {"rate": None, "burst": None} if rate is None else asdict(rate)
    yield Step("lane_set", {"queue": queue, "lane": lane, "width": width, **pace, "channel": channel})


def resume(queue: str, lane: str, *, channel: str | None) -> Op[bool]:
    """Let a parked lane go on; False when it was not parked."""
    rows = yield Step("lane_resume", {"queue": queue, "lane": lane, "channel": channel})
    return bool(rows)

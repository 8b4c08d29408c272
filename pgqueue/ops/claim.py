"""Claim, with the low-water hint that keeps its cost flat, and the extension of leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from pgqueue.job import Job
from pgqueue.ops import Int8s, Op, Step, Texts

LOWEST = -(2**15)
HIGHEST = 2**15 - 1
START = -(2**63)
FULL_PASS_SHARE = 20
"""A full pass may take one twentieth of the time at most, however many dead rows stand at the head of the line."""

LONGEST_PAUSE = 5.0
"""But a pass that was slow by accident must not hide for minutes what came back to its old place."""

Span = tuple[int, int, int]


class LowWater:
    """What one claimer remembers of one queue: per priority, the position of the last job it claimed.

    A hinted pass starts behind these positions and so does not visit the dead rows of finished jobs, which an old snapshot
    anywhere in the database can keep alive by the hundred thousand. A full pass from the start finds what the hint hides:
    late commits and jobs that came back to their old place. It is due at the beginning, when a hinted pass came up short or
    a notification came (but then not before twenty times its own duration has passed since the last), and at least every
    `max(1 s, 20 × its last duration)`. A claimer that comes back by itself passes `share` 20; one that may never ask again
    passes 0, so that it is never told "nothing" while something is ready.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, share: int = FULL_PASS_SHARE) -> None:
        self.clock = clock
        self.share = share
        self._marks: dict[int, int] = {}
        self._owed = True
        self._last_end = float("-inf")
        self._last_cost = 0.0

    def spans(self) -> list[Span] | None:
        """The ranges of a hinted pass, highest priority first; None when a full pass is due."""
        if self._full_pass_in(self.clock()) <= 0:
            # Paid with the pass that begins now: what is notified while it runs is owed anew.
            self._owed = False
            return None
        spans: list[Span] = []
        top = HIGHEST
        for priority, position in sorted(self._marks.items(), reverse=True):
            if priority < top:
                spans.append((priority + 1, top, START))
            spans.append((priority, priority, position))
            top = priority - 1
        if top >= LOWEST:
            spans.append((LOWEST, top, START))
        return spans

    def notified(self) -> None:
        """Something may stand before the marks: a full pass is owed."""
        self._owed = True

    def owed_in(self) -> float | None:
        """Seconds until an owed full pass may run; None when none is owed."""
        return max(0.0, self._full_pass_in(self.clock())) if self._owed else None

    def observe(self, jobs: Sequence[Job], *, full: bool, short: bool, began: float) -> None:
        """Learn from a pass: what it brought, whether it was full, whether it brought less than was asked."""
        if full:
            self._last_end = self.clock()
            self._last_cost = self._last_end - began
        elif short:
            self._owed = True
        # Of each priority the last one stays. Down as well as up: after a full pass the next one goes on where it stopped.
        self._marks.update(zip(map(_priority, jobs), map(_position, jobs), strict=True))

    def _full_pass_in(self, now: float) -> float:
        pause = min(self.share * self._last_cost, LONGEST_PAUSE)
        return self._last_end + (pause if self._owed else max(1.0, pause)) - now


def claim(
    queue: str,
    limit: int,
    *,
    lease: float,
    low_water: LowWater,
    left_out: Sequence[str] = (),
    worker_id: int | None = None,
    relaxed: bool = False,
) -> Op[list[Job]]:
    """Claim up to `limit` ready jobs under new leases of `lease` seconds; in the order in which they should run.

    Jobs of the tasks in `left_out` stay where they are.
    """
    taken: list[Job] = []
    passes = 0
    while len(taken) < limit:
        spans = low_water.spans()
        wanted = limit - len(taken)
        began = low_water.clock()
        params = looks_at(queue, wanted, lease, worker_id, spans, left_out)
        try:
            rows = yield Step("job_claim", {**params, "relaxed": relaxed})
        except Exception:
            if taken and relaxed:
                break  # what the first pass claimed is committed: it must reach its caller
            raise
        passes += 1
        jobs = in_line(list(map(Job._make, rows)))
        low_water.observe(jobs, full=spans is None, short=len(jobs) < wanted, began=began)
        taken.extend(jobs)
        if spans is None or low_water.owed_in() != 0:
            break
    return in_line(taken) if passes > 1 else taken


def looks_at(
    queue: str, limit: int, lease: float, worker_id: int | None, spans: list[Span] | None, left_out: Sequence[str]
) -> dict[str, Any]:
    """What the statements that claim are given; `spans` None for a full pass."""
    floors, ceilings, after = zip(*(spans or [(LOWEST, HIGHEST, START)]), strict=True)
    return {
        "queue": queue,
        "limit": limit,
        "lease": lease,
        "worker_id": worker_id,
        "floors": Int8s(floors),
        "ceilings": Int8s(ceilings),
        "after": Int8s(after),
        "left_out": Texts(left_out),
    }


_priority, _position = attrgetter("priority"), attrgetter("position")


def in_line(jobs: list[Job]) -> list[Job]:
    """These, put into the order of the line, since RETURNING promises none. By two stable sorts, which call no Python."""
    jobs.sort(key=_position)
    jobs.sort(key=_priority, reverse=True)
    return jobs


def extend(queue: str, pairs: Iterable[tuple[int, int]], *, lease: float) -> Op[set[int]]:
    """Move the end of the leases of these (id, token) pairs, each id once; returns the ids that are still held."""
    ids, tokens = zip(*sorted(pairs), strict=True)  # the statement finds the token of an id by binary search
    rows = yield Step(
        "lease_extend",
        {
            "queue": queue,
            "lease": lease,
            "ids": Int8s(ids),
            "tokens": Int8s(tokens),
            "leases": Int8s(sorted(set(tokens))),
        },
    )
    return set(rows[0][0] or ())

"""Jobs that their handlers settled themselves, until the database says what became of that.

A transaction that holds the row of such a job may stay open for long: nobody waits for it. It is looked at again, less and
less often, while the heartbeat keeps the lease.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pgqueue.outcome import Outcome
from pgqueue.worker.ledger import Held

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
BATCH = 500


class Doubt(NamedTuple):
    """`outcome` holds only if the handler's own settling has not become true. `error` is the class of what it raised, None
    where it returned. `counts`: what becomes of it is to be learned from; of the jobs of one call only the first is."""

    held: Held
    outcome: Outcome
    error: str | None
    counts: bool = True


class Doubts:
    """`add` from any thread; everything else belongs to the settler."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._new: deque[Doubt] = deque()
        self._waiting: list[tuple[float, float, Doubt]] = []

    def __len__(self) -> int:
        return len(self._new) + len(self._waiting)

    def add(self, doubt: Doubt) -> None:
        """To be looked at now."""
        self._new.append(doubt)

    def due_in(self) -> float:
        """Seconds until one is to be looked at; infinity where there is none."""
        if self._new:
            return 0.0
        first = min((at for at, _, _ in self._waiting), default=math.inf)
        return max(0.0, first - self._clock())

    def due(self) -> dict[str, list[Doubt]]:
        """Those to be looked at now, by queue. They stay until `settled` or `still_open` is called with them."""
        while self._new:
            self._waiting.append((-math.inf, FIRST_PAUSE, self._new.popleft()))
        now = self._clock()
        by_queue: dict[str, dict[int, Doubt]] = {}
        for at, _, doubt in self._waiting:
            # One id once: the statement finds the token of an id by its place.
            some = by_queue.setdefault(doubt.held.job.queue, {})
            if at <= now and len(some) < BATCH:
                some.setdefault(doubt.held.job.id, doubt)
        return {queue: [some[job_id] for job_id in sorted(some)] for queue, some in by_queue.items() if some}

    def settled(self, doubts: Sequence[Doubt]) -> None:
        """These are known."""
        known = set(map(id, doubts))
        self._waiting = [entry for entry in self._waiting if id(entry[2]) not in known]

    def still_open(self, doubts: Sequence[Doubt]) -> None:
        """These are not: look again later."""
        known = set(map(id, doubts))
        now = self._clock()
        self._waiting = [
            (now + pause, min(LONGEST_PAUSE, pause * 2), doubt) if id(doubt) in known else (at, pause, doubt)
            for at, pause, doubt in self._waiting
        ]

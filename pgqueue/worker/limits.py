"""What a worker knows of the limits of its queues, and when it is worth asking again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgqueue.limit import Limit
from pgqueue.ops.limit import RUNNING, Granted

AGAIN = 0.25
"""Seconds between questions while the slots of a queue are taken: others settle jobs without telling us."""
BUSY, LONGEST_BUSY = 0.001, 0.1
"""Seconds until the next question where somebody else was claiming: the first time, and the longest."""
CALM = 60.0
"""A limit that has not bound for so many seconds begins to bind anew."""
LOOK = 1.0
"""Seconds between looks at whether anything waits at all, while a limit leaves no room."""


@dataclass(slots=True)
class _Queue:
    limit: Limit
    settles: int = 0
    bound: str | None = None
    busy: int = 0
    not_before: float = 0.0
    look_at: float = 0.0
    told_until: float = 0.0


class Limits:
    """Thread-safe: maintenance learns the limits, the claimer asks, the settler says when jobs of ours have ended.

    Wrong for a moment it does no harm: a plain claim brings nothing of a limited queue, and a claim within limits all there
    is of one that is not.
    """

    def __init__(self, queues: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._queues = {queue: _Queue(Limit()) for queue in queues}

    def learn(self, queue: str, limit: Limit) -> bool:
        """What the database says; True where that is new, and worth a look now."""
        known = self._queues[queue]
        with self._lock:
            if known.limit == limit:
                return False
            known.limit = limit
            known.not_before = known.look_at = known.told_until = 0.0
            return True

    def limit(self, queue: str) -> Limit | None:
        """What this queue is limited to; None where it is not."""
        limit = self._queues[queue].limit
        return limit if limit != Limit() else None

    def open(self, queue: str) -> bool:
        """Whether a claim may bring something, as far as is known here."""
        return self._queues[queue].not_before <= self.clock()

    def due_in(self) -> float | None:
        """Seconds until the next queue that had no room is to be asked again; None when there is none."""
        now = self.clock()
        return min((one.not_before - now for one in self._queues.values() if one.not_before > now), default=None)

    def settled(self, queue: str) -> bool:
        """Jobs of ours have ended; True where their slots may be used now."""
        known = self._queues.get(queue)
        if known is None or known.limit.running is None:
            return False
        with self._lock:
            known.settles += 1
            if known.bound != RUNNING or not known.not_before:
                return False
            known.not_before = 0.0
            return True

    def full(self, queue: str) -> bool:
        """Whether the last claim has taken the last slot."""
        return self._queues[queue].bound == RUNNING

    def settles(self, queue: str) -> int:
        """To be read before a claim, for `after`."""
        return self._queues[queue].settles

    def after(self, queue: str, granted: Granted, settles: int) -> bool:
        """A claim has come back. Where no room was left, the queue is not asked again before that is worth it; True where
        that is now, because jobs of ours have ended since the claim began: `settled` could not know that they matter."""
        known = self._queues[queue]
        with self._lock:
            known.busy = known.busy + 1 if granted.busy else 0
            if granted.busy:
                known.not_before = self.clock() + min(BUSY * 2.0**known.busy, LONGEST_BUSY) * random.uniform(0.5, 1.0)
                return False
            known.bound = granted.bound
            known.not_before = 0.0
            if granted.bound == RUNNING and known.settles != settles:
                return True
            if granted.bound is not None:
                known.not_before = self.clock() + (granted.wait or AGAIN * random.uniform(0.8, 1.2))
            return False

    def begins(self, queue: str, waits: Callable[[], bool]) -> bool:
        """Whether the limit binds now and did not a while ago. `waits`: whether any job does; asked now and then."""
        known, now = self._queues[queue], self.clock()
        if known.bound is None:
            return False
        began = now >= known.told_until
        if began:
            if now < known.look_at:
                return False
            known.look_at = now + LOOK
            if not waits():
                return False
        known.told_until = now + CALM
        return began

"""Schedules, by every worker: whoever looks first makes the jobs of a tick."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

from pgqueue.core import Core
from pgqueue.events import EventName
from pgqueue.ops import Op
from pgqueue.ops import schedule as ops
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop

T = TypeVar("T")
PERIOD, QUIET_PERIOD = 1.0, 5.0
"""Seconds between looks at most; the longer one while notifications come through, since every change is announced."""
PASSED, FAILED = 0.25, 60.0
"""Seconds for which a schedule is left alone that somebody else holds, or that cannot be read here."""
FORGET_EVERY = 3600.0
APART = 0.005
"""Workers do not look at the very same moment: the second then finds it done, and asks one statement only."""


class Ticker(Loop):
    """Sleeps until the next tick, by the database's clock; writes what the code says of schedules at its start, and makes
    sure of it now and then. On the worker's control connection: it needs a few milliseconds of it, at a tick."""

    name: ClassVar[str] = "schedules"

    def __init__(
        self,
        link: Link,
        lock: threading.Lock,
        app: Core,
        *,
        wake: Callable[[], None],
        hearing: Callable[[], bool],
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(app.events, fatal)
        self.link = link
        self.lock = lock
        self.definitions = dict(app.code_schedules)
        self.channel = app.channel
        self.wake = wake
        self.hearing = hearing
        self._poked = threading.Event()
        self._define_at = 0.0
        self._forget_at = time.monotonic() + random.uniform(0.0, FORGET_EVERY)
        self._left_out: dict[str, float] = {}

    def turn(self) -> None:
        """Tick what is due, then wait for the next tick or the period, whichever is first."""
        self._poked.clear()
        self._now_and_then()
        now = time.monotonic()
        self._left_out = {name: until for name, until in self._left_out.items() if until > now}
        found = self._ask(ops.tick(list(self.definitions), left_out=list(self._left_out), channel=self.channel))
        self._tell(found)
        self._poked.wait(self._rest(found))

    def poke(self) -> None:
        """Look now: a schedule was added or changed."""
        self._poked.set()

    def stop(self) -> None:
        """End after the turn under way."""
        super().stop()
        self._poked.set()

    def _ask(self, op: Op[T]) -> T:
        with self.lock:
            return self.link.run(op)

    def _rest(self, found: ops.Round) -> float:
        if found.next_in is not None and found.next_in <= 0:
            return 0.0 if found.ticked or found.passed or found.failed else APART
        period = (QUIET_PERIOD if self.hearing() else PERIOD) * random.uniform(0.8, 1.0)
        due = [] if found.next_in is None else [found.next_in + random.uniform(0.0, APART)]
        again = [until - time.monotonic() for until in self._left_out.values()]
        return max(0.001, min([period, *due, *again]))

    def _tell(self, found: ops.Round) -> None:
        now = time.monotonic()
        self._left_out.update(dict.fromkeys(found.passed, now + PASSED))
        for name, detail in found.failed.items():
            self._left_out[name] = now + FAILED
            self.events.emit(EventName.SCHEDULE_FAILED, schedule=name, detail=detail, retry_in=FAILED)
        for ticked in found.ticked:
            about = {"schedule": ticked.name, "task": ticked.task}
            if ticked.tick is not None:
                tick = ticked.tick.isoformat()
                self.events.emit(EventName.SCHEDULE_TICKED, **about, ids=ticked.ids, tick=tick, late=ticked.late)
            for reason, count in (("missed", ticked.missed), ("overlap", ticked.overlapping)):
                if count:
                    self.events.emit(EventName.SCHEDULE_SKIPPED, **about, count=count, reason=reason)
        if found.ticked:
            self.wake()

    def _now_and_then(self) -> None:
        now = time.monotonic()
        if self.definitions and now >= self._define_at:
            written = self._ask(ops.define(self.definitions))
            self._define_at = now + ops.AFFIRM_EVERY * random.uniform(0.8, 1.0)
            if written:
                self.events.emit(EventName.SCHEDULE_DEFINED, names=written)
        if now >= self._forget_at:
            self._forget_at = now + FORGET_EVERY * random.uniform(0.8, 1.0)
            self._ask(ops.forget())

"""Timeouts of plain functions: who goes on past them, and what is done about it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from pgqueue.events import Bus
from pgqueue.worker.loop import Loop
from pgqueue.worker.threads import ThreadRunner

LONGEST_SLEEP = 3600.0


class Timeouts(Loop):
    """Sleeps until the first timeout; jobs without one cost nothing. `too_many` is called once, with their number, when more
    threads are stuck than can be replaced."""

    name: ClassVar[str] = "timeouts"

    def __init__(
        self,
        threads: ThreadRunner,
        events: Bus,
        *,
        too_many: Callable[[int], None],
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.threads = threads
        self.too_many = too_many
        self._said = False
        self._asked = threading.Event()
        self._next = math.inf
        threads.limit = self.watch

    def watch(self, deadline: float) -> None:
        """A job began that may run until then; from any thread, and without a lock where the sleep ends before anyway."""
        if deadline < self._next:
            self._asked.set()

    def turn(self) -> None:
        """Replace what is stuck, then sleep until the next timeout."""
        self._asked.clear()
        if self.stopping.is_set():
            return
        self._next = math.inf  # in this order: who begins between the look and the sleep finds infinity, and rings
        stuck = self.threads.replace_stuck(time.monotonic())
        if stuck > self.threads.concurrency and not self._said:
            self._said = True
            self.too_many(stuck)
        self._next = self.threads.first_deadline()
        self._asked.wait(min(LONGEST_SLEEP, max(0.0, self._next - time.monotonic())))

    def stop(self) -> None:
        """End now."""
        super().stop()
        self._asked.set()

"""The fence: a lease that was not renewed in time is given up at its end, whatever the database or the network does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from pgqueue.events import Bus, EventName
from pgqueue.worker.ledger import Held, Ledger
from pgqueue.worker.loop import Loop

LOOKS_PER_LEASE = 4


class Fence(Loop):
    """Sleeps until the first lease ends. It has a thread of its own and touches no connection: the heartbeat may hang in a
    round trip or wait between two tries at the very moment when the lease ends."""

    name: ClassVar[str] = "fence"

    def __init__(
        self,
        ledger: Ledger,
        events: Bus,
        lease: float,
        *,
        tell: Callable[[Held], None],
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.ledger = ledger
        self.tell = tell
        # A claim is answered within a third of its lease, or half a second: at this pace its end is seen beforehand.
        self.pace = lease / LOOKS_PER_LEASE
        self._stop = threading.Event()

    def turn(self) -> None:
        """Give up what has ended; then wait for the next end, or for leases that this wait does not know."""
        self._tell(self.ledger.lose_expired(time.monotonic()), "not renewed in time")
        self._stop.wait(max(0.0, min(self.pace, self.ledger.first_deadline() - time.monotonic())))

    def stop(self) -> None:
        """End now."""
        super().stop()
        self._stop.set()

    def lose(self, tokens: Sequence[int], why: str) -> None:
        """These leases are not ours any more: nothing of them is started or settled, and handlers are told."""
        self._tell(self.ledger.lose(tokens), why)

    def _tell(self, lost: Sequence[Held], why: str) -> None:
        for held in lost:
            if held.current is not None:
                held.current.cancel()
            self.tell(held)
        if lost:
            self.events.emit(EventName.LEASE_LOST, ids=[held.job.id for held in lost], during=why)

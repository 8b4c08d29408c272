"""The listener: turns NOTIFY into wake-ups. A notification is a hint: what it says is never trusted, only looked into."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from psycopg import sql

from pgqueue.events import Bus
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop

SLICE = 0.5
PROBE_EVERY = 30.0
CANCEL = "cancel "


class Listener(Loop):
    """LISTENs on the schema's channel; after every (re)connection it wakes the claimer once, unasked: notifications of the
    gap are gone."""

    name: ClassVar[str] = "listen"

    def __init__(
        self,
        link: Link,
        channel: str,
        queues: frozenset[str],
        events: Bus,
        wake: Callable[[], None],
        cancelled: Callable[[], None],
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.link = link
        self.channel = channel
        self.queues = queues
        self.wake = wake
        self.cancelled = cancelled
        self._listening = False
        self._probed = 0.0

    def turn(self) -> None:
        """Wait for notifications for a while."""
        connection = self.link.connection()
        if not self._listening:
            with self.link.watchdog.watching(connection, self.link.deadline):
                connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
            self._listening = True
            self._probed = time.monotonic()
            self.wake()
        for notification in connection.notifies(timeout=SLICE, stop_after=1):
            if notification.payload in self.queues:
                self.wake()
            elif notification.payload.removeprefix(CANCEL) in self.queues:
                self.cancelled()
        if time.monotonic() - self._probed > PROBE_EVERY:
            # A connection that a firewall dropped silently looks like a quiet one.
            with self.link.watchdog.watching(connection, self.link.deadline):
                connection.execute("SELECT 1")
            self._probed = time.monotonic()

    def give_up(self) -> None:
        """Listen anew on the next connection."""
        self._listening = False
        self.link.close()

    def finish(self) -> None:
        """Close the connection."""
        self.link.close()

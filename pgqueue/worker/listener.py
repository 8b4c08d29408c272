"""The listener: turns NOTIFY into wake-ups. A notification is a hint: what it says is never trusted, only looked into."""

from __future__ import annotations

import dataclasses
import functools
import selectors
import socket
import time
from collections.abc import Callable
from typing import ClassVar

from psycopg import sql

from pgqueue.drivers.execute import SyncConnection
from pgqueue.events import Bus
from pgqueue.ops.schedule import NOTICE
from pgqueue.ops.topic import NOTICE as TOPICS_NOTICE
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop

PROBE_EVERY = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ears:
    """What a listener does with what it hears: jobs are ready, due soon, to be cancelled, a lane has changed, schedules were
    changed, there is something to replay; or it is our own hello."""

    ready: Callable[[], None]
    due: Callable[[], None]
    keys: Callable[[str], None]
    cancelled: Callable[[], None]
    say_hello: Callable[[], None]
    schedules: Callable[[], None]
    topics: Callable[[], None]


class Listener(Loop):
    """LISTENs on the schema's channel; after every (re)connection it wakes everybody once, unasked: notifications of the gap
    are gone.

    `hearing` is true once our own hello, sent over another connection, has come back. Through a pooler in transaction mode
    LISTEN succeeds and nothing ever comes; the polls must then stay frequent.
    """

    name: ClassVar[str] = "listen"

    def __init__(
        self,
        link: Link,
        channel: str,
        queues: frozenset[str],
        worker_id: int,
        events: Bus,
        ears: Ears,
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.link = link
        self.channel = channel
        self.ears = ears
        self.hearing = False
        self._meanings: dict[str, Callable[[], None]] = {
            **{f"cancel {queue}": ears.cancelled for queue in queues},
            **{f"due {queue}": ears.due for queue in queues},
            **{f"key {queue}": functools.partial(ears.keys, queue) for queue in queues},
            f"hello {worker_id}": self._heard,
            NOTICE: ears.schedules,
            TOPICS_NOTICE: ears.topics,
            **dict.fromkeys(queues, ears.ready),
        }
        self._listening = False
        self._probed = 0.0
        self._bell, self._rope = socket.socketpair()

    def stop(self) -> None:
        """End now; a second call does nothing."""
        if not self.stopping.is_set():
            super().stop()
            self._rope.close()  # which the other end can be read for

    def turn(self) -> None:
        """Hear what has come, or wait for more."""
        connection = self.link.connection()
        if not self._listening:
            self._begin(connection)
        heard = False
        for notification in connection.notifies(timeout=0):
            heard = True
            meaning = self._meanings.get(notification.payload)
            if meaning is not None:
                meaning()
        if time.monotonic() - self._probed > PROBE_EVERY:
            # A connection that a firewall dropped silently looks like a quiet one.
            self._execute(connection, sql.SQL("SELECT 1"))
        elif not heard and self.started.is_set():
            self._wait(connection)

    def _wait(self, connection: SyncConnection) -> None:
        # Not in psycopg, which looks up ten times a second while it waits.
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._bell, selectors.EVENT_READ)
            selector.select(max(0.0, self._probed + PROBE_EVERY - time.monotonic()) + 0.001)

    def give_up(self) -> None:
        """Listen anew on the next connection."""
        self._listening = self.hearing = False
        self.link.close()

    def finish(self) -> None:
        """Close the connection."""
        self.hearing = False
        self.link.close()
        self._bell.close()

    def _begin(self, connection: SyncConnection) -> None:
        self._execute(connection, sql.SQL("LISTEN {}").format(sql.Identifier(self.channel)))
        self._listening = True
        self.ears.say_hello()
        self.ears.ready()
        self.ears.due()
        self.ears.schedules()
        self.ears.topics()

    def _execute(self, connection: SyncConnection, statement: sql.SQL | sql.Composed) -> None:
        with self.link.watchdog.watching(connection, self.link.deadline):
            connection.execute(statement)
        self._probed = time.monotonic()

    def _heard(self) -> None:
        self.hearing = True

"""A control loop's own connection: reopened when it breaks, and cut when a round trip takes too long.

libpq waits for an answer without end. The watchdog shuts the socket down when the deadline of a round trip has passed,
which ends the wait with an error in the thread that waits; a frozen server or a silent firewall cannot hang a loop. A
connection that does not come about is given up in the same time, but for the two seconds that libpq waits at least.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psycopg

from pgqueue.config import Settings
from pgqueue.drivers.execute import SyncConnection, run
from pgqueue.drivers.pool import choose_preparing, connect_options, database_url, unavailable
from pgqueue.ops import Op

T = TypeVar("T")
LONGEST_SLEEP = 60.0
LIBPQ_LEAST = 2


class Watchdog:
    """One thread that watches the round trips of all links of a worker; it sleeps until the first deadline."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: dict[int, tuple[float, int]] = {}
        self._sleeps_until = 0.0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="pgqueue-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; a second call does nothing."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    @contextmanager
    def watching(self, connection: SyncConnection, seconds: float) -> Iterator[None]:
        """Cut `connection` unless the block ends within `seconds`."""
        key = id(connection)
        deadline = time.monotonic() + seconds
        with self._changed:
            self._watched[key] = (deadline, connection.fileno())
            if deadline < self._sleeps_until:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._watched.pop(key, None)

    def _run(self) -> None:
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                for key in [key for key, (deadline, _) in self._watched.items() if deadline <= now]:
                    # Under the lock the block has not ended, so the descriptor is still this connection's.
                    self._cut(self._watched.pop(key)[1])
                # Nearly every deadline has passed unneeded when it comes: one sleep covers a thousand round trips.
                self._sleeps_until = min(
                    (deadline for deadline, _ in self._watched.values()), default=now + LONGEST_SLEEP
                )
                self._changed.wait(max(0.0, self._sleeps_until - now))

    @staticmethod
    def _cut(descriptor: int) -> None:
        # Not os.dup, which knows no sockets on Windows. The family does not matter to a shutdown.
        with suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


class Link:
    """A connection that belongs to one thread."""

    def __init__(self, settings: Settings, watchdog: Watchdog, deadline: float, *, url: str | None = None) -> None:
        self.settings = settings
        self.watchdog = watchdog
        self.deadline = deadline
        self.pooled = False
        self._url = url
        self._connection: SyncConnection | None = None

    def connection(self) -> SyncConnection:
        """The open connection, opened now if need be; DatabaseUnavailable when it cannot be."""
        if self._connection is None or self._connection.closed:
            url = self._url or database_url(self.settings)
            options = connect_options(self.settings, url)
            options["connect_timeout"] = min(options["connect_timeout"], max(LIBPQ_LEAST, math.ceil(self.deadline)))
            with unavailable(self.settings):
                connection = psycopg.connect(url, **options)
                try:
                    with self.watchdog.watching(connection, self.deadline):
                        self.pooled = choose_preparing(connection, self.settings)
                except BaseException:
                    connection.close()
                    raise
                self._connection = connection
        return self._connection

    def run(self, op: Op[T]) -> T:
        """Run one operation; the connection is given up after any error of it, since its state is not known then."""
        connection = self.connection()
        try:
            with self.watchdog.watching(connection, self.deadline):
                return run(connection, op, self.settings.schema)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; the next use opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                connection.close()

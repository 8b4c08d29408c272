"""Hearing that jobs have ended, for all in this process that wait for some: one thread, one connection.

Both are there only while somebody waits, and a little longer. What is heard is a hint: whoever waits also looks by itself.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg
from psycopg import sql

from pgqueue.config import Settings
from pgqueue.drivers.execute import SyncConnection
from pgqueue.drivers.pool import choose_preparing, connect_options, database_url
from pgqueue.errors import ConfigurationError

Listener = Callable[[str], object]
LINGER = 20.0
"""Seconds that the connection stays when nobody waits any more."""
PROBE_EVERY = 30.0
LONGEST_PAUSE = 5.0


class Hearing:
    """`subscribed` calls back, in a thread of the hearing's own, with every payload of the channel, and with an empty one
    when some may have been missed. Where LISTEN cannot work (a pooler and no `listen_url`, `notify` off) nothing comes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._subscribers: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._deaf = not self._settings.notify
        self._closing = False
        self._bell, self._cord = socket.socketpair()
        self._bell.setblocking(False)
        self._cord.setblocking(False)

    @contextmanager
    def subscribed(self, callback: Listener) -> Iterator[None]:
        """Hear during the block."""
        if self._pid != os.getpid():
            self._reset()  # after a fork: the thread is not here, and the connection is the parent's
        with self._lock:
            self._subscribers.append(callback)
            if self._thread is None and not self._deaf:
                self._closing = False
                self._thread = threading.Thread(target=self._run, name="pgqueue-hearing", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._subscribers.remove(callback)

    def close(self) -> None:
        """Let go of the connection; the next wait opens another."""
        thread = self._thread
        if thread is not None and self._pid == os.getpid():
            self._closing = True
            self._ring()
            thread.join(1.0)

    def __del__(self) -> None:
        for end in (self._bell, self._cord):
            end.close()

    def _ring(self) -> None:
        with suppress(OSError):
            self._cord.send(b"\0")

    def _run(self) -> None:
        pause = 0.1
        while not self._ended():
            with suppress(psycopg.Error, OSError, ConfigurationError):
                connection = self._connect()
                if connection is None:
                    with self._lock:
                        self._deaf, self._thread = True, None
                    return
                pause = 0.1
                with connection:
                    self._hear(connection)
                continue
            self._wait(None, pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def _ended(self) -> bool:
        with self._lock:
            if self._closing or not self._subscribers:
                self._thread = None
                return True
            return False

    def _connect(self) -> SyncConnection | None:
        """A connection that listens; None where one would be deaf."""
        url = self._settings.listen_url or database_url(self._settings)
        connection = psycopg.connect(url, **connect_options(self._settings, url))
        try:
            if choose_preparing(connection, self._settings) and not self._settings.listen_url:
                connection.close()
                return None
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(f"{self._settings.schema}.done")))
        except BaseException:
            connection.close()
            raise
        return connection

    def _hear(self, connection: SyncConnection) -> None:
        self._tell("")  # what was said before this connection listened
        quiet = 0.0
        while not self._closing and (self._subscribers or quiet < LINGER):
            if self._wait(connection, LINGER if not self._subscribers else PROBE_EVERY):
                for notification in connection.notifies(timeout=0):
                    self._tell(notification.payload)
            elif not self._closing:
                connection.execute("SELECT 1")  # one that a firewall dropped silently looks like a quiet one
            quiet = 0.0 if self._subscribers else quiet + LINGER

    def _tell(self, payload: str) -> None:
        for callback in list(self._subscribers):
            with suppress(Exception):
                callback(payload)

    def _wait(self, connection: SyncConnection | None, seconds: float) -> bool:
        """True when the connection can be read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(seconds)}
        if self._bell in ready:
            with suppress(OSError):
                self._bell.recv(4096)
        return connection is not None and connection.fileno() in ready

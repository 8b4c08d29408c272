"""A TCP proxy between a client and a server, which can do to a connection what a bad network does."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import psycopg

Target = tuple[str, int] | str
Direction = Literal["to_server", "to_client"]
CHUNK = 65536
PATIENCE = 30.0
READY = tuple(b"Z\x00\x00\x00\x05" + state for state in (b"I", b"T", b"E"))
"""The end of every answer of PostgreSQL. In autocommit it is sent after the commit."""


def target_of(url: str) -> Target:
    """Where the server of this URL listens: host and port, or the path of a Unix socket."""
    parts = psycopg.conninfo.conninfo_to_dict(url)
    host, port = str(parts.get("host") or "localhost"), int(parts.get("port") or 5432)
    return str(Path(host) / f".s.PGSQL.{port}") if host.startswith("/") else (host, port)


class Proxy:
    """Listens on 127.0.0.1 and forwards to `target`, (host, port) or the path of a Unix socket, until the block ends.

    Every method may be called from any thread and acts on the connections that there are and on those to come.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.dropped = 0
        self._holding = 0
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._cut: set[Direction] = set()
        self._refusing = False
        self._replies = 0
        self._request: bytes = b""
        self._pairs: set[_Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)

    def url(self, url: str) -> str:
        """The same database, reached through this proxy."""
        parts = psycopg.conninfo.conninfo_to_dict(url)
        ours: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "sslmode": "disable", "gssencmode": "disable"}
        return psycopg.conninfo.make_conninfo(**{**parts, **ours})

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._pairs)

    @property
    def holding(self) -> int:
        """Of how many connections and directions something is held back."""
        with self._lock:
            return self._holding

    def stall(self) -> None:
        """Accept, keep everything open, forward nothing: what comes is held back, its end too."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, what was held back first; a connection that has lost bytes to `cut` loses all others too."""
        with self._lock:
            self._cut.clear()
            self._refusing = False
        self._flowing.set()

    def cut(self, direction: Direction) -> None:
        """Discard, without a word, what comes in this direction."""
        with self._lock:
            self._cut.add(direction)

    def refuse(self) -> None:
        """Close new connections at once."""
        with self._lock:
            self._refusing = True

    def drop_all(self) -> None:
        """Close every connection now."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()

    def drop_next_replies(self, number: int, request: bytes = b"") -> None:
        """From now on, the next `number` times that the server has answered, discard the answer and close the connection:
        what was asked is done, and nobody is told. With `request`, only where the question holds these bytes; `dropped`
        counts."""
        with self._lock:
            self._replies, self._request = number, request

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE)
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.close()
        for pair in pairs:
            pair.join(PATIENCE)
        assert not self._thread.is_alive(), "the proxy does not stop"
        assert not self.connections, "a connection of the proxy does not end"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                refusing = self._refusing
            if refusing:
                client.close()
                continue
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            pair = _Pair(self, client, server)
            with self._lock:
                self._pairs.add(pair)
            pair.start()

    def _connect(self) -> socket.socket:
        if isinstance(self.target, tuple):
            return socket.create_connection(self.target, PATIENCE)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(self.target)
        except OSError:
            server.close()
            raise
        return server

    # What a pair asks.

    def lost(self, pair: _Pair, direction: Direction) -> bool:
        """Wait until something may be forwarded, or the pair is closed; then, whether it shall be discarded."""
        with self._lock:
            self._holding += 1
        while not self._flowing.wait(0.1) and not pair.closed:
            pass
        with self._lock:
            self._holding -= 1
            return direction in self._cut

    def marks(self, request: bytes) -> bool:
        """The answer to this request is one to drop."""
        with self._lock:
            return self._replies > 0 and self._request in request

    def take_reply(self) -> bool:
        """One more answer may be dropped."""
        with self._lock:
            if self._replies == 0:
                return False
            self._replies -= 1
            return True

    def count_dropped(self) -> None:
        """An answer was dropped."""
        with self._lock:
            self.dropped += 1

    def forget(self, pair: _Pair) -> None:
        """This connection is closed."""
        with self._lock:
            self._pairs.discard(pair)


class _Pair:
    """One connection: a thread for each direction. Closed when both have ended."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        for end in (client, server):
            end.settimeout(None)
        self._lock = threading.Lock()
        self._open = 2
        self.closed = False
        self._marked = False
        self._threads = [
            threading.Thread(target=self._run, args=way, name="proxy-pair", daemon=True)
            for way in (("to_server", client, server), ("to_client", server, client))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, seconds: float) -> None:
        for thread in self._threads:
            thread.join(seconds)

    def close(self) -> None:
        """End both directions, whatever they wait for."""
        self.closed = True
        for end in (self.client, self.server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _run(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        try:
            self._pump(direction, source, sink)
        except OSError:
            self.close()
        finally:
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                for end in (self.client, self.server):
                    end.close()
                self.proxy.forget(self)

    def _pump(self, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        lossy, before = False, b""
        while chunk := source.recv(CHUNK):
            lossy = self.proxy.lost(self, direction) or lossy
            if self.closed:
                return
            if direction == "to_server":
                self._marked = self._marked or self.proxy.marks(before + chunk)
                before = chunk
            elif self._marked:
                self._swallow(chunk)
                return
            if not lossy:
                sink.sendall(chunk)
        if not (self.proxy.lost(self, direction) or lossy):
            sink.shutdown(socket.SHUT_WR)

    def _swallow(self, answer: bytes) -> None:
        """To the end of the answer, when the server has committed; then close. Past the number of those to drop: let be."""
        if not self.proxy.take_reply():
            self._marked = False
            self.client.sendall(answer)
            self._pump("to_client", self.server, self.client)
            return
        while not answer.endswith(READY):
            more = self.server.recv(CHUNK)
            if not more:
                break
            answer = answer[-8:] + more
        self.proxy.count_dropped()
        self.close()

"""What the task queues on Redis share: a server of their own per run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from benchmarks import redis_server
from benchmarks.peers.base import Peer, Session
from pgqueue.bench.stage import Stage

AOF = {"AOF": "every second", "connection": "unix socket"}


class RedisPeer(Peer):
    """A peer whose broker is Redis with its usual durability."""

    session: Callable[[str], Session]
    configuration: Mapping[str, str] = AOF

    def missing(self) -> str | None:
        """Redis itself is needed too."""
        return redis_server.missing() or super().missing()

    @contextmanager
    def open(self, stage: Stage) -> Iterator[Session]:
        """A server that writes to disk every second."""
        with redis_server.started("everysec") as socket:
            yield self.session(str(socket))

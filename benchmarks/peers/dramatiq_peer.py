"""dramatiq on its Redis broker."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from benchmarks import redis_server
from benchmarks.peers.base import Session, target
from benchmarks.peers.redis_peer import AOF, RedisPeer
from pgqueue.bench import tally
from pgqueue.bench.app import message

PREFETCH = "200"


class DramatiqSession(Session):
    """A broker and two actors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._count, self._stamp = application(url)
        self._redis = redis_server.client(url)

    def enqueue_many(self, number: int) -> None:
        """One by one: its Redis broker has no bulk operation."""
        for n in range(number):
            self._count.send(message(n))

    def enqueue_one(self, number: int) -> object:
        """One message."""
        return self._stamp.send(number)

    def empty(self) -> bool:
        """Neither a waiting message nor one that is not acknowledged."""
        return not self._redis.exists("dramatiq:default.msgs") and not self._redis.llen("dramatiq:default")

    def words(self) -> list[str]:
        """Its own program, one process of eight threads."""
        words = ["-m", "dramatiq", "benchmarks.peers.dramatiq_peer:setup", "--processes", "1", "--threads", "8"]
        return [sys.executable, *words]

    def environment(self) -> Mapping[str, str]:
        """More messages ahead than its default of two per thread, which limits it."""
        return {**super().environment(), "dramatiq_queue_prefetch": PREFETCH}


class Dramatiq(RedisPeer):
    """One process of eight threads, its default; no result backend."""

    name = "dramatiq"
    distribution = "dramatiq"
    drain_jobs = 15_000
    session = DramatiqSession
    configuration: Mapping[str, str] = {
        **AOF,
        "worker": f"1 process, 8 threads, prefetch {PREFETCH}",
        "middleware": "its default",
    }


def application(url: str) -> tuple[Any, Any]:
    """The actors."""
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    dramatiq.set_broker(RedisBroker(url=f"unix://{url}"))

    def count(message: dict[str, Any]) -> None:
        tally.count()

    def stamp(number: int) -> None:
        tally.stamp(number)

    return dramatiq.actor(actor_name="count")(count), dramatiq.actor(actor_name="stamp")(stamp)


def setup() -> None:
    """What dramatiq's own program calls in the worker."""
    application(target())

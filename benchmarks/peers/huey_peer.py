"""huey on Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import redis_server
from benchmarks.peers.base import Session, module_words, target
from benchmarks.peers.redis_peer import AOF, RedisPeer
from pgqueue.bench import tally
from pgqueue.bench.app import message

WORKERS = 4


class HueySession(Session):
    """A producer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._huey, self._count, self._stamp = application(url)
        self._redis = redis_server.client(url)

    def enqueue_many(self, number: int) -> None:
        """One by one: it has no bulk operation."""
        for n in range(number):
            self._count(message(n))

    def enqueue_one(self, number: int) -> object:
        """One task."""
        return self._stamp(number)

    def empty(self) -> bool:
        """Nothing waits; huey does not know what runs."""
        return not self._huey.pending_count()

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.huey_peer")


class Huey(RedisPeer):
    """Threads and a blocking read; a task is gone from Redis when it is taken, so that a crash loses it."""

    name = "huey"
    distribution = "huey"
    drain_jobs = 15_000
    session = HueySession
    configuration: Mapping[str, str] = {
        **AOF,
        "worker": f"1 process, {WORKERS} threads, blocking read, no results",
        "safety": "a crash loses what runs",
    }


def application(url: str) -> tuple[Any, Any, Any]:
    """The queue and its tasks."""
    import huey

    queue = huey.RedisHuey("bench", url=f"unix://{url}", results=False, blocking=True)

    def count(message: dict[str, Any]) -> None:
        tally.count()

    def stamp(number: int) -> None:
        tally.stamp(number)

    return queue, queue.task(name="count")(count), queue.task(name="stamp")(stamp)


def main() -> None:
    """A worker, until it is killed."""
    queue = application(target())[0]
    queue.create_consumer(workers=WORKERS, worker_type="thread", periodic=False, check_worker_health=False).run()

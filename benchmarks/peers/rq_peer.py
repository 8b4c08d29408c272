"""rq on Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import redis_server
from benchmarks.peers.base import Session, module_words, target
from benchmarks.peers.redis_peer import AOF, RedisPeer
from pgqueue.bench import tally
from pgqueue.bench.app import message


def count(message: dict[str, Any]) -> None:
    """The no-op job."""
    tally.count()


def stamp(number: int) -> None:
    """Says when it started."""
    tally.stamp(number)


class RqSession(Session):
    """A producer."""

    def __init__(self, url: str) -> None:
        from rq import Queue
        from rq.serializers import JSONSerializer

        self.url = url
        self._queue = Queue("bench", connection=redis_server.client(url), serializer=JSONSerializer)

    def enqueue_many(self, number: int) -> None:
        """enqueue_many, a thousand at a time."""
        for begin in range(0, number, 1000):
            end = min(number, begin + 1000)
            self._queue.enqueue_many(
                [self._queue.prepare_data(count, (message(n),), result_ttl=0) for n in range(begin, end)]
            )

    def enqueue_one(self, number: int) -> object:
        """One job."""
        return self._queue.enqueue(stamp, number, result_ttl=0)

    def empty(self) -> bool:
        """Nothing waits or runs."""
        return not len(self._queue) and not self._queue.started_job_registry.count

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.rq_peer")


class Rq(RedisPeer):
    """SimpleWorker: jobs run in the worker's own process, without a fork each."""

    name = "rq"
    distribution = "rq"
    drain_jobs = 2000
    session = RqSession
    configuration: Mapping[str, str] = {**AOF, "worker": "SimpleWorker (no fork per job), JSON, result_ttl 0"}


def main() -> None:
    """A worker, until it is killed."""
    from rq import Queue, SimpleWorker
    from rq.serializers import JSONSerializer

    connection = redis_server.client(target())
    queue = Queue("bench", connection=connection, serializer=JSONSerializer)
    SimpleWorker([queue], connection=connection, serializer=JSONSerializer).work(logging_level="WARNING")

"""celery on Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import redis_server
from benchmarks.peers.base import Session, module_words, target
from benchmarks.peers.redis_peer import AOF, RedisPeer
from pgqueue.bench import tally
from pgqueue.bench.app import message

THREADS = 8


class CelerySession(Session):
    """A producer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._app, self._count, self._stamp = application(url)
        self._producer = self._app.producer_pool.acquire()
        self._redis = redis_server.client(url)

    def enqueue_many(self, number: int) -> None:
        """One by one, on one producer: it has no bulk operation."""
        for n in range(number):
            self._count.apply_async((message(n),), producer=self._producer)

    def enqueue_one(self, number: int) -> object:
        """One task."""
        return self._stamp.apply_async((number,), producer=self._producer)

    def empty(self) -> bool:
        """Nothing waits, nothing is unacknowledged."""
        return not self._redis.exists("celery", "unacked")

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.celery_peer")


class Celery(RedisPeer):
    """A pool of threads in one process, late acknowledgement, results ignored."""

    name = "celery"
    distribution = "celery"
    drain_jobs = 4000
    session = CelerySession
    configuration: Mapping[str, str] = {
        **AOF,
        "worker": f"1 process, {THREADS} threads, prefetch 100 each, acks_late, results ignored, no gossip, no mingle",
    }


def application(url: str) -> tuple[Any, Any, Any]:
    """The app and its tasks."""
    import celery

    app = celery.Celery("bench", broker=f"redis+socket://{url}")
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=100,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
    )

    def count(message: dict[str, Any]) -> None:
        tally.count()

    def stamp(number: int) -> None:
        tally.stamp(number)

    return app, app.task(name="count")(count), app.task(name="stamp")(stamp)


def main() -> None:
    """A worker, until it is killed."""
    words = ["--pool", "threads", "--concurrency", str(THREADS), "--loglevel", "WARNING"]
    application(target())[0].worker_main(
        ["worker", *words, "--without-gossip", "--without-mingle", "--without-heartbeat"]
    )

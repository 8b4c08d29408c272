"""redis-py on the reliable list: LMOVE into a processing list, LREM when done, pipelined."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import orjson

from benchmarks import redis_server
from benchmarks.peers.base import Peer, Session, module_words, target, work
from pgqueue.bench.app import message
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage
from pgqueue.bench.values import Metrics

QUEUE = "bench"
BATCH = 100


class RedisList(Peer):
    """The reliable queue that people build by hand."""

    name = "redis-list"
    distribution = "redis"
    drain_jobs = 50_000
    configuration: Mapping[str, str] = {
        "connection": "unix socket, hiredis parser",
        "AOF": "always where a worker drains",
        "consumer": f"one process, pipelines of {BATCH} LMOVE and {BATCH} LREM, BLMOVE when idle",
    }

    def missing(self) -> str | None:
        """Redis itself is needed too."""
        return redis_server.missing()

    @contextmanager
    def open(self, stage: Stage) -> Iterator[Session]:
        """A server that writes every command to disk before it answers."""
        with redis_server.started("always") as socket:
            yield ListSession(str(socket))


class ListSession(Session):
    """One list."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.redis = redis_server.client(url)

    def enqueue_many(self, number: int) -> None:
        """LPUSH of a thousand values."""
        for begin in range(0, number, 1000):
            self.redis.lpush(QUEUE, *(orjson.dumps(message(n)) for n in range(begin, min(number, begin + 1000))))

    def enqueue_one(self, number: int) -> object:
        """One LPUSH."""
        return self.redis.lpush(QUEUE, orjson.dumps({"stamp": number}))

    def empty(self) -> bool:
        """Neither list is there."""
        return not self.redis.exists(QUEUE) and not list(self.redis.scan_iter("processing:*"))

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.redis_list")


def life_cycle(fsync: str, number: int, batch: int) -> Metrics:
    """LPUSH of a batch, LMOVE × batch, decode, LREM × batch."""
    with redis_server.started(fsync) as socket:
        redis = redis_server.client(socket)
        done = 0
        began = time.perf_counter()
        for begin in range(0, number, batch):
            redis.lpush(QUEUE, *(orjson.dumps(message(n)) for n in range(begin, begin + batch)))
            done += len(_take(redis, batch))
        spent = time.perf_counter() - began
        left = redis.exists(QUEUE, _processing())
    if (done, left) != (number, 0):
        raise Miscount(f"of {number} jobs {done} were executed, and {left} lists are left")
    return {"jobs/s": number / spent}


def _processing() -> str:
    return f"processing:{os.getpid()}"


def _take(redis: Any, count: int, first: bytes | None = None, work: Any = None) -> list[Any]:
    pipeline = redis.pipeline(transaction=False)
    for _ in range(count):
        pipeline.lmove(QUEUE, _processing(), "RIGHT", "LEFT")
    taken = [value for value in pipeline.execute() if value is not None]
    if first is not None:
        taken.insert(0, first)
    for value in taken:
        job = orjson.loads(value)
        if work is not None:
            work(job)
    pipeline = redis.pipeline(transaction=False)
    for value in taken:
        pipeline.lrem(_processing(), -1, value)
    pipeline.execute()
    return taken


def main() -> None:
    """A consumer, until it is killed."""
    redis = redis_server.client(target())
    batch = BATCH
    while True:
        # One job alone is not made to wait for a pipeline of empty moves.
        value = redis.blmove(QUEUE, _processing(), 1, "RIGHT", "LEFT")
        if value is not None:
            batch = BATCH if len(_take(redis, batch, value, work)) > 1 else 1

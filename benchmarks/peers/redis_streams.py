"""redis-py on Redis Streams, by hand: a consumer group, pipelines, XACK. No worker, retries or rescue: the bare minimum."""

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

STREAM, GROUP = "bench", "workers"
COUNT = "PGQUEUE_BENCH_COUNT"


class RedisStreams(Peer):
    """XADD in a pipeline, XREADGROUP, XACK; entries stay in the stream, as finished jobs stay in pgqueue's archive."""

    distribution = "redis"
    drain_jobs = 150_000

    def __init__(self, name: str = "redis-streams", count: int = 100, *, single: bool = True) -> None:
        self.name = name
        self.count = count
        self.single = single
        self.configuration: Mapping[str, str] = {
            "connection": "unix socket, hiredis parser",
            "AOF": "every second and always; always where a worker drains",
            "JSON": "orjson on both sides",
            "consumer": f"one process, XREADGROUP COUNT {count}",
        }

    def missing(self) -> str | None:
        """Redis itself is needed too."""
        return redis_server.missing()

    def settings(self) -> dict[str, str]:
        """With the server's version."""
        return {**super().settings(), "server": redis_server.server_version()}

    @contextmanager
    def open(self, stage: Stage) -> Iterator[Session]:
        """A server that writes every command to disk before it answers."""
        with redis_server.started("always") as socket:
            yield StreamSession(str(socket), self.count)


class StreamSession(Session):
    """One stream with one group."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.count = count
        self.redis = redis_server.client(url)
        self.redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)

    def enqueue_many(self, number: int) -> None:
        """Pipelines of a thousand."""
        for begin in range(0, number, 1000):
            pipeline = self.redis.pipeline(transaction=False)
            for n in range(begin, min(number, begin + 1000)):
                pipeline.xadd(STREAM, {"job": orjson.dumps(message(n))})
            pipeline.execute()

    def enqueue_one(self, number: int) -> object:
        """One XADD."""
        return self.redis.xadd(STREAM, {"job": orjson.dumps({"stamp": number})})

    def empty(self) -> bool:
        """Nothing new, nothing pending."""
        group = self.redis.xinfo_groups(STREAM)[0]
        return group["pending"] == 0 and not group["lag"]

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.redis_streams")

    def environment(self) -> Mapping[str, str]:
        """How many entries it reads at once."""
        return {**super().environment(), COUNT: str(self.count)}


def life_cycle(fsync: str, number: int, batch: int) -> Metrics:
    """XADD × batch in a pipeline, XREADGROUP COUNT batch, decode, XACK, on one connection."""
    with redis_server.started(fsync) as socket:
        redis = redis_server.client(socket)
        redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        done = 0
        began = time.perf_counter()
        for begin in range(0, number, batch):
            pipeline = redis.pipeline(transaction=False)
            for n in range(begin, begin + batch):
                pipeline.xadd(STREAM, {"job": orjson.dumps(message(n))})
            pipeline.execute()
            done += _take(redis, batch, None)
        spent = time.perf_counter() - began
        left = redis.xpending(STREAM, GROUP)["pending"]
    if (done, left) != (number, 0):
        raise Miscount(f"of {number} jobs {done} were executed and {left} are pending")
    return {"jobs/s": number / spent}


def _take(redis: Any, count: int, block: int | None) -> int:
    found = redis.xreadgroup(GROUP, f"c{os.getpid()}", {STREAM: ">"}, count=count, block=block)
    entries = found[0][1] if found else []
    for _, fields in entries:
        job = orjson.loads(fields[b"job"])
        if block is not None:
            work(job)
    if entries:
        redis.xack(STREAM, GROUP, *(entry for entry, _ in entries))
    return len(entries)


def main() -> None:
    """A consumer, until it is killed."""
    redis = redis_server.client(target())
    count = int(os.environ[COUNT])
    while True:
        _take(redis, count, 1000)

"""pgqueuer on asyncpg."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import orjson

from benchmarks.peers.base import Peer, Session, module_words, target
from benchmarks.peers.loops import Loop, new_loop
from pgqueue.bench import tally
from pgqueue.bench.app import message
from pgqueue.bench.stage import Stage, execute

BATCH = 1000


class Pgqueuer(Peer):
    """QueueManager on one asyncpg connection, durable tables."""

    name = "pgqueuer"
    distribution = "pgqueuer"
    needs = ("asyncpg",)
    drain_jobs = 40_000
    on_postgres = True
    configuration: Mapping[str, str] = {
        "driver": "asyncpg on uvloop",
        "worker": f"async handlers, batch_size {BATCH}, durable tables",
    }

    @contextmanager
    def open(self, stage: Stage) -> Iterator[Session]:
        """A database with its schema."""
        with stage.database(ready=False) as url, Loop() as loop:
            session = PgqueuerSession(url, loop)
            try:
                yield session
            finally:
                session.close()


class PgqueuerSession(Session):
    """A producer with one connection."""

    def __init__(self, url: str, loop: Loop) -> None:
        self.url = self.postgres_url = url
        self._loop = loop
        self._connection, self._queries = loop.run(_connect(url))
        loop.run(self._queries.install())

    def enqueue_many(self, number: int) -> None:
        """Lists of a thousand."""
        self._loop.run(self._many(number))

    async def _many(self, number: int) -> None:
        for begin in range(0, number, 1000):
            payloads = [orjson.dumps(message(n)) for n in range(begin, min(number, begin + 1000))]
            await self._queries.enqueue(["count"] * len(payloads), payloads, [0] * len(payloads))

    def enqueue_one(self, number: int) -> object:
        """One job."""
        return self._loop.run(self._queries.enqueue("stamp", orjson.dumps(number)))

    def enqueue_each(self, number: int) -> None:
        """Inside one coroutine."""

        async def each() -> None:
            for n in range(number):
                await self._queries.enqueue("stamp", orjson.dumps(n))

        self._loop.run(each())

    def empty(self) -> bool:
        """Its table is."""
        return bool(execute(self.url, "SELECT NOT EXISTS (SELECT 1 FROM pgqueuer)")[0][0])

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.pgqueuer_peer")

    def close(self) -> None:
        """Its connection."""
        self._loop.run(self._connection.close())


async def _connect(url: str) -> tuple[Any, Any]:
    import asyncpg
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries
    from psycopg.conninfo import conninfo_to_dict

    parts = conninfo_to_dict(url)
    names = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    connection = await asyncpg.connect(**{ours: parts[name] for name, ours in names.items() if parts.get(name)})
    return connection, Queries(AsyncpgDriver(connection))


async def work() -> None:
    """A worker, until it is killed."""
    from pgqueuer.qm import QueueManager

    _, queries = await _connect(target())
    manager = QueueManager(queries)

    async def count(job: Any) -> None:
        orjson.loads(job.payload)
        tally.count()

    async def stamp(job: Any) -> None:
        tally.stamp(orjson.loads(job.payload))

    manager.entrypoint("count")(count)
    manager.entrypoint("stamp")(stamp)
    await manager.run(batch_size=BATCH, dequeue_timeout=timedelta(seconds=30))


def main() -> None:
    """Work, on the fastest loop there is."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())

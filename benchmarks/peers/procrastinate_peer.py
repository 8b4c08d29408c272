"""procrastinate on psycopg."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.base import Peer, Session, module_words, target
from benchmarks.peers.loops import Loop, new_loop
from pgqueue.bench import tally
from pgqueue.bench.app import message
from pgqueue.bench.stage import Stage, execute

CONCURRENCY = 20


class Procrastinate(Peer):
    """An async worker with async tasks, woken by LISTEN/NOTIFY; finished jobs are deleted by the worker."""

    name = "procrastinate"
    distribution = "procrastinate"
    drain_jobs = 3000
    on_postgres = True
    configuration: Mapping[str, str] = {
        "driver": "psycopg, async",
        "worker": f"async tasks, concurrency {CONCURRENCY}, delete_jobs always, LISTEN/NOTIFY",
    }

    @contextmanager
    def open(self, stage: Stage) -> Iterator[Session]:
        """A database with its schema."""
        with stage.database(ready=False) as url, Loop() as loop:
            session = ProcrastinateSession(url, loop)
            try:
                yield session
            finally:
                session.close()


class ProcrastinateSession(Session):
    """A producer with its pool."""

    def __init__(self, url: str, loop: Loop) -> None:
        self.url = self.postgres_url = url
        self._loop = loop
        self._app, self._count, self._stamp = application(url)
        loop.run(self._app.open_async())
        loop.run(self._app.schema_manager.apply_schema_async())

    def enqueue_many(self, number: int) -> None:
        """Batches of a thousand."""

        async def many() -> None:
            for begin in range(0, number, 1000):
                calls = [{"message": message(n)} for n in range(begin, min(number, begin + 1000))]
                await self._count.batch_defer_async(*calls)

        self._loop.run(many())

    def enqueue_one(self, number: int) -> object:
        """One job."""
        return self._loop.run(self._stamp.defer_async(number=number))

    def enqueue_each(self, number: int) -> None:
        """Inside one coroutine."""

        async def each() -> None:
            for n in range(number):
                await self._stamp.defer_async(number=n)

        self._loop.run(each())

    def empty(self) -> bool:
        """Its table is."""
        return bool(execute(self.url, "SELECT NOT EXISTS (SELECT 1 FROM procrastinate_jobs)")[0][0])

    def words(self) -> list[str]:
        """This module."""
        return module_words("benchmarks.peers.procrastinate_peer")

    def close(self) -> None:
        """Its pool."""
        self._loop.run(self._app.close_async())


def application(url: str) -> tuple[Any, Any, Any]:
    """The app and its tasks."""
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))

    async def count(message: dict[str, Any]) -> None:
        tally.count()

    async def stamp(number: int) -> None:
        tally.stamp(number)

    return app, app.task(name="count")(count), app.task(name="stamp")(stamp)


async def work() -> None:
    """A worker, until it is killed."""
    app = application(target())[0]
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY, delete_jobs="always", install_signal_handlers=False)


def main() -> None:
    """Work, on the fastest loop there is."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(work())

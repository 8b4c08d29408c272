"""A worker inside the test's own process: started, watched through its events, and always ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

import pgqueue
from pgqueue.worker import Worker, WorkerOptions
from tests.waiting import wait_until

PATIENCE = 60.0
"""Seconds that a busy machine may take for what an idle one does in milliseconds."""


class Watched:
    """A running worker, and every event that its application has emitted."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.events: list[pgqueue.Event] = []
        self.status: int | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="worker under test", daemon=True)

    def _run(self) -> None:
        try:
            self.status = self.worker.run()
        except BaseException as error:
            self.error = error

    def seen(self, name: pgqueue.EventName, **facts: Any) -> list[pgqueue.Event]:
        """The events of that name that carry these facts."""
        return [
            event
            for event in list(self.events)
            if event.name is name and all(event.facts.get(key) == value for key, value in facts.items())
        ]

    def wait_for(self, name: pgqueue.EventName, **facts: Any) -> pgqueue.Event:
        """Wait until such an event was emitted."""
        return wait_until(lambda: self.seen(name, **facts), PATIENCE, f"event {name} with {facts}")[0]

    def wait_for_all(self, number: int, name: pgqueue.EventName, **facts: Any) -> list[pgqueue.Event]:
        """Wait until so many such events were emitted; all of them. The database may know of a change before."""
        wait_until(lambda: len(self.seen(name, **facts)) >= number, PATIENCE, f"{number} events {name} with {facts}")
        return self.seen(name, **facts)

    def loops(self) -> dict[str, Any]:
        """The control loops by name."""
        parts = [self.worker.claimer, self.worker.settler, self.worker.heartbeat, *self.worker._helpers]
        return {part.name: part for part in parts}

    def backend(self, loop: str) -> int:
        """The server process behind the connection of this control loop."""
        link = self.loops()[loop].link
        return wait_until(lambda: link._connection, PATIENCE, f"{loop} is connected").info.backend_pid

    def join(self, seconds: float = PATIENCE) -> int | None:
        """Wait until the worker has ended by itself; its exit status."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the worker did not end"
        assert self.error is None, repr(self.error)
        return self.status


@contextmanager
def running(pq: pgqueue.PgQueue, **options: Any) -> Iterator[Watched]:
    """A worker of `pq` that works during the block and is stopped at its end."""
    watched = Watched(Worker(pq, WorkerOptions(**{"grace": 5.0, **options})))
    unsubscribe = pq.events.subscribe(watched.events.append)
    watched.thread.start()
    try:
        ready = lambda: watched.worker.started.is_set() or not watched.thread.is_alive()  # noqa: E731
        wait_until(ready, PATIENCE, "the worker has started")
        assert watched.error is None, repr(watched.error)
        yield watched
    finally:
        watched.worker.stop()
        watched.thread.join(PATIENCE)
        unsubscribe()
    assert not watched.thread.is_alive(), "the worker does not stop"


def define(pq: pgqueue.PgQueue, colour: str, body: Callable[..., Any], *, name: str = "work", **options: Any) -> Any:
    """`body` as a task of the wanted colour, plain or async, on queue "q"."""
    if colour == "async":

        async def task(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

    else:

        def task(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

    return pq.task(name=name, queue="q", **options)(task)


def count(admin: psycopg.Connection[Any], table: str, where: str = "true") -> int:
    """How many rows of a table of ours fulfil a condition."""
    row = admin.execute(f"SELECT count(*) FROM pgqueue.{table} WHERE {where}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def wait_for_count(
    admin: psycopg.Connection[Any], number: int, table: str, where: str = "true", seconds: float = PATIENCE
) -> None:
    """Wait until exactly that many rows fulfil the condition."""
    wait_until(lambda: count(admin, table, where) == number, seconds, f"{number} rows of {table} where {where}")

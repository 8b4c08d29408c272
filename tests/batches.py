"""Batch handlers for tests: defined in either colour, and what they have seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

import pgqueue

Admin = psycopg.Connection[Any]
NEVER = pgqueue.Fixed(3600)
"""A retry policy under which a test sees each attempt alone."""
LONG = 600.0
"""A wait that no test waits for."""


def define(pq: pgqueue.PgQueue, colour: str, body: Callable[[pgqueue.Batch], Any], **options: Any) -> Any:
    """`body` as a batch handler of the wanted colour, on queue "q"."""
    given = {"name": "work", "queue": "q", "batch": 10, "retry": NEVER, **options}
    if colour == "async":

        @pq.task(**given)
        async def work(jobs: pgqueue.Batch) -> Any:
            return body(jobs)

    else:

        @pq.task(**given)
        def work(jobs: pgqueue.Batch) -> Any:
            return body(jobs)

    return work


class Seen:
    """Remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, jobs: pgqueue.Batch) -> None:
        self.calls.append([job.args[0] for job in jobs])

    @property
    def all(self) -> list[Any]:
        """The first arguments of all jobs, in the order in which they came."""
        return [number for call in self.calls for number in call]

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.calls]


def rows(admin: Admin, columns: str, table: str = "job") -> list[tuple[Any, ...]]:
    return admin.execute(f"SELECT {columns} FROM pgqueue.{table} ORDER BY id".encode()).fetchall()


def take_away(admin: Admin, job_id: int) -> None:
    """Do what a rescue does, and keep everybody from claiming the job."""
    admin.execute(
        "UPDATE pgqueue.job SET lease_id = NULL, position = NULL, run_at = now() + interval '1 hour' WHERE id = %s",
        [job_id],
    )

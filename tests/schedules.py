"""What tests of schedules share: looking as a worker does, and as if time had passed."""

from __future__ import annotations

from typing import Any

import psycopg

import pgqueue
from pgqueue.ops import schedule as ops

Admin = psycopg.Connection[Any]


def tick(pq: pgqueue.PgQueue, *, left_out: tuple[str, ...] = ()) -> ops.Round:
    """What a worker does when it looks."""
    return pq.run(ops.tick(list(pq.code_schedules), left_out=left_out, channel=pq.channel))


def define(pq: pgqueue.PgQueue) -> list[str]:
    """What a worker does when it starts."""
    return pq.run(ops.define(pq.code_schedules))


def ago(admin: Admin, name: str, seconds: float) -> None:
    """As if nobody had looked for so long."""
    statement = """
        UPDATE pgqueue.schedule SET ticked_to = clock_timestamp() - %s * interval '1 second', next_at = clock_timestamp(),
               starts_at = clock_timestamp() - %s * interval '1 second'
        WHERE name = %s
    """
    admin.execute(statement, [seconds, seconds, name])


def silent(admin: Admin, seconds: float = 2 * ops.GONE) -> None:
    """As if no process that says the same had been there for so long."""
    admin.execute("UPDATE pgqueue.schedule SET affirmed_at = affirmed_at - %s * interval '1 second'", [seconds])


def made(admin: Admin) -> list[tuple[str, str]]:
    """The schedule and the tick of each job, in the order of their ids."""
    statement = "SELECT headers->>'schedule', headers->>'scheduled_for' FROM pgqueue.job ORDER BY id"
    return admin.execute(statement).fetchall()


def only(pq: pgqueue.PgQueue) -> pgqueue.Schedule:
    [schedule] = pq.schedules()
    return schedule


def version(database: str, cron: str, **options: Any) -> pgqueue.PgQueue:
    """One version of an application, with a schedule "nightly"."""
    pq = pgqueue.PgQueue(database)

    @pq.schedule(cron, name="nightly", **options)
    @pq.task(name="work", queue="q")
    def work() -> None: ...

    return pq

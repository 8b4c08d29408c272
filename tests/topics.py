"""What tests of topics share: publishers in open transactions, and what reached whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

import pgqueue
from pgqueue.ops import Op

Admin = psycopg.Connection[Any]
REPEATABLE_READ = psycopg.IsolationLevel.REPEATABLE_READ


def reached(admin: Admin, queue: str) -> list[Any]:
    """The first argument of each job of a queue, in the order of the jobs' ids."""
    rows = admin.execute("SELECT args -> 0 FROM pgqueue.job WHERE queue = %s ORDER BY id", [queue]).fetchall()
    return [value for (value,) in rows]


def messages(admin: Admin, topic: str = "orders") -> list[Any]:
    """The first argument of each message that is kept, in the order of their ids."""
    rows = admin.execute("SELECT args -> 0 FROM pgqueue.message WHERE topic = %s ORDER BY id", [topic]).fetchall()
    return [value for (value,) in rows]


def segments(admin: Admin) -> list[str]:
    """The tables that hold messages, but for the default ones."""
    statement = """
        SELECT c.relname FROM pg_class AS c
        WHERE c.relnamespace = 'pgqueue'::regnamespace AND c.relname ~ '^message_[0-9]+_[0-9]+$' AND c.relkind = 'r'
        ORDER BY substring(c.relname FROM '[0-9]+$')::int
    """
    return [name for (name,) in admin.execute(statement.encode()).fetchall()]


def subscribe(pq: pgqueue.PgQueue, group: str, **options: Any) -> bool:
    """A group of the topic "orders" with a queue of its own name."""
    return pq.subscribe("orders", "work", group=group, **{"queue": group, **options})


def state(pq: pgqueue.PgQueue, group: str) -> str:
    [found] = [one for one in pq.subscriptions() if one.group == group]
    return found.state


@contextmanager
def publisher(database: str, level: psycopg.IsolationLevel | None = None) -> Iterator[psycopg.Connection[Any]]:
    """A caller's connection; with a level, in a transaction whose snapshot is of now."""
    with psycopg.connect(database) as connection:
        if level is not None:
            connection.isolation_level = level
            connection.execute("SELECT 1")
        yield connection


class Cut(Exception):
    """The process ends here."""


def cut(op: Op[Any], after: int) -> Op[Any]:
    """The same operation, which ends after so many statements."""
    step = next(op)
    for _ in range(after):
        rows = yield step
        try:
            step = op.send(rows)
        except StopIteration as stop:
            return stop.value
    raise Cut

"""The application of the benchmark: tasks that do nothing but be counted."""

from __future__ import annotations

from typing import Any

import pgqueue
from pgqueue.bench import tally

PLAIN, ASYNC, FLAKY, STAMPED = "plain", "async", "flaky", "stamped"
pq = pgqueue.PgQueue()


def message(number: int) -> dict[str, Any]:
    """The payload of every system: about 80 bytes of JSON."""
    return {"n": number, "to": f"customer-{number:08d}@example.com", "subject": "your order", "lang": "en"}


@pq.task(name=PLAIN, queue="bench")
def plain(message: dict[str, Any]) -> None:
    """A plain function."""
    tally.count()


@pq.task(name=ASYNC, queue="bench")
async def asynchronous(message: dict[str, Any]) -> None:
    """A coroutine."""
    tally.count()


@pq.task(name=STAMPED, queue="bench")
def stamped(number: int) -> None:
    """Says when it started."""
    tally.stamp(number)


@pq.task(name=FLAKY, queue="bench", max_attempts=2, retry=pgqueue.Fixed(0))
def flaky(message: dict[str, Any]) -> None:
    """One in ten fails once, one in a hundred for good."""
    tally.count()
    number = message["n"]
    if number % 100 == 1 or (number % 10 == 0 and pgqueue.current_job().attempt == 1):
        raise RuntimeError("as planned")

"""The producer, a process of its own: bulks of jobs in transactions, at a wanted rate, some of them rolled back.

Every job has its own number. What became of each transaction stands in the journal, one line each. Ends at SIGTERM, after
the transaction under way, or when its numbers are used up.
"""

from __future__ import annotations

import argparse
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psycopg

from pgqueue.errors import DatabaseUnavailable
from tests.history.checker import Verdict
from tests.soak.app import mark
from tests.soak.marks import Batch

LOST = (psycopg.OperationalError, psycopg.InterfaceError, DatabaseUnavailable)
GIVEN_UP = 0.08
PER_SECOND = 50
MOST_DEBT = 1.0
"""Seconds of work that are caught up with after an outage; the rest of it is not made up for in one flood."""


@dataclass(slots=True, kw_only=True)
class Producer:
    """`rate`: committed jobs a second. While the file `hold` is there, nothing is enqueued."""

    url: str
    rate: float
    numbers: int
    hold: Path
    journal: TextIO
    dice: random.Random
    stopping: bool = False
    used: int = 0
    connection: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        """One transaction after the other."""
        due = time.monotonic()
        while not self.stopping and self.used < self.numbers:
            now = time.monotonic()
            if now < due:
                time.sleep(due - now)
            elif self.hold.exists():
                time.sleep(0.05)
                due = time.monotonic()
            else:
                due = max(due, now - MOST_DEBT) + self._business() / self.rate
        self._forget()

    def _business(self) -> int:
        """One transaction; returns how many jobs it has brought."""
        usual = max(2, int(self.rate / PER_SECOND))
        count = min(self.dice.randint(usual // 2, usual * 3 // 2), self.numbers - self.used)
        first = self.used
        self.used += count
        verdict = Verdict.ROLLED_BACK
        try:
            connection = self._open()
            mark.enqueue_many(((number,) for number in range(first, first + count)), using=connection)
            if self.dice.random() < GIVEN_UP:
                connection.rollback()
            else:
                verdict = Verdict.UNKNOWN  # from here on nobody knows, until the answer has come
                connection.commit()
                verdict = Verdict.COMMITTED
        except LOST:
            self._forget()
            time.sleep(0.05)
        self.journal.write(Batch(first, count, verdict).line())
        return count if verdict is Verdict.COMMITTED else 0

    def _open(self) -> psycopg.Connection[Any]:
        if self.connection is None or self.connection.closed:
            self.connection = psycopg.connect(self.url, connect_timeout=5)
        return self.connection

    def _forget(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with suppress(*LOST):
                connection.close()


def main() -> None:
    """The program; its database is that of PGQUEUE_DATABASE_URL."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--numbers", type=int, required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--hold", type=Path, required=True)
    given = parser.parse_args()
    url = mark.app.settings.database_url
    if url is None:
        parser.error("no database: set PGQUEUE_DATABASE_URL")
    with given.journal.open("w", buffering=1) as file:
        producer = Producer(
            url=url, rate=given.rate, numbers=given.numbers, hold=given.hold, journal=file,
            dice=random.Random(f"producer of {given.seed}"),
        )  # fmt: skip

        def stop(number: int, frame: object) -> None:
            producer.stopping = True

        signal.signal(signal.SIGTERM, stop)
        producer.run()


if __name__ == "__main__":
    main()

"""Producers: business transactions that enqueue, some given up, some cut off from the answer to their commit."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psycopg

from pgqueue.errors import DatabaseUnavailable
from tests.history.app import TASKS
from tests.history.checker import Verdict

MOST = {"flaky": 4, "hopeless": 4}
"""In one bulk. Twenty failures in a row hold a queue back, for up to a minute at a time. That is meant for a dependency that
is down; it would say nothing of whether everything drains."""
KEYS = 1_000_000_000
"""Keys of one producer."""
ORDERED, LIMITED = 12, 4
"""How many ordering keys, of which every second one parks, and how many concurrency keys there are, for all producers."""
MOST_KEYED = 8
"""In one bulk with a key: what waits in one line should not be all that is left at the end."""
LOST = (psycopg.OperationalError, psycopg.InterfaceError, DatabaseUnavailable)


class Producer(threading.Thread):
    """One connection to `url`, at `rate` jobs a second until stopped. What it was told stands in `verdicts`, by key."""

    def __init__(self, number: int, url: str, seed: int, rate: float, weights: Mapping[str, int], keyed: float) -> None:
        super().__init__(name=f"producer {number}", daemon=True)
        self.url = url
        self.random = random.Random(f"producer {number} of {seed}")
        self.rate = rate
        self.weights = weights
        self.keyed = keyed
        self.verdicts: dict[int, Verdict] = {}
        self.waiting = threading.Event()
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._key = number * KEYS
        self._connection: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        """One transaction after the other; while `waiting` is set, none."""
        due = time.monotonic()
        try:
            while not self.stopping.wait(max(0.0, due - time.monotonic())):
                now = time.monotonic()
                made = 0 if self.waiting.is_set() else self._business()
                # What an outage has kept from being made is not caught up with in one flood.
                due = max(due, now - 0.5) + (made / self.rate if made else 0.1)
        except BaseException as error:
            self.error = error
        finally:
            self._forget()

    def _business(self) -> int:
        """One business transaction; how many jobs it wanted."""
        kind = self.random.choices(list(self.weights), list(self.weights.values()))[0]
        options = self._options()
        if options.get("on_dead") == "park" and "hopeless" in self.weights and self.random.random() < 0.25:
            kind = "hopeless"
        most = min(MOST.get(kind, 40), MOST_KEYED if options else 40)
        number = 1 if self.random.random() < 0.7 else self.random.randint(2, most)
        give_up = self.random.random() < 0.1
        keys = range(self._key + 1, self._key + number + 1)
        self._key += number
        self.verdicts.update(dict.fromkeys(keys, Verdict.ROLLED_BACK))
        try:
            connection = self._open()
            self._write(connection, kind, keys, options)
            if give_up:
                connection.rollback()
                return number
            # From here on nobody knows, until the answer has come.
            self.verdicts.update(dict.fromkeys(keys, Verdict.UNKNOWN))
            connection.commit()
        except LOST:
            self._forget()
            time.sleep(0.05)
        else:
            self.verdicts.update(dict.fromkeys(keys, Verdict.COMMITTED))
        return number

    def _options(self) -> dict[str, Any]:
        """A key, for some."""
        dice = self.random.random()
        if dice < self.keyed / 2:
            number = self.random.randrange(ORDERED)
            return {"ordering_key": f"line {number}", "on_dead": "continue" if number % 2 else "park"}
        if dice < self.keyed:
            number = self.random.randrange(LIMITED)
            priority = self.random.randint(-3, 3)  # who comes late may be the first in its line
            return {"concurrency_key": f"limit {number}", "concurrency_limit": number + 1, "priority": priority}
        return {}

    def _write(self, connection: psycopg.Connection[Any], kind: str, keys: range, options: Mapping[str, Any]) -> None:
        task = TASKS[kind].options(**options) if options else TASKS[kind]
        if len(keys) == 1:
            ids = [task.enqueue(keys[0], using=connection)]
        else:
            ids = task.enqueue_many([(key,) for key in keys], using=connection)
        connection.execute(
            "INSERT INTO history.intent (key, job_id, kind)"
            " SELECT key, job_id, %s FROM unnest(%s::bigint[], %s::bigint[]) AS made(key, job_id)",
            [kind, list(keys), ids],
        )

    def _open(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.url, connect_timeout=2)
        return self._connection

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*LOST):
                connection.close()

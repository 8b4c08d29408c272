"""What must work again when the faults have ended: everything drains, and every worker does every kind of work alone."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

import pgqueue
from tests.history.app import TASKS
from tests.history.checker import Rule, Verdict, Violation
from tests.history.fleet import Fleet, Post
from tests.history.nemesis import AWAY, unpark
from tests.history.producers import KEYS
from tests.history.server import rows

ALONE = ("quick", "sleepy", "later", "flaky", "long")
"""What needs each loop of a worker: claim and settle; promotion; the event loop; retries; heartbeats, beyond a lease. All of
it twice: each by itself, and one after the other in the order of one key."""
ALONE_SECONDS = 40.0
"""An upper bound for a very busy machine; an idle one needs four."""


class Liveness:
    """The questions, asked of one fleet on one database. `verdicts` are those of the probes it enqueues."""

    def __init__(self, url: str, fleet: Fleet) -> None:
        self.url = url
        self.fleet = fleet
        self.verdicts: dict[int, Verdict] = {}
        self._keys = itertools.count(KEYS * 900)

    def drained(self, seconds: float) -> list[Violation]:
        """Nothing is live within so many seconds; an operator lets go on what is parked."""
        end = time.monotonic() + seconds
        with pgqueue.PgQueue(self.url) as operator:
            while (live := rows(self.url, "SELECT count(*) FROM pgqueue.job")) != [(0,)]:
                if time.monotonic() > end:
                    logs = "\n".join(post.tail() for post in self.fleet.posts)
                    detail = f"{live} jobs are live {seconds:g} s after the last fault:\n{logs}"
                    return [Violation(Rule.LIVES_ON, detail)]
                with suppress(*AWAY):
                    unpark(operator, self.url)
                time.sleep(0.1)
        return []

    def fresh(self, seconds: float) -> list[Violation]:
        """A new job starts within so many seconds, by the database's clock."""
        [job_id] = self._enqueue(["quick"])
        if not self._done([job_id], seconds + 10.0):
            return [Violation(Rule.LIVES_ON, "a fresh job is not run", job_id)]
        waited = rows(
            self.url,
            "SELECT extract(epoch FROM min(at) FILTER (WHERE what = 'start') - min(at))::float8 FROM history.event"
            " WHERE job_id = %s",
            job_id,
        )
        if waited and waited[0][0] > seconds:
            return [Violation(Rule.LIVES_ON, f"a fresh job has started after {waited[0][0]:.1f} s", job_id)]
        return []

    def alone(self, post: Post) -> list[Violation]:
        """This worker does every kind of work while all others stand still."""
        with self._frozen([other for other in self.fleet.posts if other is not post]):
            ids = self._enqueue(list(ALONE)) + self._enqueue(list(ALONE), ordering_key="alone")
            if self._done(ids, ALONE_SECONDS):
                return []
            left = rows(self.url, "SELECT id, task, attempt FROM pgqueue.job WHERE id = ANY (%s)", ids)
            detail = f"worker {post.number} alone leaves (id, task, attempt) {left} undone:\n{post.tail()}"
            return [Violation(Rule.LIVES_ON, detail)]

    def _enqueue(self, kinds: list[str], **options: Any) -> list[int]:
        with psycopg.connect(self.url) as connection:
            made = [self._one(connection, kind, options) for kind in kinds]
        self.verdicts.update({key: Verdict.COMMITTED for key, _ in made})
        return [job_id for _, job_id in made]

    def _one(self, connection: psycopg.Connection[Any], kind: str, options: Mapping[str, Any]) -> tuple[int, int]:
        key = next(self._keys)
        job_id = TASKS[kind].options(**options).enqueue(key, using=connection)
        connection.execute("INSERT INTO history.intent (key, job_id, kind) VALUES (%s, %s, %s)", [key, job_id, kind])
        return key, job_id

    def _done(self, ids: list[int], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while rows(self.url, "SELECT count(*) FROM pgqueue.archive WHERE id = ANY (%s)", ids) != [(len(ids),)]:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    @contextmanager
    def _frozen(self, posts: list[Post]) -> Iterator[None]:
        for post in posts:
            post.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for post in posts:
                post.signal(signal.SIGCONT)

"""Whatever an operator does to a job at the moment when a worker does something else to it: one of them is first.

Two transactions, in a fixed order: the first has done its work and not committed, the second blocks or passes by, the first
ends. What both were told and what has become of the job must be what comes out when one of them ends before the other
begins; where the second passes by a locked row, as if it had not been there; and as if the first had never been where
that rolls back.
"""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import worker as worker_ops
from tests.conftest import execute, url_of
from tests.waiting import wait_until
from tests.workers import PATIENCE

WORKER_ID = 4711
BLOCKED = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
PLACES = """
    SELECT 'job', CASE WHEN lease_id IS NOT NULL THEN 'running' WHEN run_at IS NOT NULL THEN 'scheduled' ELSE 'ready' END,
           attempt, lost, priority, cancel_requested
    FROM pgqueue.job WHERE id = %(id)s
    UNION ALL SELECT 'dead_letter', '', attempt, lost, priority, false FROM pgqueue.dead_letter WHERE id = %(id)s
    UNION ALL SELECT 'archive', state, attempt, lost, priority, false FROM pgqueue.archive WHERE id = %(id)s
"""


@dataclasses.dataclass
class One:
    """A job on a queue of its own."""

    id: int
    queue: str
    job: Any = None

    @property
    def claimed(self) -> pgqueue.Job:
        assert isinstance(self.job, pgqueue.Job)
        return self.job


Act = Callable[[pgqueue.PgQueue, psycopg.Connection[Any], One], Any]


def settle(method: str, *args: Any, **options: Any) -> Act:
    def act(pq: pgqueue.PgQueue, connection: psycopg.Connection[Any], one: One) -> Any:
        try:
            getattr(pq, method)(one.claimed, *args, using=connection, **options)
        except pgqueue.LeaseLost as lost:
            return [job.id for job in lost.jobs] == [one.id] and "lost"
        return "done"

    return act


def by_hand(statement: str) -> Act:
    return lambda pq, connection, one: connection.execute(statement.encode(), [one.id]).rowcount


def rescue(pq: pgqueue.PgQueue, connection: psycopg.Connection[Any], one: One) -> str | None:
    fates = pq.rescue(one.queue, using=connection)._asdict()
    return next((fate for fate, ids in fates.items() if ids == [one.id]), None)


def beat(pq: pgqueue.PgQueue, connection: psycopg.Connection[Any], one: One) -> str:
    token = one.claimed.token
    ours = pq.run(worker_ops.beat_leases(WORKER_ID, one.queue, [token], lease=30), using=connection)
    return "lost" if token not in ours else "extended" if ours[token].extended else "passed by"


ACTIONS: dict[str, Act] = {
    "cancel": lambda pq, connection, one: pq.cancel(one.id, using=connection).get(one.id),
    "redrive": lambda pq, connection, one: len(pq.redrive(ids=one.id, using=connection)),
    "purge": lambda pq, connection, one: pq.purge(ids=one.id, using=connection),
    "delete": by_hand("DELETE FROM pgqueue.job WHERE id = %s"),
    "delete the dead letter": by_hand("DELETE FROM pgqueue.dead_letter WHERE id = %s"),
    "delete from the archive": by_hand("DELETE FROM pgqueue.archive WHERE id = %s"),
    "change the priority": by_hand("UPDATE pgqueue.job SET priority = 50 WHERE id = %s"),
}
MOVES: dict[str, Act] = {
    "claim": lambda pq, connection, one: len(pq.claim(one.queue, limit=5, using=connection)),
    "promote": lambda pq, connection, one: len(pq.promote(one.queue, using=connection)),
    "complete": settle("complete"),
    "retry": settle("fail", "broken", delay=0),
    "bury": settle("fail", pgqueue.DeadLetter("hopeless")),
    "snooze": settle("snooze", 3600),
    "release": settle("release"),
    "extend": settle("extend", 60),
    "rescue": rescue,
    "beat": beat,
}
PASSES_BY = {"claim": 0, "promote": 0, "rescue": None, "redrive": 0, "purge": 0, "beat": "passed by"}
"""What is said by those who do not wait for a row that somebody has locked."""
SETTLES = ("complete", "retry", "bury", "snooze", "release", "extend", "rescue", "beat")
LIVE = ("cancel", "delete", "change the priority", "redrive")
MOMENTS = {
    "ready": ((*LIVE, "delete from the archive"), ("claim",)),
    "scheduled": ((*LIVE, "delete from the archive"), ("promote", "claim")),
    "running": (LIVE, SETTLES),
    "running for the last time": (tuple(ACTIONS), SETTLES),
    "running and to be cancelled": (LIVE, SETTLES),
    "dead": (("cancel", "redrive", "purge", "delete", "delete the dead letter"), ("claim", "rescue")),
    "archived": (("cancel", "redrive", "delete", "delete from the archive"), ("complete", "rescue")),
}
MATRIX = [
    (state, action, other)
    for state, (actions, moves) in MOMENTS.items()
    for number, action in enumerate(actions)
    for other in (*moves, *actions[number:])
]


@pytest.fixture(scope="module")
def shared(server_url: str, template: str) -> Iterator[str]:
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield url_of(server_url, name)
    execute(server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture(scope="module")
def stage(shared: str) -> Iterator[Stage]:
    with (
        pgqueue.PgQueue(shared) as pq,
        psycopg.connect(shared, autocommit=True) as admin,
        psycopg.connect(shared) as first,
        psycopg.connect(shared) as second,
    ):
        yield Stage(pq, admin, first, second)


Place = list[tuple[Any, ...]]
Seen = tuple[Any, Any, Place]


class Stage:
    """Where two transactions meet at one job."""

    def __init__(
        self,
        pq: pgqueue.PgQueue,
        admin: psycopg.Connection[Any],
        first: psycopg.Connection[Any],
        second: psycopg.Connection[Any],
    ) -> None:
        self.pq = pq
        self.admin = admin
        self.first = first
        self.second = second
        self.number = 0
        self.known: dict[tuple[str, ...], tuple[list[Any], Place]] = {}

    def one(self, state: str) -> One:
        """A new job that is in this state."""
        self.number += 1
        queue = f"q{self.number}"
        most = 1 if state == "running for the last time" else 5
        delay = 3600 if state == "scheduled" else None
        one = One(self.pq.enqueue("work", queue=queue, max_attempts=most, delay=delay), queue)
        if state == "scheduled":
            self.admin.execute("UPDATE pgqueue.job SET run_at = now() - interval '1 s' WHERE id = %s", [one.id])
        elif state != "ready":
            [one.job] = self.pq.claim(queue)
            self.admin.execute("UPDATE pgqueue.lease SET worker_id = %s WHERE queue = %s", [WORKER_ID, queue])
            self._expire(one)
        if state == "running and to be cancelled":
            assert self.pq.cancel(one.id) == {one.id: "requested"}
        elif state == "dead":
            self.pq.fail(one.claimed, pgqueue.DeadLetter("hopeless"))
        elif state == "archived":
            self.pq.complete(one.claimed)
        return one

    def serial(self, state: str, *acts: str) -> tuple[list[Any], Place]:
        """What is answered, and what becomes of the job, when each ends before the next begins: always the same."""
        if (state, *acts) not in self.known:
            self.known[state, *acts] = self._serial(state, *acts)
        return self.known[state, *acts]

    def _serial(self, state: str, *acts: str) -> tuple[list[Any], Place]:
        one = self.one(state)
        answers = []
        for act in acts:
            answers.append(self._named(act, self.first, one))
            self.first.commit()
        return answers, self.place(one)

    def race(self, state: str, first: str, second: str, *, commit: bool) -> Seen:
        """The second begins when the first has done its work, and the first ends when the second blocks or is done."""
        one = self.one(state)
        answer = self._named(first, self.first, one)
        answers: list[Any] = []

        def act() -> None:
            try:
                answers.append(self._named(second, self.second, one))
                self.second.commit()
            except BaseException as error:
                self.second.rollback()
                answers.append(error)

        thread = threading.Thread(target=act)
        pid = self.second.info.backend_pid
        thread.start()
        try:
            wait_until(
                lambda: not thread.is_alive() or self.admin.execute(BLOCKED, [pid]).fetchone() == (True,),
                PATIENCE,
                f"{second} blocks or is done",
            )
        finally:
            self.first.commit() if commit else self.first.rollback()
            thread.join(PATIENCE)
        assert not thread.is_alive()
        seen = (answer, *answers, self.place(one))
        self.drain(one)
        return seen

    def place(self, one: One) -> Place:
        """Where the job is, and how; never in two places."""
        found = self.admin.execute(PLACES, {"id": one.id}).fetchall()
        assert len(found) <= 1, found
        return found

    def drain(self, one: One) -> None:
        """What is live can be brought to an end, and nothing of it stays behind."""
        self._expire(one)
        self.pq.rescue(one.queue)
        self.admin.execute(
            "UPDATE pgqueue.job SET run_at = now() - interval '1 s' WHERE queue = %s AND run_at IS NOT NULL",
            [one.queue],
        )
        self.pq.promote(one.queue)
        jobs = self.pq.claim(one.queue, limit=5)
        self.pq.complete(jobs)
        [left] = self.admin.execute(
            "SELECT (SELECT count(*) FROM pgqueue.job WHERE queue = %(q)s),"
            " (SELECT count(*) FROM pgqueue.lease WHERE queue = %(q)s)",
            {"q": one.queue},
        ).fetchall()
        assert left == (0, 0)

    def _named(self, act: str, connection: psycopg.Connection[Any], one: One) -> Any:
        return (ACTIONS.get(act) or MOVES[act])(self.pq, connection, one)

    def _expire(self, one: One) -> None:
        self.admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 s' WHERE queue = %s", [one.queue])


@pytest.mark.parametrize(("state", "action", "other"), MATRIX)
def test_of_an_operator_and_whoever_else_is_at_the_job_one_is_first(
    state: str, action: str, other: str, stage: Stage
) -> None:
    _, untouched = stage.serial(state)
    for first, second in dict.fromkeys([(action, other), (other, action)]):
        [alone], left = stage.serial(state, first)
        [undisturbed], would_leave = stage.serial(state, second)
        [early, late], after = stage.serial(state, first, second)
        [before, behind], reverse = stage.serial(state, second, first)
        passed = [PASSES_BY[second]] if second in PASSES_BY else []

        seen = stage.race(state, first, second, commit=True)
        allowed = [(early, late, after), (behind, before, reverse), *((alone, said, left) for said in passed)]
        assert seen in allowed, f"{first}, then {second}, which was committed"

        seen = stage.race(state, first, second, commit=False)
        allowed = [(alone, undisturbed, would_leave), *((alone, said, untouched) for said in passed)]
        assert seen in allowed, f"{first}, then {second}, which was rolled back"

"""Whatever is done to jobs, in whatever order: none vanishes, none has two owners, none is stuck, and all sums agree.

A model in plain Python is led through the same steps as a real database; after every step both must tell the same story.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import pgqueue
from tests.conftest import execute, url_of

QUEUES = ("a", "b")
LATER = 3600.0
LONG = 3600.0
CLEAR = "TRUNCATE pgqueue.job, pgqueue.lease, pgqueue.dead_letter, pgqueue.archive, pgqueue.queue"
# Hypothesis derandomises by itself where it sees that it runs in CI: its profile "ci" is then the default of these.
SETTINGS = settings(
    max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)

Place = tuple[int, int, int]
Picks = list[tuple[str, int]]
PICK = st.tuples(st.sampled_from(["current", "current", "any"]), st.integers(0, 99))
BATCHES = st.lists(PICK, min_size=1, max_size=4)
KINDS = st.sampled_from(["complete", "fail", "bury", "snooze", "release", "extend"])
NUMBERS = st.lists(st.integers(0, 99), min_size=1, max_size=3)
DELAYS = st.sampled_from([0.0, LATER])


@dataclasses.dataclass
class Expected:
    """What the model knows of a job. `place`: its rank in line; equal places may come in either order."""

    id: int
    queue: str
    priority: int
    max_attempts: int
    place: Place
    state: str = "ready"
    attempt: int = 0
    lost: int = 0
    token: int | None = None
    last_token: int = 0
    cancel: bool = False
    due: int | None = None
    died: int = 0

    @property
    def line(self) -> tuple[int, Place]:
        return (-self.priority, self.place)


@pytest.fixture(scope="module")
def shared_database(server_url: str, template: str) -> Iterator[str]:
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    yield url_of(server_url, name)
    execute(server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.mark.timeout(420)  # takes ten seconds; a failure may be shrunk for five minutes
def test_no_sequence_of_operations_breaks_a_promise(shared_database: str) -> None:
    with (
        pgqueue.PgQueue(shared_database) as operator,
        psycopg.connect(shared_database, autocommit=True) as admin,
        psycopg.connect(shared_database, autocommit=True) as first,
        psycopg.connect(shared_database, autocommit=True) as second,
    ):
        run_state_machine_as_test(lambda: LifeCycle(operator, admin, (first, second)), settings=SETTINGS)


class LifeCycle(RuleBasedStateMachine):
    """`claims`: every claimed job as its owner saw it, so most of them are stale."""

    def __init__(
        self, operator: pgqueue.PgQueue, admin: psycopg.Connection[Any], connections: Sequence[psycopg.Connection[Any]]
    ) -> None:
        super().__init__()
        admin.execute(CLEAR)
        self.operator = operator
        self.admin = admin
        # New clients for every example, since they remember how far they claimed; their connections are kept.
        self.clients = [(pgqueue.PgQueue("postgresql:///never-opened"), connection) for connection in connections]
        self.jobs: dict[int, Expected] = {}
        self.claims: list[pgqueue.Job] = []
        self.expired: set[int] = set()
        self.paused: set[str] = set()
        self.step = 0

    # Into the queue

    @rule(
        queue=st.sampled_from(QUEUES),
        number=st.sampled_from([0, 2, 5, 9]),
        priority=st.sampled_from([0, 0, -100, 7, 100]),
        max_attempts=st.integers(1, 3),
        delay=st.sampled_from([None, None, 0.0, LATER, LATER]),
    )
    def enqueue(self, queue: str, number: int, priority: int, max_attempts: int, delay: float | None) -> None:
        task = self._task().options(queue=queue, priority=priority, max_attempts=max_attempts, delay=delay)
        new = task.enqueue_many([()] * number, using=self.clients[0][1])
        self._arrived(new, queue, priority, max_attempts, delay)

    @rule(queue=st.sampled_from(QUEUES), delay=st.sampled_from([None, LATER]))
    def enqueue_one(self, queue: str, delay: float | None) -> None:
        new = [self._task().options(queue=queue, max_attempts=2, delay=delay).enqueue(using=self.clients[1][1])]
        self._arrived(new, queue, 0, 2, delay)

    def _task(self) -> Any:
        known = self.clients[0][0].tasks.get("work")
        return known or self.clients[0][0].task(name="work")(lambda: None)

    def _arrived(self, new: list[int], queue: str, priority: int, max_attempts: int, delay: float | None) -> None:
        assert new == sorted(set(new))
        assert not set(new) & set(self.jobs)
        self.step += 1
        for number, job_id in enumerate(new):
            job = Expected(job_id, queue, priority, max_attempts, (self.step, number, 0))
            job.state = "scheduled" if delay else "ready"
            self.jobs[job_id] = job

    # Claims

    @rule(
        client=st.integers(0, 1),
        queues=st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]),
        limit=st.integers(1, 6),
    )
    def claim(self, client: int, queues: tuple[str, ...], limit: int) -> None:
        """A client that remembers how far it claimed may overlook a better place for a moment, never that there is one."""
        pq, connection = self.clients[client]
        taken = pq.claim(queues, limit=limit, lease=LONG, using=connection)
        assert len(taken) == len(self._next(queues, limit))
        self._claimed(taken, queues)

    @rule(queues=st.sampled_from([("a",), ("b",), ("a", "b")]), limit=st.integers(1, 6))
    def claim_as_a_newcomer(self, queues: tuple[str, ...], limit: int) -> None:
        """A client without a memory takes exactly those that stand in front."""
        newcomer = pgqueue.PgQueue("postgresql:///never-opened")
        taken = newcomer.claim(queues, limit=limit, lease=LONG, using=self.admin)
        assert [self.jobs[job.id].line for job in taken] == [job.line for job in self._next(queues, limit)]
        self._claimed(taken, queues)

    def _next(self, queues: tuple[str, ...], limit: int) -> list[Expected]:
        line: list[Expected] = []
        for queue in queues:
            ready = [job for job in self.jobs.values() if job.state == "ready" and job.queue == queue]
            line += sorted(ready, key=lambda job: job.line) if queue not in self.paused else []
        return line[:limit]

    def _claimed(self, taken: list[pgqueue.Job], queues: tuple[str, ...]) -> None:
        order = [(queues.index(job.queue), self.jobs[job.id].line) for job in taken]
        assert order == sorted(order)
        held = {job.token for job in self.jobs.values()}
        for job in taken:
            known = self.jobs[job.id]
            assert known.state == "ready"
            assert job.token > known.last_token
            assert job.token not in held
            known.state, known.token, known.attempt = "running", job.token, known.attempt + 1
            known.last_token = job.token
            assert (job.attempt, job.lost, job.priority) == (known.attempt, known.lost, known.priority)
        self.claims += taken

    # Settles, with tokens that are current or not

    @precondition(lambda self: self.claims)
    @rule(kind=KINDS, picks=BATCHES, client=st.integers(0, 1), delay=DELAYS)
    def settle(self, kind: str, picks: Picks, client: int, delay: float) -> None:
        effects: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], Callable[[Expected], None]]] = {
            "complete": ("complete", (), {}, self._end),
            "fail": ("fail", ("out of ink",), {"delay": delay}, lambda job: self._failed(job, delay)),
            "bury": ("fail", (pgqueue.DeadLetter("hopeless"),), {}, self._die),
            "snooze": ("snooze", (delay,), {}, lambda job: self._back(job, delay, spent=False)),
            "release": ("release", (), {}, lambda job: self._back(job, None, spent=False)),
            "extend": ("extend", (LONG,), {}, lambda job: None),
        }
        batch = self._picked(picks)
        self._settle(batch, client, *effects[kind])
        if kind == "extend":
            newest = {job.id: job.token for job in sorted(batch, key=lambda job: job.token)}
            self.expired -= set(newest.values())

    @rule(client=st.integers(0, 1), endings=st.lists(st.tuples(KINDS, BATCHES, DELAYS), min_size=1, max_size=4))
    def claim_and_settle(self, client: int, endings: list[tuple[str, Picks, float]]) -> None:
        """What a worker does all the time, in one step, so that much of it is seen."""
        self.enqueue("a", 3, 0, 2, None)
        self.claim(client, QUEUES, 4)
        for kind, picks, delay in endings:
            self.everything_holds()
            if self.claims:
                self.settle(kind, picks, client, delay)

    def _settle(
        self,
        batch: list[pgqueue.Job],
        client: int,
        method: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
        effect: Callable[[Expected], None],
    ) -> None:
        pq, connection = self.clients[client]
        current = [job for job in batch if self.jobs[job.id].token == job.token]
        stale = [(job.id, job.token) for job in batch if self.jobs[job.id].token != job.token]
        self.step += 1
        expected = pytest.raises(pgqueue.LeaseLost) if stale else nullcontext()
        with expected as caught:
            getattr(pq, method)(batch, *args, using=connection, **options)
        if stale:
            assert sorted((job.id, job.token) for job in caught.value.jobs) == sorted(stale)
        for job in current:
            effect(self.jobs[job.id])

    def _picked(self, picks: Picks) -> list[pgqueue.Job]:
        """Claims as their owners saw them, most of them of jobs that these still own."""
        current = [job for job in self.claims if self.jobs[job.id].token == job.token]
        pools = {"current": current or self.claims, "any": self.claims}
        chosen = [pools[kind][number % len(pools[kind])] for kind, number in picks]
        return list({(job.id, job.token): job for job in chosen}.values())

    def _end(self, job: Expected, state: str = "archived") -> None:
        job.state, job.token = state, None

    def _die(self, job: Expected) -> None:
        """Buried, unless somebody asked for its cancellation: then it ends as that."""
        self._end(job, "archived" if job.cancel else "dead")
        job.died = self.step

    def _failed(self, job: Expected, delay: float) -> None:
        if job.attempt >= job.max_attempts:
            self._die(job)
        else:
            self._back(job, delay, spent=True)

    def _back(self, job: Expected, delay: float | None, *, spent: bool) -> None:
        """Back in line: `delay` None means to the old place, 0 to the end, more to wait."""
        if job.cancel:
            self._end(job)
            return
        job.token = None
        job.attempt -= 0 if spent else 1
        if delay:
            job.state, job.due = "scheduled", None
        else:
            job.state = "ready"
            job.place = job.place if delay is None else (self.step, 0, 0)

    # What operators and maintenance do

    @precondition(lambda self: self.jobs)
    @rule(numbers=NUMBERS)
    def cancel(self, numbers: list[int]) -> None:
        chosen = self._chosen(numbers)
        known = [self.jobs[job_id] for job_id in chosen]
        waiting = {job.id: "cancelled" for job in known if job.state in ("ready", "scheduled")}
        running = {job.id: "requested" for job in known if job.state == "running"}
        assert self.operator.cancel(chosen) == waiting | running
        for job in known:
            if job.id in waiting:
                self._end(job)
            elif job.id in running:
                job.cancel = True

    @precondition(lambda self: self.claims)
    @rule(picks=BATCHES, at_once=st.booleans())
    def expire(self, picks: Picks, at_once: bool) -> None:
        job = self._picked(picks)[0]
        self.admin.execute(
            "UPDATE pgqueue.lease SET expires_at = clock_timestamp() - interval '1 s' WHERE id = %s", [job.token]
        )
        self.expired.add(job.token)
        if at_once:
            self.rescue(job.queue)

    @rule(queue=st.sampled_from(QUEUES))
    def rescue(self, queue: str) -> None:
        self.step += 1
        held = [job for job in self.jobs.values() if job.token in self.expired and job.queue == queue]
        fates: dict[str, list[int]] = {"returned": [], "dead": [], "cancelled": [], "superseded": []}
        for job in held:
            job.lost += 1
            if job.cancel:
                fates["cancelled"].append(job.id)
                self._end(job)
            elif job.attempt >= job.max_attempts:
                fates["dead"].append(job.id)
                self._die(job)
            else:
                fates["returned"].append(job.id)
                self._back(job, None, spent=True)
        assert {fate: sorted(ids) for fate, ids in self.operator.rescue(queue)._asdict().items()} == fates

    @precondition(lambda self: any(job.state == "scheduled" for job in self.jobs.values()))
    @rule(times=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2)), min_size=1, max_size=6))
    def time_passes_for(self, times: list[tuple[int, int]]) -> None:
        waiting = [job for job in self.jobs.values() if job.state == "scheduled"]
        for number, due in times:
            job = waiting[number % len(waiting)]
            self.admin.execute(
                "UPDATE pgqueue.job SET run_at = '2020-01-01'::timestamptz + %s * interval '1 s' WHERE id = %s",
                [due, job.id],
            )
            job.due = due

    @rule(queue=st.sampled_from(QUEUES))
    def promote(self, queue: str) -> None:
        self.step += 1
        due = [job for job in self.jobs.values() if job.state == "scheduled" and job.queue == queue]
        due = [job for job in due if job.due is not None]
        assert sorted(self.operator.promote(queue)) == sorted(job.id for job in due)
        for job in due:
            assert job.due is not None
            job.state, job.place, job.due = "ready", (self.step, job.due, job.id), None

    @precondition(lambda self: self.jobs)
    @rule(numbers=st.none() | NUMBERS)
    def redrive(self, numbers: list[int] | None) -> None:
        self.step += 1
        chosen = None if numbers is None else self._chosen(numbers)
        dead = self._dead(chosen)
        assert sorted(self.operator.redrive(ids=chosen)) == sorted(job.id for job in dead)
        for job in dead:
            job.state, job.attempt, job.lost, job.cancel = "ready", 0, 0, False
            job.place = (self.step, job.died, 0)

    @precondition(lambda self: self.jobs)
    @rule(numbers=NUMBERS)
    def purge(self, numbers: list[int]) -> None:
        chosen = self._chosen(numbers)
        dead = self._dead(chosen)
        assert self.operator.count_dead_letters(ids=chosen) == len(dead)
        assert self.operator.purge(ids=chosen) == len(dead)
        for job in dead:
            self._end(job, "purged")

    def _chosen(self, numbers: list[int]) -> list[int]:
        known = list(self.jobs)
        return list({known[number % len(known)] for number in numbers})

    def _dead(self, chosen: list[int] | None) -> list[Expected]:
        return [job for job in self.jobs.values() if job.state == "dead" and (chosen is None or job.id in chosen)]

    @rule(queue=st.sampled_from(QUEUES), limit=st.integers(1, 6))
    def pause_claim_and_resume(self, queue: str, limit: int) -> None:
        self.operator.pause(queue)
        self.paused.add(queue)
        self.claim(0, QUEUES, limit)
        assert self.operator.resume(queue)
        self.paused.discard(queue)

    def teardown(self) -> None:
        """Every state has an exit: once the leases have run out, nothing is left that anybody holds."""
        self.admin.execute("UPDATE pgqueue.lease SET expires_at = '2020-01-01'")
        self.expired |= {job.token for job in self.jobs.values() if job.token is not None}
        for queue in QUEUES:
            self.rescue(queue)
        self.everything_holds()
        assert self._rows("SELECT id FROM pgqueue.lease") == []

    # What must hold after every step

    @invariant()
    def everything_holds(self) -> None:
        self.no_job_vanishes()
        self.every_live_job_is_where_the_model_says()
        self.every_running_job_stands_in_exactly_one_lease_and_that_is_its_token()
        self.the_ends_tell_the_attempts_of_the_model()
        self.the_line_is_in_the_order_in_which_jobs_became_ready()

    def no_job_vanishes(self) -> None:
        live, archived, dead = (self._ids(table) for table in ("job", "archive", "dead_letter"))
        purged = [job.id for job in self.jobs.values() if job.state == "purged"]
        assert sorted(live + archived + dead + purged) == sorted(self.jobs)
        assert len(self.jobs) == len(live) + len(archived) + len(dead) + len(purged)
        assert sorted(archived) == self._in("archived")
        assert sorted(dead) == self._in("dead")

    def every_live_job_is_where_the_model_says(self) -> None:
        rows = self._rows(
            "SELECT id, queue, priority, attempt, max_attempts, lost, lease_id, cancel_requested,"
            " CASE WHEN position IS NOT NULL AND run_at IS NULL AND lease_id IS NULL THEN 'ready'"
            "      WHEN position IS NOT NULL AND run_at IS NULL THEN 'running'"
            "      WHEN position IS NULL AND run_at IS NOT NULL AND lease_id IS NULL THEN 'scheduled'"
            "      ELSE 'nowhere' END"
            " FROM pgqueue.job ORDER BY id"
        )
        live = [job for job in self.jobs.values() if job.state in ("ready", "running", "scheduled")]
        assert rows == [
            (job.id, job.queue, job.priority, job.attempt, job.max_attempts, job.lost, job.token, job.cancel, job.state)
            for job in sorted(live, key=lambda job: job.id)
        ]
        assert all(0 <= job.attempt <= job.max_attempts for job in live)

    def every_running_job_stands_in_exactly_one_lease_and_that_is_its_token(self) -> None:
        running = [(job.id, job.queue, job.token) for job in self.jobs.values() if job.state == "running"]
        held = self._rows(
            "SELECT j.id, l.queue, l.id FROM pgqueue.lease AS l CROSS JOIN LATERAL unnest(l.job_ids) AS held(id)"
            " JOIN pgqueue.job AS j ON j.id = held.id AND j.lease_id = l.id AND j.queue = l.queue ORDER BY j.id"
        )
        assert held == sorted(running)

    def the_ends_tell_the_attempts_of_the_model(self) -> None:
        ended = [job for job in self.jobs.values() if job.state in ("archived", "dead")]
        rows = self._rows(
            "SELECT id, attempt, lost FROM pgqueue.archive UNION ALL"
            " SELECT id, attempt, lost FROM pgqueue.dead_letter ORDER BY id"
        )
        assert rows == [(job.id, job.attempt, job.lost) for job in sorted(ended, key=lambda job: job.id)]

    def the_line_is_in_the_order_in_which_jobs_became_ready(self) -> None:
        for queue in QUEUES:
            line = self._rows(
                "SELECT id FROM pgqueue.job WHERE position IS NOT NULL AND queue = %s ORDER BY position", queue
            )
            places = [self.jobs[job_id].place for (job_id,) in line]
            assert places == sorted(places)

    def _rows(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        return self.admin.execute(statement.encode(), params or None).fetchall()

    def _ids(self, table: str) -> list[int]:
        return [job_id for (job_id,) in self._rows(f"SELECT id FROM pgqueue.{table}")]

    def _in(self, state: str) -> list[int]:
        return sorted(job.id for job in self.jobs.values() if job.state == state)

"""Growth curves: what a claimed job costs beside ever more of something else.

The databases of all points of a curve exist at once and are measured in turn, claim by claim, so that what the machine does
meanwhile meets all points alike. A point is the median of its claims. What was claimed is completed and replaced.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from pgqueue import PgQueue
from pgqueue.bench.app import PLAIN, message
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage, execute
from pgqueue.bench.values import Metrics

BATCH = 100
TURNS = 40
NEAR = 1000
QUEUES_ASKED = 10
FAR_OVER_NEAR = "far / near"

JOBS = (
    "INSERT INTO pgqueue.job (queue, task, args, priority, position, run_at) SELECT 'bench' || CASE WHEN {queues} > 1 "
    "THEN (n %% {queues})::text ELSE '' END, 'plain', json_build_array(json_build_object('n', n, 'to', 'customer-' || n || "
    "'@example.com', 'subject', 'your order', 'lang', 'en')), n %% {priorities}, {position}, {run_at} "
    "FROM generate_series(1, {number}) AS n"
)
ARCHIVED = (
    "INSERT INTO pgqueue.archive (id, queue, task, args, priority, attempt, lost, state, created_at, finished_at) SELECT "
    "nextval('pgqueue.job_id_seq'), 'bench', 'plain', '[{{}}]', 0, 1, 0, 'completed', clock_timestamp(), clock_timestamp() "
    "FROM generate_series(1, {number}) AS n"
)
DEAD = (
    "INSERT INTO pgqueue.dead_letter (id, queue, task, args, priority, attempt, max_attempts, lost, created_at, reason) "
    "SELECT nextval('pgqueue.job_id_seq'), 'bench', 'plain', '[{{}}]', 0, 1, 1, 0, clock_timestamp(), 'made for a "
    "measurement' FROM generate_series(1, {number}) AS n"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """What grows, in which sizes at scale 1, and whether --scale moves the far end."""

    name: str
    sizes: tuple[int, ...]
    fill: Callable[[Point, int], None]
    scaled: bool = True


class Point:
    """One size of one curve: a database, and a client that claims there."""

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self.size = size
        self.queues = ["bench"]
        self.payload = 0
        self.priorities = 1
        self.costs: list[float] = []
        self.pq = PgQueue(url)
        self.task = self.pq.task(name=PLAIN, queue="bench")(_nothing)

    def insert(self, number: int, *, queues: int = 1, scheduled: bool = False) -> None:
        """Jobs, written by one statement of the server's own."""
        if number:
            position, run_at = ("NULL", "now() + interval '30 days'") if scheduled else ("DEFAULT", "NULL")
            statement = JOBS.format(
                number=number, queues=queues, priorities=self.priorities, position=position, run_at=run_at
            )
            if not scheduled:
                statement = statement.replace("position, run_at)", "run_at)").replace("DEFAULT, ", "")
            execute(self.url, statement.replace("%%", "%"))

    def turn(self, number: int, *, timed: bool) -> None:
        """Claim a batch, complete it, put as much back."""
        queue = self.queues[number % len(self.queues)]
        limit = 10 if self.payload else BATCH
        began = time.perf_counter()
        jobs = self.pq.claim(queue, limit=limit, lease=600)
        spent = time.perf_counter() - began
        if len(jobs) != limit:
            raise Miscount(f"a claim of {limit} brought {len(jobs)}")
        self.pq.complete(jobs)
        task = self.task.options(queue=queue, priority=number % self.priorities)
        task.enqueue_many([(self.message(n),) for n in range(limit)])
        if timed:
            self.costs.append(1e6 * spent / limit)

    def message(self, number: int) -> dict[str, object]:
        """The payload of this point."""
        return message(number) if not self.payload else {"n": number, "text": "x" * self.payload}


def measure(stage: Stage, curve: Curve) -> Metrics:
    """Microseconds per claimed job at every size, and the far end against the near one."""
    sizes = [_scaled(stage, curve, size) for size in curve.sizes]
    sizes = list(dict.fromkeys(sizes))
    turns = max(10, int(TURNS * min(1.0, stage.scale * 2)))
    with ExitStack() as stack:
        points = [Point(stack.enter_context(stage.database()), size) for size in sizes]
        for point in points:
            stack.callback(point.pq.close)
            curve.fill(point, point.size)
        stage.settle()
        for number in range(QUEUES_ASKED + turns):
            for point in points:
                point.turn(number, timed=number >= QUEUES_ASKED)
        costs = {str(point.size): statistics.median(point.costs) for point in points}
    near, far = costs[str(sizes[0])], costs[str(sizes[-1])]
    return {**costs, FAR_OVER_NEAR: far / near}


def _scaled(stage: Stage, curve: Curve, size: int) -> int:
    near, far = curve.sizes[0], curve.sizes[-1]
    if not curve.scaled or size == near:
        return size
    return max(near + 1, int(size * stage.scale)) if far > NEAR else size


def _backlog(point: Point, size: int) -> None:
    point.insert(size)


def _scheduled(point: Point, size: int) -> None:
    point.insert(NEAR)
    point.insert(size, scheduled=True)


def _archive(point: Point, size: int) -> None:
    point.insert(NEAR)
    execute(point.url, ARCHIVED.format(number=size).replace("{{}}", "{}"))


def _dead(point: Point, size: int) -> None:
    point.insert(NEAR)
    execute(point.url, DEAD.format(number=size).replace("{{}}", "{}"))


def _in_flight(point: Point, size: int) -> None:
    point.insert(NEAR + size)
    with PgQueue(point.url) as other:
        for begin in range(0, size, BATCH):
            other.claim("bench", limit=min(BATCH, size - begin), lease=3600)


def _queues(point: Point, size: int) -> None:
    per_queue = 200
    point.insert(per_queue * max(size, 1), queues=size)
    point.queues = [f"bench{n}" for n in range(min(size, QUEUES_ASKED))] if size > 1 else ["bench"]


def _priorities(point: Point, size: int) -> None:
    point.priorities = size
    point.insert(10 * NEAR)


def _payload(point: Point, size: int) -> None:
    point.payload = size
    point.task.enqueue_many((point.message(n),) for n in range(200))


CURVES = (
    Curve("backlog", (1000, 10_000, 100_000, 500_000), _backlog),
    Curve("scheduled jobs", (0, 10_000, 100_000, 500_000), _scheduled),
    Curve("archive", (0, 10_000, 100_000, 500_000), _archive),
    Curve("dead letters", (0, 5000, 50_000), _dead),
    Curve("jobs in flight", (0, 1000, 5000, 20_000), _in_flight, scaled=False),
    Curve("queues", (1, 10, 100, 2000), _queues, scaled=False),
    Curve("priorities", (1, 5, 20, 50), _priorities, scaled=False),
    Curve("payload bytes", (100, 1024, 16 * 1024, 256 * 1024), _payload, scaled=False),
)


def _nothing(message: dict[str, object]) -> None: ...

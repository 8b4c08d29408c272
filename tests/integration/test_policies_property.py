"""The life cycle of jobs with expiry, ageing, pauses of tasks and cancellation in bulk mixed in: the same promises hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import pgqueue
from pgqueue.ops import ageing as ageing_ops
from tests.integration.test_life_cycle_property import (
    NUMBERS,
    QUEUES,
    SETTINGS,
    Expected,
    LifeCycle,
    shared_database,
)

__all__ = ["shared_database"]


@pytest.mark.timeout(420)
def test_no_sequence_of_operations_with_policies_breaks_a_promise(shared_database: str) -> None:
    with (
        pgqueue.PgQueue(shared_database) as operator,
        psycopg.connect(shared_database, autocommit=True) as admin,
        psycopg.connect(shared_database, autocommit=True) as first,
        psycopg.connect(shared_database, autocommit=True) as second,
    ):
        run_state_machine_as_test(
            lambda: Policies(operator, admin, (first, second)), settings=settings(SETTINGS, max_examples=20)
        )


class Policies(LifeCycle):
    """`late`: live jobs that have expired. `marks`: the step of the last tick of ageing, by queue."""

    def __init__(
        self, operator: pgqueue.PgQueue, admin: psycopg.Connection[Any], connections: Sequence[psycopg.Connection[Any]]
    ) -> None:
        super().__init__(operator, admin, connections)
        self.late: set[int] = set()
        self.marks: dict[str, int | None] = {}

    def _next(self, queues: tuple[str, ...], limit: int) -> list[Expected]:
        return [job for job in super()._next(queues, 10**6) if job.id not in self.late][:limit]

    def _end(self, job: Expected, state: str = "archived") -> None:
        super()._end(job, state)
        self.late.discard(job.id)

    @precondition(lambda self: self.jobs)
    @rule(numbers=NUMBERS)
    def grow_too_old(self, numbers: list[int]) -> None:
        chosen = self._chosen(numbers)
        self.admin.execute(
            "UPDATE pgqueue.job SET expires_at = clock_timestamp() - interval '1 s' WHERE id = ANY (%s)", [chosen]
        )
        self.late |= {job_id for job_id in chosen if self.jobs[job_id].state in ("ready", "scheduled", "running")}

    @rule(queue=st.sampled_from(QUEUES))
    def sweep(self, queue: str) -> None:
        late = [self.jobs[job_id] for job_id in sorted(self.late) if self.jobs[job_id].queue == queue]
        swept = [job for job in late if job.state != "running"]
        assert self.operator.expire(queue) == [job.id for job in swept]
        for job in swept:
            self._end(job)

    @rule(queue=st.sampled_from(QUEUES), task=st.sampled_from([None, "work", "other"]))
    def cancel_in_bulk(self, queue: str, task: str | None) -> None:
        known = [job for job in self.jobs.values() if job.queue == queue and task != "other"]
        waiting = [job for job in known if job.state in ("ready", "scheduled")]
        running = [job for job in known if job.state == "running"]
        assert self.operator.count_live(queue=queue, task=task) == (len(waiting), len(running))
        assert self.operator.cancel_all(queue=queue, task=task) == (len(waiting), len(running))
        for job in waiting:
            self._end(job)
        for job in running:
            job.cancel = True

    @rule(queue=st.sampled_from(QUEUES), task=st.sampled_from(["work", "other"]), limit=st.integers(1, 6))
    def pause_a_task_claim_and_resume(self, queue: str, task: str, limit: int) -> None:
        self.operator.pause(queue, task=task, seconds=3600)
        if task == "work":
            self.paused.add(queue)
        self.claim(0, QUEUES, limit)
        assert self.operator.resume(queue, task=task)
        self.paused.discard(queue)

    @rule(queue=st.sampled_from(QUEUES))
    def age(self, queue: str) -> None:
        if queue not in self.marks:
            self.operator.set_queue(queue, ageing=3600)
            self.marks[queue] = None
        self.admin.execute("UPDATE pgqueue.queue SET aged_at = '2020-01-01' WHERE name = %s", [queue])
        in_line = [job for job in self.jobs.values() if job.queue == queue and job.state in ("ready", "running")]
        top = max((job.priority for job in in_line), default=0)
        mark = self.marks[queue]
        old = [job for job in in_line if job.state == "ready" and mark is not None and job.place[0] <= mark]
        moved = [job for job in old if job.priority < top]
        assert self.operator.run(ageing_ops.age(queue)) == len(moved)
        for job in moved:
            job.priority += 1
        self.marks[queue] = self.step
        self.step += 1

"""Read by mypy --strict, never run: what the helpers for tests give, and to whom."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import assert_type

import pgqueue
from pgqueue.testing import (
    Clock,
    Enqueued,
    Ran,
    assert_enqueued,
    assert_enqueued_async,
    bound,
    enqueued_jobs,
    inline,
    install_clock,
    pointed,
    run_jobs,
    run_jobs_async,
)

pq = pgqueue.PgQueue()
apq = pgqueue.AsyncPgQueue()


@pq.task
def work(number: int) -> str:
    return str(number)


assert_type(assert_enqueued(work, 7, queue="default", times=1), list[Enqueued])
assert_type(assert_enqueued("work", kwargs={}, pq=pq), list[Enqueued])
assert_type(enqueued_jobs(pq, task=work), list[Enqueued])
assert_type(run_jobs(pq, queues=["default"], limit=5), list[Ran])

with pointed(pq, "postgresql://") as same, bound(same, object()) as the_same, inline(pq) as ran:
    assert_type(same, pgqueue.PgQueue)
    assert_type(the_same, pgqueue.PgQueue)
    assert_type(ran, list[Ran])

clock = install_clock("postgresql://")
assert_type(clock, Clock)
assert_type(clock.freeze(datetime(2030, 1, 1, tzinfo=UTC)), datetime)
assert_type(clock.move(hours=1.5), datetime)


async def asynchronous() -> None:
    with pointed(apq, "postgresql://") as same:
        assert_type(same, pgqueue.AsyncPgQueue)
    assert_type(await run_jobs_async(apq), list[Ran])
    assert_type(await assert_enqueued_async("work", pq=apq), list[Enqueued])
    run_jobs(apq)  # type: ignore[arg-type]

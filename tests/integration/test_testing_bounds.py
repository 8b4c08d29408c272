"""pgqueue.testing where it is used in a wrong way, or for more than it can hold: one clear sentence, or an end."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.testing import (
    TooManyJobs,
    assert_enqueued,
    bound,
    enqueued_jobs_async,
    inline,
    install_clock,
    pointed,
    run_jobs,
    run_jobs_async,
)


async def test_concurrent_enqueues_of_a_bound_async_queue_take_turns(database: str) -> None:
    apq = pgqueue.AsyncPgQueue(database)

    @apq.task
    async def many(number: int) -> None:
        if number == 0:
            await asyncio.gather(*(many.enqueue(one) for one in range(1, 21)))

    async with await psycopg.AsyncConnection.connect(database) as connection:
        with bound(apq, connection):
            ids = await asyncio.gather(*(apq.enqueue("x", queue="g") for _ in range(20)), apq.status())
            assert len(set(ids[:20])) == 20
            assert len(await enqueued_jobs_async(apq, queue="g")) == 20
            await many.enqueue(0)
            assert len(await run_jobs_async(apq, queues=["default"])) == 21
        await connection.rollback()
    assert await apq.jobs() == []
    await apq.close()


def test_a_state_that_is_none_is_refused(pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work() -> None: ...

    assert assert_enqueued(work, state="ready", times=0) == []
    for wrong in ("redy", "completed", ""):
        with pytest.raises(pgqueue.ConfigurationError, match="state is one of ready, scheduled, blocked, running"):
            assert_enqueued(work, state=wrong, times=0)


def test_the_limit_holds_while_jobs_of_schedules_are_made(database: str) -> None:
    clock = install_clock(database)
    clock.freeze(datetime(2030, 6, 1, tzinfo=UTC))
    with pgqueue.PgQueue(database) as pq:

        @pq.schedule(every=60, missed="all")
        @pq.task(queue="minutes")
        def work() -> None: ...

        run_jobs(pq)
        clock.move(minutes=30)
        assert len(run_jobs(pq)) == 30
        clock.move(days=400)
        for queues in (None, ["elsewhere"]):
            with pytest.raises(TooManyJobs, match="schedules have made more than 40 jobs"):
                run_jobs(pq, limit=40, queues=queues)
            assert pq.status(["minutes"])[0].ready <= 2000
        assert run_jobs(pq, queues=["elsewhere"], schedules=False) == []
    clock.close()


@pytest.mark.parametrize("given", [None, "a text", object()])
def test_what_is_no_queue_object_is_refused(given: Any) -> None:
    pq = pgqueue.PgQueue("postgresql://nobody@/nothing?host=/nowhere")
    for use in (
        lambda: run_jobs(given),
        lambda: asyncio.run(run_jobs_async(given)),
        lambda: pointed(given, "postgresql://").__enter__(),
        lambda: bound(given, None).__enter__(),
        lambda: inline(given).__enter__(),
    ):
        with pytest.raises(pgqueue.ConfigurationError, match=r"this needs the queue object.* got") as caught:
            use()
        assert ("pgqueue_app" in str(caught.value)) == (given is None)

    @pq.task(name="send")
    def work() -> None: ...

    with pytest.raises(pgqueue.ConfigurationError, match=r"not a task of it \(send\)"):
        run_jobs(work)  # type: ignore[arg-type]

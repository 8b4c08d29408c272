"""One suite over every kind of connection that a caller may own: the whole life of a job, commit and rollback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.callers import OPENERS, Caller, open_caller

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization")


@pytest.fixture(params=list(OPENERS))
async def caller(request: pytest.FixtureRequest, database: str) -> AsyncIterator[Caller]:
    async with open_caller(request.param, database) as opened:
        yield opened


@pytest.fixture
def look(admin: psycopg.Connection[Any]) -> Any:
    """Rows of a table of ours as another session sees them."""

    def rows(what: str) -> list[tuple[Any, ...]]:
        return admin.execute(f"SELECT {what}".encode()).fetchall()

    return rows


def make_task(caller: Caller, **options: Any) -> Any:
    def work(number: int, *, note: str = "") -> None: ...

    return caller.queue.task(name="work", queue="q", **options)(work)


async def test_a_job_appears_with_the_callers_commit_and_not_before(caller: Caller, look: Any) -> None:
    task = make_task(caller)
    job_id = await caller.call(task.enqueue, 1, note="é😀")
    assert look("count(*) FROM pgqueue.job") == [(0,)]
    await caller.commit()
    assert look("id, args::text, kwargs::text FROM pgqueue.job") == [(job_id, "[1]", '{"note":"é😀"}')]


async def test_a_rolled_back_enqueue_never_existed(caller: Caller, look: Any) -> None:
    task = make_task(caller)
    await caller.call(task.enqueue, 1)
    await caller.call(task.enqueue_many, [(number,) for number in range(10)])
    await caller.rollback()
    await caller.execute("SELECT 1")
    await caller.commit()
    assert look("count(*) FROM pgqueue.job") == [(0,)]


async def test_the_whole_life_of_jobs_runs_in_the_callers_transaction(caller: Caller, look: Any) -> None:
    task = make_task(caller, max_attempts=2)
    ids = await caller.call(task.enqueue_many, [(number,) for number in range(8)])
    await caller.commit()
    jobs = await caller.do("claim", "q", limit=8, lease=60)
    assert [job.id for job in jobs] == ids
    assert [job.args for job in jobs] == [[number] for number in range(8)]
    await caller.do("complete", jobs[:2])
    await caller.do("fail", jobs[2], "out of ink", delay=0)
    await caller.do("snooze", jobs[3], 3600)
    await caller.do("release", jobs[4])
    await caller.do("extend", jobs[5:], 600)
    assert await caller.do("cancel", [ids[3], ids[5]]) == {ids[3]: "cancelled", ids[5]: "requested"}
    await caller.commit()
    assert look("id, state FROM pgqueue.archive ORDER BY id") == [
        (ids[0], "completed"), (ids[1], "completed"), (ids[3], "cancelled")]  # fmt: skip
    assert look("id, attempt, lease_id IS NULL FROM pgqueue.job ORDER BY id") == [
        (ids[2], 1, True), (ids[4], 0, True), (ids[5], 1, False), (ids[6], 1, False), (ids[7], 1, False)]  # fmt: skip
    again = await caller.do("claim", "q", limit=8)
    assert [job.id for job in again] == [ids[4], ids[2]]
    await caller.do("fail", again[1], ValueError("still no ink"))
    await caller.commit()
    assert look("id, reason FROM pgqueue.dead_letter") == [(ids[2], "ValueError: still no ink")]
    assert await caller.do("redrive", ids=[ids[2]]) == [ids[2]]
    await caller.commit()
    assert look("attempt, jsonb_array_length(errors) FROM pgqueue.job WHERE lease_id IS NULL AND attempt = 0") == [
        (0, 2)
    ]


async def test_rescue_promotion_redrive_and_purge_run_in_the_callers_transaction(caller: Caller, look: Any) -> None:
    task = make_task(caller, max_attempts=1)
    lost, due = await caller.call(task.enqueue, 1), await caller.call(task.options(delay=3600).enqueue, 2)
    await caller.do("claim", "q", lease=60)
    await caller.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    await caller.execute("UPDATE pgqueue.job SET run_at = now() - interval '1 second' WHERE run_at IS NOT NULL")
    await caller.commit()
    assert (await caller.do("rescue", "q")).dead == [lost]
    assert await caller.do("promote", "q") == [due]
    assert await caller.do("redrive", ids=[lost]) == [lost]
    await caller.rollback()
    assert look("(SELECT count(*) FROM pgqueue.dead_letter), (SELECT count(*) FROM pgqueue.lease)") == [(0, 1)]
    assert (await caller.do("rescue", "q")).dead == [lost]
    assert await caller.do("promote", "q") == [due]
    assert await caller.do("purge", ids=[lost]) == 1
    await caller.commit()
    assert look("id, position IS NOT NULL FROM pgqueue.job") == [(due, True)]
    assert look("count(*) FROM pgqueue.dead_letter") == [(0,)]


async def test_a_rolled_back_completion_is_as_if_it_never_happened(caller: Caller, look: Any) -> None:
    task = make_task(caller)
    job_id = await caller.call(task.enqueue, 1)
    await caller.commit()
    [job] = await caller.do("claim", "q", lease=60)
    await caller.commit()
    await caller.do("complete", job)
    await caller.rollback()
    assert look("id, lease_id FROM pgqueue.job") == [(job_id, job.token)]
    await caller.do("complete", job)
    await caller.commit()
    assert look("count(*) FROM pgqueue.job") == [(0,)]
    assert look("count(*) FROM pgqueue.lease") == [(0,)]


async def test_a_refused_enqueue_leaves_the_transaction_usable(caller: Caller, look: Any) -> None:
    task = make_task(caller)
    first = await caller.call(task.enqueue, 1)
    for wrong in (float("nan"), "\0", "\ud800", b"", {1: 2}, 2**70):
        with pytest.raises(pgqueue.PayloadError):
            await caller.call(task.enqueue, wrong)
    with pytest.raises(pgqueue.ArgumentsDoNotBind):
        await caller.call(task.enqueue)
    second = await caller.call(task.enqueue, 2)
    await caller.commit()
    assert look("id FROM pgqueue.job ORDER BY id") == [(first,), (second,)]


async def test_a_lost_lease_is_said_and_leaves_the_transaction_usable(caller: Caller, look: Any) -> None:
    task = make_task(caller)
    await caller.call(task.enqueue, 1)
    await caller.commit()
    [job] = await caller.do("claim", "q", lease=60)
    await caller.do("release", job)
    for method, extra in (("complete", ()), ("fail", ("x",)), ("snooze", (1,)), ("release", ()), ("extend", (9,))):
        with pytest.raises(pgqueue.LeaseLost) as caught:
            await caller.do(method, job, *extra)
        assert caught.value.jobs == (job,)
    await caller.commit()
    assert look("attempt, lease_id FROM pgqueue.job") == [(0, None)]


async def test_delays_start_at_the_call_and_not_at_the_start_of_a_long_transaction(caller: Caller, look: Any) -> None:
    task = make_task(caller)
    await caller.execute("SELECT pg_sleep(0.3)")
    await caller.call(task.options(delay=100).enqueue, 1)
    await caller.call(task.options(run_at=datetime.now(UTC) + timedelta(hours=1)).enqueue, 2)
    await caller.call(task.options(run_at=datetime(2001, 1, 1, tzinfo=UTC)).enqueue, 3)
    await caller.commit()
    delayed, later, past = look("run_at - created_at, position IS NULL FROM pgqueue.job ORDER BY id")
    assert delayed == (timedelta(seconds=100), True)
    assert timedelta(minutes=59) < later[0] < timedelta(minutes=61)
    assert past == (None, False)


async def test_nothing_of_the_callers_session_is_changed(caller: Caller) -> None:
    task = make_task(caller)
    await caller.call(task.enqueue, 1)
    jobs = await caller.do("claim", "q")
    await caller.do("complete", jobs)
    result = await caller.execute("SELECT current_setting('synchronous_commit')")
    if result is not None:
        row = result.fetchone()
        row = await row if hasattr(row, "__await__") else row
        value = next(iter(row.values())) if isinstance(row, dict) else row[0]
        assert value == "on"

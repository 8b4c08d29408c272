"""What a batch handler may do besides: results, middleware, settling by hand, one transaction for the whole batch."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.batches import LONG, define, rows, take_away
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

Admin = psycopg.Connection[Any]
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])


# What a handler may ask and do


def test_in_a_batch_there_is_no_current_job_and_what_is_inherited_from_one_is_not(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    said: list[str] = []

    def body(jobs: pgqueue.Batch) -> None:
        try:
            pgqueue.current_job()
        except pgqueue.PgQueueError as error:
            said.append(str(error))
        pq.enqueue("later", queue="later")

    pq.middleware(pgqueue.InheritHeaders("tenant"))
    define(pq, "plain", body).options(headers={"tenant": "acme"}).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive")
    assert said == ["current_job() is for the handler of one job: a batch handler asks the jobs that it was given"]
    assert rows(admin, "task, headers") == [("later", None)]


@COLOURS
def test_a_job_of_a_batch_that_its_handler_settles_by_hand_is_left_to_it(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    said: list[str] = []

    def body(jobs: pgqueue.Batch) -> None:
        pq.complete(jobs[0].job)
        pq.snooze([jobs[1].job, jobs[2].job], 1000)
        try:
            jobs[1].fail("too late")
        except pgqueue.PgQueueError as error:
            said.append(str(error))
        raise ValueError("for the others")

    ids = define(pq, colour, body, batch=4, batch_wait=LONG).enqueue_many([()] * 4)
    with running(pq) as watched:
        wait_for_count(admin, 1, "archive", f"id = {ids[0]}")
        wait_for_count(admin, 1, "job", f"id = {ids[3]} AND errors->0->>'type' = 'ValueError'")
        wait_for_count(admin, 2, "job", "run_at IS NOT NULL AND attempt = 0 AND errors IS NULL")
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker knows")
        assert not watched.seen(EventName.LEASE_LOST)
    assert said == [
        "this job was settled by its handler already, in a transaction block or by hand: an answer comes too late"
    ]


class Wraps(pgqueue.Middleware):
    """Says what it wraps; `swallows` what the handler raises."""

    def __init__(self, name: str, said: list[Any], *, swallows: bool = False) -> None:
        self.name, self.said, self.swallows = name, said, swallows

    def run(self, job: pgqueue.CurrentJob, proceed: Callable[[], Any]) -> Any:
        self.said.append("the wrapping of a single job")
        return proceed()

    def run_batch(self, batch: pgqueue.Batch, proceed: Callable[[], Any]) -> Any:
        self.said.append(f"{self.name} before {len(batch)}")
        try:
            result = proceed()
        except Exception:
            if not self.swallows:
                raise
            return None
        self.said.append(f"{self.name} after {result}")
        return result

    async def run_batch_async(self, batch: pgqueue.Batch, proceed: Callable[[], Awaitable[Any]]) -> Any:
        self.said.append(f"{self.name} before {len(batch)}")
        try:
            result = await proceed()
        except Exception:
            if not self.swallows:
                raise
            return None
        self.said.append(f"{self.name} after {result}")
        return result


@COLOURS
def test_middleware_is_wrapped_around_the_call_of_a_batch(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    said: list[Any] = []
    for name in ("outer", "inner"):
        pq.middleware(Wraps(name, said))
    define(pq, colour, len, batch=2, batch_wait=LONG).enqueue_many([()] * 2)
    with running(pq):
        wait_for_count(admin, 2, "archive", "state = 'completed'")
    assert said == ["outer before 2", "inner before 2", "inner after 2", "outer after 2"]


@COLOURS
def test_a_middleware_cannot_make_the_jobs_of_a_batch_done(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.middleware(Wraps("swallows", [], swallows=True))

    def body(jobs: pgqueue.Batch) -> None:
        raise KeyError("not done")

    define(pq, colour, body, batch=2, batch_wait=LONG).enqueue_many([()] * 2)
    with running(pq):
        wait_for_count(admin, 2, "job", "errors->0->>'type' = 'KeyError' AND run_at IS NOT NULL")


def results_of(pq: pgqueue.PgQueue, ids: list[int]) -> list[Any]:
    found = pq.wait(ids, timeout=PATIENCE)
    return [found[job_id].value if found[job_id].value_json else found[job_id].error for job_id in ids]


@COLOURS
def test_a_batch_handler_returns_one_result_per_job(colour: str, pq: pgqueue.PgQueue) -> None:
    def body(jobs: pgqueue.Batch) -> list[Any]:
        jobs[1].set_result("set")
        jobs[2].complete("said")
        return [{"number": job.args[0]} for job in jobs]

    ids = define(pq, colour, body, batch=4, batch_wait=LONG, keep_result=True).enqueue_many(
        [(number,) for number in range(4)]
    )
    with running(pq):
        assert results_of(pq, ids) == [{"number": 0}, "set", "said", {"number": 3}]


def test_results_that_do_not_fit_their_batch_fail_no_finished_work(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def body(jobs: pgqueue.Batch) -> list[int]:
        jobs[0].set_result("set")
        return [1, 2]

    ids = define(pq, "plain", body, batch=3, batch_wait=LONG, keep_result=True).enqueue_many([()] * 3)
    with running(pq) as watched:
        says = "its batch handler returned 2 results for 3 jobs: a list with one for each, in their order, is kept"
        assert results_of(pq, ids) == ["set", says, says]
        assert {event.facts["id"] for event in watched.wait_for_all(2, EventName.RESULT_MISSING)} == set(ids[1:])
        wait_for_count(admin, 3, "archive", "state = 'completed'")


def test_each_job_of_a_batch_reports_its_own_progress(pq: pgqueue.PgQueue, admin: Admin) -> None:
    go_on = threading.Event()

    def body(jobs: pgqueue.Batch) -> None:
        for number, job in enumerate(jobs):
            job.progress(number * 10, f"number {number}")
        go_on.wait(PATIENCE)

    ids = define(pq, "plain", body, batch=2, batch_wait=LONG).enqueue_many([()] * 2)
    try:
        with running(pq):
            said = wait_until(
                lambda: (found := [pq.progress(job_id) for job_id in ids]) and all(found) and found, PATIENCE, "reports"
            )
            assert [(one.percent, one.message) for one in said if one] == [(0.0, "number 0"), (10.0, "number 1")]
            go_on.set()
            wait_for_count(admin, 2, "archive")
    finally:
        go_on.set()


# The whole batch in one transaction


@pytest.fixture
def business(admin: Admin) -> None:
    admin.execute("CREATE TABLE business (note text)")


@pytest.mark.usefixtures("business")
def test_the_completions_of_a_batch_commit_together_with_its_writes(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    seen: list[int] = []

    def body(jobs: pgqueue.Batch) -> None:
        jobs[0].discard("no use")
        with psycopg.connect(database) as connection:
            with jobs.transaction(using=connection):
                jobs[1].snooze(1000)  # left out of the block
                with connection.cursor() as cursor:
                    cursor.executemany("INSERT INTO business VALUES (%s)", [job.args for job in jobs[2:]])
            seen.append(count(admin, "archive"))
            connection.commit()
        raise ValueError("after the commit")

    texts = [(f"note {number}",) for number in range(5)]
    ids = define(pq, "plain", body, batch=5, batch_wait=LONG).enqueue_many(texts)
    with running(pq) as watched:
        wait_for_count(admin, 3, "archive", "state = 'completed' AND attempt = 1")
        wait_for_count(admin, 1, "archive", f"id = {ids[0]} AND state = 'discarded'")
        wait_for_count(admin, 1, "job", f"id = {ids[1]} AND attempt = 0 AND run_at IS NOT NULL")
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker knows")
        assert not watched.seen(EventName.LEASE_LOST)
    assert seen == [0]
    assert admin.execute("SELECT note FROM business ORDER BY note").fetchall() == texts[2:]


@pytest.mark.usefixtures("business")
@pytest.mark.parametrize("own", [True, False], ids=["own", "callers"])
def test_a_batch_whose_transaction_is_not_committed_has_failed(
    own: bool, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    def body(jobs: pgqueue.Batch) -> None:
        if own:
            with jobs.transaction() as connection:
                connection.execute("INSERT INTO business VALUES ('written')")
                connection.execute("SELECT 1 / 0")
        else:
            with psycopg.connect(database) as connection:
                with jobs.transaction(using=connection):
                    connection.execute("INSERT INTO business VALUES ('written')")
                connection.rollback()

    define(pq, "plain", body, batch=3, batch_wait=LONG).enqueue_many([()] * 3)
    with running(pq, breaker_failures=2) as watched:
        wait_for_count(admin, 3, "job", "attempt = 1 AND run_at IS NOT NULL AND jsonb_array_length(errors) = 1")
        watched.wait_for_all(3, EventName.JOB_FAILED)
        assert not watched.seen(EventName.TASK_CIRCUIT_OPENED), "three jobs of one call are one failure"
    assert admin.execute("SELECT count(*) FROM business").fetchall() == [(0,)]


@pytest.mark.usefixtures("business")
async def test_a_batch_in_an_event_loop_has_its_transaction_too(pq: pgqueue.PgQueue, admin: Admin) -> None:
    said: list[str] = []

    @pq.task(name="work", queue="q", batch=2, batch_wait=LONG)
    async def work(jobs: pgqueue.Batch) -> None:
        async with jobs.transaction() as connection:
            await connection.execute("INSERT INTO business VALUES ('written')")
        try:
            jobs.transaction()
        except pgqueue.PgQueueError as error:
            said.append(str(error))

    work.enqueue_many([()] * 2)
    with running(pq):
        wait_for_count(admin, 2, "archive", "state = 'completed'")
    assert admin.execute("SELECT note FROM business").fetchall() == [("written",)]
    assert said == ["no job of this batch is left for a transaction block: each was answered or settled already"]


@pytest.mark.usefixtures("business")
def test_a_lost_lease_of_one_job_is_raised_in_the_block_of_its_batch(pq: pgqueue.PgQueue, admin: Admin) -> None:
    lost: list[int] = []

    def body(jobs: pgqueue.Batch) -> None:
        take_away(admin, jobs[1].id)
        try:
            with jobs.transaction() as connection:
                connection.execute("INSERT INTO business VALUES ('written')")
        except pgqueue.LeaseLost as error:
            lost.extend(job.id for job in error.jobs)
            raise

    ids = define(pq, "plain", body, batch=3, batch_wait=LONG).enqueue_many([()] * 3)
    with running(pq) as watched:
        wait_for_count(admin, 2, "job", "attempt = 1 AND errors->0->>'type' = 'pgqueue.errors.LeaseLost'")
        watched.wait_for(EventName.LEASE_LOST, ids=[ids[1]])
    assert lost == [ids[1]]
    assert admin.execute("SELECT count(*) FROM business").fetchall() == [(0,)]

"""current_job().transaction(): business writes, completion and enqueues in one transaction, whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.callers import OPENERS, Caller, open_caller
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization")

Admin = psycopg.Connection[Any]
ONCE = pgqueue.Fixed(3600)
"""A retry policy under which a test sees the first attempt alone."""


@pytest.fixture(autouse=True)
def business(admin: Admin) -> None:
    admin.execute("CREATE TABLE business (note text)")


def notes(admin: Admin) -> list[str]:
    return [note for (note,) in admin.execute("SELECT note FROM business ORDER BY note").fetchall()]


def write(connection: psycopg.Connection[Any], note: str = "written") -> None:
    connection.execute("INSERT INTO business VALUES (%s)", [note])


def errors_of(admin: Admin, job_id: int) -> list[str]:
    row = admin.execute("SELECT errors FROM pgqueue.job WHERE id = %s", [job_id]).fetchone()
    assert row is not None
    return [error["type"] for error in row[0] or []]


async def block(caller: Caller, job: pgqueue.CurrentJob, body: Callable[[], Any]) -> None:
    """A transaction block of the colour of this connection."""
    if caller.asynchronous:
        async with job.transaction(using=caller.using) as given:
            assert given is caller.using
            await body()
    else:
        with job.transaction(using=caller.using) as given:
            assert given is caller.using
            await body()


@pytest.mark.parametrize("kind", list(OPENERS))
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_writes_completion_and_enqueues_of_a_block_commit_together_or_not_at_all(
    kind: str, end: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    seen: list[tuple[int, int]] = []

    @pq.task(name="work", queue="q", retry=ONCE)
    async def work() -> None:
        job = pgqueue.current_job()
        async with open_caller(kind, database) as caller:

            async def body() -> None:
                await caller.execute("INSERT INTO business VALUES ('written')")
                await caller.do("enqueue", "follow-up", queue="later")

            await block(caller, job, body)
            seen.append((len(notes(admin)), count(admin, "job")))
            await getattr(caller, end)()
            if caller.asynchronous:
                await caller.execute("SELECT 1")  # what comes afterwards on the same connection changes nothing
                await caller.rollback()

    job_id = work.enqueue()
    with running(pq) as watched:
        if end == "commit":
            wait_for_count(admin, 1, "archive", f"id = {job_id} AND state = 'completed'")
            watched.wait_for(pgqueue.EventName.JOBS_SETTLED, outcome="completed")
            assert count(admin, "job", "queue = 'later'") == 1
            assert notes(admin) == ["written"]
        else:
            wait_for_count(admin, 1, "job", f"id = {job_id} AND run_at IS NOT NULL")
            assert errors_of(admin, job_id) == ["pgqueue.errors.TaskError"]
            assert (notes(admin), count(admin, "archive"), count(admin, "job", "queue = 'later'")) == ([], 0, 0)
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
    assert seen == [(0, 1)], "nothing was to be seen before the commit"
    assert count(admin, "lease") == 0


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_without_a_connection_of_the_callers_the_block_commits_by_itself(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    if colour == "sync":

        @pq.task(name="work", queue="q", retry=ONCE)
        def work(breaks: bool) -> None:
            with pgqueue.current_job().transaction() as connection:
                write(connection)
                pq.enqueue("follow-up", queue="later", using=connection)
                if breaks:
                    raise ValueError("half-way")
            assert notes(admin) == ["written"]

    else:

        @pq.task(name="work", queue="q", retry=ONCE)
        async def work(breaks: bool) -> None:
            async with pgqueue.current_job().transaction() as connection:
                await connection.execute("INSERT INTO business VALUES ('written')")
                async with pgqueue.AsyncPgQueue() as other:
                    await other.enqueue("follow-up", queue="later", using=connection)
                if breaks:
                    raise ValueError("half-way")
            assert notes(admin) == ["written"]

    with running(pq):
        broken = work.enqueue(True)
        wait_for_count(admin, 1, "job", f"id = {broken} AND run_at IS NOT NULL")
        assert errors_of(admin, broken) == ["ValueError"]
        assert (notes(admin), count(admin, "job", "queue = 'later'")) == ([], 0)
        whole = work.enqueue(False)
        wait_for_count(admin, 1, "archive", f"id = {whole} AND state = 'completed'")
    assert count(admin, "job", "queue = 'later'") == 1


@pytest.mark.parametrize("how", ["raises", "snoozes", "discards", "dead-letters"])
def test_what_a_handler_raises_after_its_commit_changes_nothing(how: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    signals: dict[str, Exception] = {
        "raises": ValueError("too late"),
        "snoozes": pgqueue.Snooze(5),
        "discards": pgqueue.Discard(),
        "dead-letters": pgqueue.DeadLetter("x"),
    }

    @pq.task(name="work", queue="q")
    def work() -> None:
        with pgqueue.current_job().transaction() as connection:
            write(connection)
        raise signals[how]

    job_id = work.enqueue()
    with running(pq) as watched:
        wait_for_count(admin, 1, "archive", f"id = {job_id} AND state = 'completed'")
        watched.wait_for(pgqueue.EventName.JOB_FAILED, id=job_id, outcome="completed")
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of it")
        assert (count(admin, "job"), count(admin, "dead_letter")) == (0, 0)
    assert watched.worker.settler.completed == {"q": 1}


def test_a_commit_that_fails_after_the_block_is_a_failed_attempt(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    admin.execute("ALTER TABLE business ADD UNIQUE (note) DEFERRABLE INITIALLY DEFERRED")
    write(admin, "taken")

    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        with closing(psycopg.connect(database)) as connection:
            with pgqueue.current_job().transaction(using=connection):
                write(connection, "taken")
            connection.commit()

    job_id = work.enqueue()
    with running(pq) as watched:
        wait_for_count(admin, 1, "job", f"id = {job_id} AND run_at IS NOT NULL")
        event = watched.wait_for(pgqueue.EventName.JOB_FAILED, id=job_id, outcome="retry")
    assert event.facts["error"] == "psycopg.errors.UniqueViolation"
    assert errors_of(admin, job_id) == ["psycopg.errors.UniqueViolation"]
    assert notes(admin) == ["taken"]


def test_a_block_in_a_savepoint_that_is_rolled_back_is_a_failed_attempt(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        with psycopg.connect(database) as connection:
            write(connection, "outside")
            with suppress(ZeroDivisionError), connection.transaction():
                with pgqueue.current_job().transaction(using=connection):
                    write(connection, "inside")
                raise ZeroDivisionError

    job_id = work.enqueue()
    with running(pq):
        wait_for_count(admin, 1, "job", f"id = {job_id} AND run_at IS NOT NULL")
    assert notes(admin) == ["outside"]


def test_a_block_in_a_savepoint_that_is_kept_is_committed_with_the_whole(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        with psycopg.connect(database) as connection:
            with connection.transaction(), pgqueue.current_job().transaction(using=connection):
                write(connection, "inside")
            assert count(admin, "job") == 1

    work.enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    assert notes(admin) == ["inside"]


def taken_away(pq: pgqueue.PgQueue, admin: Admin, job_id: int) -> None:
    """The lease of this job ends, as if its worker had been frozen, and a rescue takes it back."""
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    wait_until(
        lambda: any(pq.rescue("q")) or not count(admin, "job", f"id = {job_id} AND lease_id IS NOT NULL"),
        PATIENCE,
        "the job was rescued",
    )


@pytest.mark.parametrize("whose", ["the caller's", "its own"])
def test_a_lost_lease_is_raised_in_the_block_before_anything_is_committed(
    whose: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    raised: list[pgqueue.LeaseLost] = []
    runs: list[int] = []

    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        job = pgqueue.current_job()
        runs.append(job.attempt)
        if len(runs) > 1:
            raise pgqueue.Discard
        with psycopg.connect(database) as connection:
            with suppress(pgqueue.LeaseLost):
                try:
                    with job.transaction(using=connection if whose == "the caller's" else None) as given:
                        write(given)
                        pq.pause("q")
                        taken_away(pq, admin, job.id)
                except pgqueue.LeaseLost as error:
                    raised.append(error)
                    raise
            connection.rollback()

    job_id = work.enqueue()
    with running(pq) as watched:
        watched.wait_for(pgqueue.EventName.LEASE_LOST)
        wait_until(lambda: raised, PATIENCE, "the block has said so")
        assert [job.id for job in raised[0].jobs] == [job_id]
        assert (notes(admin), count(admin, "job")) == ([], 1)
        pq.resume("q")
        wait_for_count(admin, 1, "archive", "state = 'discarded' AND attempt = 2 AND lost = 1")
    assert notes(admin) == []


def blocked(admin: Admin) -> bool:
    row = admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).fetchone()
    return row is not None and row[0] > 0


@pytest.mark.parametrize("rescue", ["commits", "rolls back"])
def test_a_block_that_ends_while_a_rescue_holds_the_row_follows_what_becomes_of_the_rescue(
    rescue: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    @pq.task(name="work", queue="q", retry=ONCE)
    def work() -> None:
        try:
            with pgqueue.current_job().transaction() as connection:
                write(connection)
                inside.set()
                go_on.wait(PATIENCE)
        except BaseException as error:
            raised.append(error)
            raise

    job_id = work.enqueue()
    with running(pq, lease=60.0) as watched:
        assert inside.wait(PATIENCE)
        pq.pause("q")
        with psycopg.connect(database) as rescuer:
            rescuer.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
            assert pq.rescue("q", using=rescuer).returned == [job_id]
            go_on.set()
            wait_until(lambda: blocked(admin), PATIENCE, "the block waits for the rescue")
            rescuer.commit() if rescue == "commits" else rescuer.rollback()
        if rescue == "commits":
            watched.wait_for(pgqueue.EventName.LEASE_LOST)
            wait_until(lambda: raised, PATIENCE, "the block has ended")
            assert type(raised[0]) is pgqueue.LeaseLost
            assert notes(admin) == []
            assert count(admin, "job", f"id = {job_id} AND lost = 1 AND lease_id IS NULL") == 1
        else:
            wait_for_count(admin, 1, "archive", f"id = {job_id} AND state = 'completed'")
            assert notes(admin) == ["written"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_transaction_left_open_holds_up_nobody_and_decides_when_it_ends(
    end: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """The handler has returned; its session is committed later, by somebody else. Meanwhile the lease would have ended
    twice, a rescue passes by, and other jobs are settled."""
    connection = psycopg.connect(database)
    began: list[int] = []

    @pq.task(name="work", queue="q", retry=pgqueue.Fixed(0))
    def work() -> None:
        began.append(pgqueue.current_job().attempt)
        if len(began) == 1:
            with pgqueue.current_job().transaction(using=connection):
                write(connection)

    @pq.task(name="other", queue="q")
    def other() -> None: ...

    job_id = work.enqueue()
    with connection, running(pq, lease=2.0) as watched:
        wait_until(lambda: watched.worker.settler._doubts, PATIENCE, "the handler has returned")
        others = other.enqueue_many([() for _ in range(50)])
        wait_for_count(admin, len(others), "archive")
        renewed = "id = (SELECT lease_id FROM pgqueue.job WHERE id = {}) AND expires_at > claimed_at + interval '6 s'"
        wait_for_count(admin, 1, "lease", renewed.format(job_id))
        assert not any(pq.rescue("q"))
        assert count(admin, "job", f"id = {job_id} AND lease_id IS NOT NULL") == 1
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
        getattr(connection, end)()
        wait_for_count(admin, 1, "archive", f"id = {job_id} AND state = 'completed'")
        wait_for_count(admin, 0, "lease")
    assert (began, notes(admin)) == (([1], ["written"]) if end == "commit" else ([1, 2], []))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_worker_that_stops_over_an_open_transaction_leaves_the_job_to_it(
    end: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    connection = psycopg.connect(database)
    gone = threading.Event()

    @pq.task(name="work", queue="q")
    def work() -> None:
        with pgqueue.current_job().transaction(using=connection):
            write(connection)
        gone.wait(PATIENCE)

    @pq.task(name="other", queue="q")
    def other() -> None:
        gone.wait(PATIENCE)

    job_id, other_id = work.enqueue(), other.enqueue()
    with connection:
        with running(pq, lease=2.0, grace=0.2) as watched:

            def both() -> dict[int, Any]:
                running = {held.job.id: held.current for held in watched.worker.ledger._all() if held.current}
                return running if len(running) == 2 else {}

            mine = wait_until(both, PATIENCE, "both handlers run")[job_id]
            wait_until(lambda: mine.settled, PATIENCE, "the block has ended")
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
        back = f"id = {other_id} AND lease_id IS NULL AND attempt = 0"
        assert count(admin, "job", back) == 1, "what is given back does not wait for that transaction"
        gone.set()
        getattr(connection, end)()
    if end == "commit":
        assert count(admin, "archive", f"id = {job_id} AND state = 'completed'") == 1
        wait_until(lambda: pq.rescue("q") and not count(admin, "lease"), PATIENCE, "its empty lease is removed")
    else:
        wait_until(
            lambda: job_id in [job.id for job in pq.claim("q", limit=2)], PATIENCE, "it comes back with its lease's end"
        )

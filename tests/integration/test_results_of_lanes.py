"""Results, waits and transaction blocks of jobs that share a key: whatever completes a job, the next of its key follows.

The worker that looks by itself now and then is put to sleep here: only who completes a job can say that its key is free.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import roles
from pgqueue.worker import Worker, WorkerOptions, maintenance
from tests.integration import isolated
from tests.logins import login, roles_of_test
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
State = pgqueue.JobState
JOBS = 5
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])
NOTIFY = pytest.mark.parametrize("notify", [True, False], ids=["notified", "by itself"])
ASLEEP: dict[str, Any] = {"lease": 3000.0, "grace": 5.0, "poll": 3000.0}
"""Options of a worker that is woken by nothing but what it does and hears."""


@pytest.fixture(autouse=True)
def nobody_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "PERIOD", 1000.0)
    monkeypatch.setattr(maintenance, "QUIET_PERIOD", 1000.0)


def completed(admin: Admin) -> list[int]:
    """The jobs that were completed, in that order."""
    rows = admin.execute("SELECT id FROM pgqueue.archive WHERE state = 'completed' ORDER BY finished_at").fetchall()
    return [job_id for (job_id,) in rows]


@NOTIFY
@COLOURS
def test_the_next_of_a_key_follows_a_completion_with_a_result(
    colour: str, notify: bool, database: str, admin: Admin
) -> None:
    with pgqueue.PgQueue(database, notify=notify) as pq:
        task = define(pq, colour, lambda number: number, keep_result=60, ordering_key="a")
        ids = task.enqueue_many([(number,) for number in range(JOBS)])
        with running(pq, **ASLEEP):
            ended = pq.wait(ids, PATIENCE)
            wait_for_count(admin, 0, "admission")
        assert [ended[job_id].value for job_id in ids] == list(range(JOBS))
    assert completed(admin) == ids


def blocks(pq: pgqueue.PgQueue, colour: str, whose: str, database: str, **options: Any) -> Any:
    """A task that completes its job in a block, on a connection of its own or of the worker's."""
    own = whose == "its own"

    @pq.task(name="plain", queue="q", **options)
    def plain() -> None:
        job = pgqueue.current_job()
        with psycopg.connect(database) as connection, job.transaction(using=connection if own else None):
            connection.execute("SELECT 1")

    @pq.task(name="async", queue="q", **options)
    async def coloured() -> None:
        job = pgqueue.current_job()
        connection = await psycopg.AsyncConnection.connect(database)
        async with connection, job.transaction(using=connection if own else None):
            await connection.execute("SELECT 1")

    return plain if colour == "plain" else coloured


@NOTIFY
@pytest.mark.parametrize("whose", ["its own", "the worker's"])
@COLOURS
def test_the_next_of_a_key_follows_at_once_when_the_block_that_completed_a_job_commits(
    colour: str, whose: str, notify: bool, database: str, admin: Admin
) -> None:
    with pgqueue.PgQueue(database, notify=notify) as pq:
        task = blocks(pq, colour, whose, database, ordering_key="a")
        ids = [task.enqueue() for _ in range(JOBS)]
        with running(pq, **ASLEEP) as watched:
            wait_for_count(admin, JOBS, "archive", "state = 'completed'")
            wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of the last one")
            assert not watched.seen(pgqueue.EventName.LEASE_LOST)
        assert completed(admin) == ids
    assert count(admin, "lease") == 0


@NOTIFY
def test_a_block_that_commits_late_frees_its_key_at_once_though_other_keys_went_on(
    notify: bool, database: str, admin: Admin
) -> None:
    """Its row of `admission` is older than those that were taken meanwhile."""
    connection = psycopg.connect(database)
    with connection, pgqueue.PgQueue(database, notify=notify) as pq:

        @pq.task(name="work", queue="q")
        def work() -> None:
            with pgqueue.current_job().transaction(using=connection):
                connection.execute("SELECT 1")

        pq.task(name="other", queue="q")(lambda: None)
        late = work.options(ordering_key="late").enqueue()
        behind = pq.enqueue("other", queue="q", ordering_key="late")
        with running(pq, **ASLEEP) as watched:
            wait_until(lambda: watched.worker.settler._doubts, PATIENCE, "the handler has returned")
            newest = pq.enqueue("other", queue="q", ordering_key="other")
            watched.worker.claimer.admit("q")
            assert pq.wait(newest, PATIENCE).state is State.COMPLETED
            wait_until(lambda: not count(admin, "admission"), PATIENCE, "later rows were taken")
            assert [job.state for job in pq.jobs(ids=behind)] == ["blocked"]
            connection.commit()
            assert pq.wait(behind, PATIENCE).state is State.COMPLETED
    assert completed(admin) == [late, newest, behind], "in the order of the statements; the first was seen last"


def test_a_commit_after_the_worker_has_gone_tells_the_others_that_the_key_is_free(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    connection = psycopg.connect(database)
    gone = threading.Event()

    @pq.task(name="work", queue="q", ordering_key="a")
    def work() -> None:
        with pgqueue.current_job().transaction(using=connection):
            connection.execute("SELECT 1")
        gone.wait(PATIENCE)

    ids = [work.enqueue(), work.enqueue()]
    with connection, pgqueue.PgQueue(database) as other:
        other.task(name="work", queue="q")(lambda: None)
        with running(pq, **{**ASLEEP, "grace": 0.2}) as watched:

            def inside() -> Any:
                [held] = list(watched.worker.ledger._all()) or [None]
                return held and held.current

            mine = wait_until(inside, PATIENCE, "the handler runs")
            wait_until(lambda: mine.settled, PATIENCE, "the block has ended")
        gone.set()
        with running(other, **ASLEEP) as watched:
            wait_until(lambda: watched.worker._hearing(), PATIENCE, "the other worker hears")
            assert {job.id: job.state for job in other.jobs(ids=ids)} == {ids[0]: "running", ids[1]: "blocked"}
            connection.commit()
            assert other.wait(ids, PATIENCE)[ids[1]].state is State.COMPLETED
    assert completed(admin) == ids


def test_a_block_that_is_not_committed_keeps_its_place_in_the_key(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    order: list[tuple[int, int]] = []

    @pq.task(name="work", queue="q", ordering_key="a", retry=pgqueue.Fixed(0))
    def work(number: int) -> None:
        attempt = pgqueue.current_job().attempt
        order.append((number, attempt))
        with psycopg.connect(database) as connection:
            with pgqueue.current_job().transaction(using=connection):
                connection.execute("SELECT 1")
            if (number, attempt) == (0, 1):
                connection.rollback()

    ids = work.enqueue_many([(number,) for number in range(3)])
    with running(pq, **ASLEEP):
        pq.wait(ids, PATIENCE)
    assert order == [(0, 1), (0, 2), (1, 1), (2, 1)]
    assert completed(admin) == ids


@NOTIFY
def test_a_handler_that_settles_its_own_job_by_hand_gives_its_slot_up(
    notify: bool, database: str, admin: Admin
) -> None:
    with pgqueue.PgQueue(database, notify=notify) as pq:

        @pq.task(name="work", queue="q", concurrency_key="a", concurrency_limit=1)
        def work(number: int) -> None:
            if number == 0:
                pq.snooze(pgqueue.current_job().job, 3600)
            if number == 1:
                pq.complete(pgqueue.current_job().job)

        ids = work.enqueue_many([(number,) for number in range(3)])
        with running(pq, **ASLEEP) as watched:
            pq.wait(ids[1:], PATIENCE)
            wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of the last one")
            assert not watched.seen(pgqueue.EventName.LEASE_LOST)
        assert [job.state for job in pq.jobs()] == ["scheduled"]
    assert completed(admin) == ids[1:]


def test_a_wait_for_a_blocked_job_goes_on_until_its_turn_has_come_and_is_over(pq: pgqueue.PgQueue) -> None:
    first, second = (pq.enqueue("t", queue="q", ordering_key="a") for _ in range(2))
    [job] = pq.claim("q", limit=2)
    assert [job.state for job in pq.jobs(ids=second)] == ["blocked"]
    with pytest.raises(pgqueue.WaitTimeout) as caught:
        pq.wait([first, second], 0.2)
    assert caught.value.ids == (first, second)
    pq.complete(job)
    with pytest.raises(pgqueue.WaitTimeout) as caught:
        pq.wait([first, second], 0.2)
    assert caught.value.ids == (second,)
    pq.complete(pq.claim("q"))
    assert pq.wait(second, PATIENCE).state is State.COMPLETED


def test_a_wait_for_a_job_behind_a_parked_key_goes_on_until_an_operator_has_decided(pq: pgqueue.PgQueue) -> None:
    @pq.task(name="work", queue="q", ordering_key="a", on_dead="park", keep_result=60)
    def work(number: int) -> int:
        if number == 0:
            raise pgqueue.DeadLetter("x")
        return number

    dead, blocked = work.enqueue(0), work.enqueue(1)
    with running(pq, **ASLEEP):
        assert pq.wait(dead, PATIENCE).state is State.DEAD
        with pytest.raises(pgqueue.WaitTimeout) as caught:
            pq.wait([dead, blocked], 0.3)
        assert caught.value.ids == (blocked,)
        assert pq.result(blocked) is None
        assert pq.unpark("q", "a")
        assert pq.wait(blocked, PATIENCE).value == 1


def test_roles_of_least_privilege_suffice_for_keys_results_and_blocks_together(database: str, admin: Admin) -> None:
    with roles_of_test(database) as prefix:
        roles.create(database, prefix=prefix)
        with (
            login(database, f"{prefix}_worker") as worker,
            login(database, f"{prefix}_producer") as producer,
            pgqueue.PgQueue(worker) as pq,
            pgqueue.PgQueue(producer) as other,
        ):
            define(pq, "plain", lambda number: number, name="returns", keep_result=60)
            blocks(pq, "plain", "its own", worker)
            names = ["returns", "plain", "returns"]
            arguments: list[list[int]] = [[0], [], [2]]
            ids = [
                other.enqueue(name, given, queue="q", ordering_key="a")
                for name, given in zip(names, arguments, strict=True)
            ]
            with pytest.raises(pgqueue.WaitTimeout) as caught:
                other.wait(ids, 0.1)
            assert caught.value.ids == tuple(ids)
            with running(pq, **ASLEEP) as watched:
                ended = other.wait(ids, PATIENCE)
                assert not watched.seen(pgqueue.EventName.LOOP_FAILED)
            assert [ended[job_id].value_json for job_id in ids] == ["0", None, "2"]
    assert completed(admin) == ids


@pytest.fixture
def app(database: str, admin: Admin) -> Iterator[pgqueue.PgQueue]:
    """The application of the children, on the database of this test."""
    admin.execute(isolated.TRACES.encode())
    before = isolated.pq.settings
    isolated.pq.settings = isolated.pq._pool.settings = dataclasses.replace(before, database_url=database)
    yield isolated.pq
    isolated.pq.close()
    isolated.pq._hearing = None
    isolated.pq.settings = isolated.pq._pool.settings = before


def test_the_next_of_a_key_follows_a_block_in_a_child_process(app: pgqueue.PgQueue, admin: Admin) -> None:
    ways = ["commits", "dies after the commit", "by itself", "commits"]
    ids = [isolated.settling.options(ordering_key="a").enqueue(how) for how in ways]
    with running(app, queues=("apart",), **ASLEEP) as watched:
        app.wait(ids, PATIENCE * 2)
        wait_until(lambda: not len(watched.worker.ledger), PATIENCE, "the worker has let go of the last one")
        assert not watched.seen(pgqueue.EventName.LEASE_LOST)
    assert completed(admin) == ids


def test_without_notifications_a_block_in_a_child_process_says_that_its_key_is_free(
    app: pgqueue.PgQueue, admin: Admin
) -> None:
    app.settings = app._pool.settings = dataclasses.replace(app.settings, notify=False)
    ids = [isolated.settling.options(ordering_key="a").enqueue("commits") for _ in range(3)]
    with running(app, queues=("apart",), **ASLEEP):
        app.wait(ids, PATIENCE * 2)
    assert completed(admin) == ids


def test_a_job_of_a_schedule_keeps_its_result(pq: pgqueue.PgQueue) -> None:
    @pq.schedule(every=timedelta(days=300))
    @pq.task(name="work", queue="q", keep_result=60)
    def work() -> str:
        return "done"

    with running(pq, **ASLEEP):
        wait_until(pq.schedules, PATIENCE, "the schedule is known")
        job_id = pq.run_schedule("work")
        assert job_id is not None
        assert pq.wait(job_id, PATIENCE).value == "done"


def test_the_job_of_a_schedule_lives_until_the_block_that_completes_it_commits(
    pq: pgqueue.PgQueue, database: str
) -> None:
    """With `overlap=False` no other job is made before that."""
    connection = psycopg.connect(database)

    @pq.task(name="work", queue="q")
    def work() -> None:
        with pgqueue.current_job().transaction(using=connection):
            connection.execute("SELECT 1")

    pq.add_schedule("daily", work, every=timedelta(days=300), overlap=False)
    with connection, running(pq, **ASLEEP) as watched:
        first = pq.run_schedule("daily")
        assert first is not None
        wait_until(lambda: watched.worker.settler._doubts, PATIENCE, "the handler has returned")
        with pytest.raises(pgqueue.WaitTimeout):
            pq.wait(first, 0.1)
        assert pq.run_schedule("daily") is None
        connection.commit()
        assert pq.wait(first, PATIENCE).state is State.COMPLETED
        assert pq.run_schedule("daily") is not None


def test_a_worker_that_may_not_run_on_the_schema_declares_nothing(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(pq, "plain", lambda: None, keep_result=60)
    admin.execute("UPDATE pgqueue.schema_version SET version_num = '9999'")
    with pytest.raises(pgqueue.SchemaError):
        Worker(pq, WorkerOptions()).run()
    assert count(admin, "kept_task") == 0

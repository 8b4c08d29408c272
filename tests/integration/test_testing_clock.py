"""pgqueue.testing's clock: delays, retries, leases, schedules, expiry and the rest go by it, in every session."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
import pgqueue.sql
from pgqueue import migrate
from pgqueue.testing import Clock, enqueued_jobs, install_clock, run_jobs, run_jobs_async
from tests.workers import wait_for_count

NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)


@pytest.fixture
def clock(database: str) -> Iterator[Clock]:
    clock = install_clock(database)
    yield clock
    clock.close()


@pytest.fixture
def pq(clock: Clock, database: str) -> Iterator[pgqueue.PgQueue]:
    with pgqueue.PgQueue(database) as queue:
        yield queue


def test_it_stands_moves_and_runs(clock: Clock) -> None:
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(minutes=1)
    assert clock.freeze(NOON) == clock.now() == clock.now() == NOON
    assert clock.move(hours=2, seconds=0.000001) == clock.now() == NOON + timedelta(hours=2, microseconds=1)
    assert clock.move(timedelta(days=-1)) == NOON - timedelta(hours=22) + timedelta(microseconds=1)
    clock.thaw()
    assert clock.now() < clock.now() < NOON
    moved = clock.move(days=400)
    assert NOON + timedelta(days=398) < moved < clock.now()
    assert clock.freeze() == clock.now() > moved
    clock.reset()
    assert abs(clock.now() - datetime.now(UTC)) < timedelta(minutes=1)
    with pytest.raises(pgqueue.ConfigurationError, match="time zone"):
        clock.freeze(datetime(2030, 1, 1))  # noqa: DTZ001


def test_a_delay_ends_by_the_clock(clock: Clock, pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work() -> None: ...

    clock.freeze(NOON)
    work.options(delay=3600).enqueue()
    work.options(run_at=NOON + timedelta(hours=2)).enqueue()
    work.options(run_at=datetime(2029, 1, 1, tzinfo=UTC)).enqueue()  # past, by this clock
    assert [job.created_at for job in enqueued_jobs(work)] == [NOON] * 3
    assert [job.run_at for job in enqueued_jobs(work)] == [NOON + timedelta(hours=1), NOON + timedelta(hours=2), None]
    assert len(run_jobs(pq)) == 1
    clock.move(minutes=59, seconds=59)
    assert run_jobs(pq) == []
    clock.move(seconds=1)
    assert len(run_jobs(pq)) == 1
    clock.move(hours=1)
    assert len(run_jobs(pq)) == 1


def test_retries_are_due_by_the_clock(clock: Clock, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    runs: list[datetime] = []

    @pq.task(retry=pgqueue.Delays(60, 600), max_attempts=3)
    def work() -> None:
        runs.append(clock.now())
        raise ValueError

    clock.freeze(NOON)
    work.enqueue()
    for _ in range(15):
        run_jobs(pq, raise_errors=False)
        clock.move(minutes=1)
    assert runs == [NOON, NOON + timedelta(minutes=1), NOON + timedelta(minutes=11)]
    assert admin.execute("SELECT died_at FROM pgqueue.dead_letter").fetchone() == (runs[-1],)


def test_leases_end_by_the_clock(clock: Clock, pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work() -> None: ...

    clock.freeze(NOON)
    work.enqueue()
    [job] = pq.claim("default", lease=30)
    assert run_jobs(pq) == []
    clock.move(seconds=29)
    assert run_jobs(pq) == []
    clock.move(seconds=2)
    [ran] = run_jobs(pq)
    assert (ran.id, ran.attempt) == (job.id, 2)
    with pytest.raises(pgqueue.LeaseLost):
        pq.complete(job)


def test_tokens_grow_while_the_clock_stands_or_goes_back(clock: Clock, pq: pgqueue.PgQueue) -> None:
    @pq.task
    def work() -> None:
        tokens.append(pgqueue.current_job().token)

    tokens: list[int] = []
    clock.freeze(NOON)
    work.enqueue_many([()] * 600)
    run_jobs(pq)
    clock.freeze(NOON - timedelta(days=3000))
    work.enqueue()
    run_jobs(pq)
    assert len(tokens) == 601
    assert tokens == sorted(set(tokens))


def test_schedules_tick_by_the_clock(clock: Clock, pq: pgqueue.PgQueue) -> None:
    ticks: list[datetime | None] = []

    @pq.schedule("0 9 * * *", tz="Europe/Berlin")
    @pq.task
    def morning() -> None:
        ticks.append(pgqueue.current_job().scheduled_for)

    clock.freeze(NOON)
    assert run_jobs(pq) == []
    clock.move(hours=18)  # 6:00 UTC
    assert run_jobs(pq) == []
    clock.move(hours=1)
    assert len(run_jobs(pq)) == 1
    assert ticks == [NOON.replace(day=2, hour=7)]
    clock.move(days=1)
    assert run_jobs(pq, schedules=False) == []
    assert len(run_jobs(pq)) == 1


def test_jobs_expire_by_the_clock(clock: Clock, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    @pq.task(expires_in=60)
    def work() -> None: ...

    clock.freeze(NOON)
    work.enqueue()
    clock.move(minutes=2)
    assert run_jobs(pq) == []
    row = admin.execute("SELECT state, created_at, finished_at FROM pgqueue.archive").fetchone()
    assert row == ("expired", NOON, NOON + timedelta(minutes=2))
    work.enqueue()
    assert len(run_jobs(pq)) == 1


def test_windows_of_unique_keys_pauses_rates_and_results_go_by_it(clock: Clock, pq: pgqueue.PgQueue) -> None:
    @pq.task(unique_key="k", unique_for=3600, keep_result=60)
    def work() -> str:
        return "kept"

    @pq.task(queue="slow")
    def slow() -> None: ...

    clock.freeze(NOON)
    first = work.enqueue()
    assert len(run_jobs(pq)) == 1
    assert work.enqueue() == first
    result = pq.result(first)
    assert result is not None
    assert (result.value, result.expires_at) == ("kept", NOON + timedelta(minutes=1))
    clock.move(minutes=61)
    assert work.enqueue() != first
    pq.pause("default", seconds=60)
    assert run_jobs(pq) == []
    clock.move(seconds=61)
    assert len(run_jobs(pq)) == 1
    pq.limit_queue("slow", rate=2, per=60, burst=2)
    slow.enqueue_many([()] * 5)
    assert len(run_jobs(pq)) == 2
    clock.move(seconds=60)
    assert len(run_jobs(pq)) == 2


def test_messages_of_topics_are_as_old_as_it_says(clock: Clock, pq: pgqueue.PgQueue) -> None:
    seen: list[int] = []

    @pq.task
    def read(number: int) -> None:
        seen.append(number)

    clock.freeze(NOON)
    pq.keep_topic("news", age=86400)
    for number in range(3):
        pq.publish("news", [number])
        clock.move(hours=1)
    assert [topic.oldest_at for topic in pq.topics()] == [NOON]
    pq.subscribe("news", read, start=NOON + timedelta(minutes=30))
    run_jobs(pq)
    assert seen == [1, 2]


def test_it_is_the_clock_of_every_session_of_worker_processes_too(
    clock: Clock, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], database: str, tmp_path: Path
) -> None:
    (tmp_path / "clocked_app.py").write_text(
        "import pgqueue\npq = pgqueue.PgQueue()\n@pq.task(name='work')\ndef work(): ...\n", encoding="utf-8"
    )
    pq.enqueue("work", delay=86400)
    clock.move(days=2)
    command = [str(Path(sys.executable).parent / "pgqueue"), "worker", "--app", "clocked_app:pq"]
    environment = {**os.environ, "PGQUEUE_DATABASE_URL": database, "PYTHONPATH": str(tmp_path)}
    worker = subprocess.Popen(command, env=environment, cwd=tmp_path)
    try:
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    finally:
        worker.terminate()
        worker.wait(30)


async def test_asynchronous_queues_obey(clock: Clock, database: str) -> None:
    async with pgqueue.AsyncPgQueue(database) as apq:

        @apq.task(delay=60)
        async def work() -> None: ...

        clock.freeze(NOON)
        await work.enqueue()
        assert await run_jobs_async(apq) == []
        clock.move(minutes=1)
        assert len(await run_jobs_async(apq)) == 1


def test_a_database_without_a_clock_is_told_so(empty_database: str) -> None:
    clock = Clock(empty_database)
    for use in (clock.now, clock.freeze, clock.thaw, clock.reset, lambda: clock.move(hours=1)):
        with pytest.raises(pgqueue.PgQueueError, match="install_clock"):
            use()
    clock.close()


def test_a_session_that_does_not_obey_is_found(clock: Clock, database: str) -> None:
    with psycopg.connect(database) as fine, psycopg.connect(database, options="-c search_path=public") as stubborn:
        clock.check(fine)
        with pytest.raises(pgqueue.PgQueueError, match="search_path"):
            clock.check(stubborn)


def test_it_moves_inside_of_transactions_of_every_isolation(clock: Clock, database: str) -> None:
    clock.freeze(NOON)
    with psycopg.connect(database) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        assert connection.execute("SELECT clock_timestamp()").fetchone() == (NOON,)
        clock.move(hours=1)
        assert connection.execute("SELECT clock_timestamp()").fetchone() == (NOON + timedelta(hours=1),)


def test_no_statement_and_no_revision_asks_another_clock() -> None:
    """What this rests on: all of the schema's times come from clock_timestamp(), without a schema in front."""
    other = re.compile(
        r"\b(now\(\)|current_timestamp|statement_timestamp|transaction_timestamp|pg_catalog\.clock)", re.I
    )
    for name, text in pgqueue.sql.TEXTS.items():
        assert not other.search(text), name
    assert not other.search(migrate.script().replace("alembic", ""))


def test_it_may_be_installed_twice_and_in_another_schema(empty_database: str) -> None:
    migrate.upgrade(empty_database, schema="jobs")
    install_clock(empty_database, schema="jobs").close()
    clock = install_clock(empty_database, schema="jobs")
    clock.freeze(NOON)
    with pgqueue.PgQueue(empty_database, schema="jobs") as pq:

        @pq.task(delay=60)
        def work() -> None: ...

        work.enqueue()
        clock.move(minutes=1)
        assert len(run_jobs(pq)) == 1
    with psycopg.connect(empty_database) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_attrdef WHERE pg_get_expr(adbin, adrelid) LIKE '%pg_catalog.clock_timestamp()%'"
        ).fetchone()
        assert found == (1,)  # the token of leases
    clock.close()

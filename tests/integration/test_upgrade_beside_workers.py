"""An upgrade of the schema under producers and workers that do not stop: how long they wait, who may stay, who leaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName, migrate
from pgqueue.errors import SchemaError
from pgqueue.worker import Worker, WorkerOptions, maintenance
from tests.acceptance.command_line import CommandLine
from tests.releases import Release, Upgrade
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

BACKLOG = 200_000
LONGEST = 10.0
"""Seconds that an enqueue may be held up on a slow machine; the session that is in the way stays for as long as it likes."""
BLOCKED = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'pgqueue migrate' AND wait_event_type = 'Lock'
"""
HOLDS_JOB = """
    SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
    WHERE a.application_name = 'pgqueue migrate' AND l.relation = 'pgqueue.job'::regclass
      AND l.mode = 'AccessExclusiveLock' AND l.granted
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    return Release(tmp_path, monkeypatch)


TAKE = """
    WITH gone AS (
        DELETE FROM pgqueue.job
        WHERE id = (SELECT id FROM pgqueue.job WHERE queue = 'q' ORDER BY position LIMIT 1 FOR UPDATE SKIP LOCKED)
        RETURNING *
    )
    INSERT INTO pgqueue.archive (id, queue, task, priority, attempt, lost, state, created_at, finished_at)
    SELECT id, queue, task, priority, attempt, lost, 'completed', created_at, clock_timestamp() FROM gone
"""
"""What a worker of the first revision does to the tables, in short."""


class Busy:
    """Somebody who does one thing over and over; `longest` is how long that took in the worst case."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.turns = 0
        self.longest = 0.0
        self.error: BaseException | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stopped.is_set():
                began = time.monotonic()
                self.act()
                self.longest = max(self.longest, time.monotonic() - began)
                self.turns += 1
                self.stopped.wait(0.002)
        except BaseException as error:
            self.error = error

    def some_turns(self) -> None:
        wanted = self.turns + 5
        wait_until(lambda: self.turns >= wanted or self.error, PATIENCE, "they go on")

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        assert self.error is None, repr(self.error)


@contextmanager
def busy(*acts: Callable[[], None]) -> Iterator[list[Busy]]:
    everybody = [Busy(act) for act in acts]
    try:
        yield everybody
    finally:
        for one in everybody:
            one.stop()


def fill(admin: psycopg.Connection[Any]) -> None:
    admin.execute(
        "INSERT INTO pgqueue.job (queue, task, args) SELECT 'backlog', 'work', '[1]' FROM generate_series(1, %s)",
        [BACKLOG],
    )


def wait_for_tries(admin: psycopg.Connection[Any], number: int) -> None:
    """The migration came to the lock, gave way, and came again: every try is a connection of its own."""
    seen: set[int] = set()

    def tried() -> bool:
        seen.update(pid for (pid,) in admin.execute(BLOCKED).fetchall())
        return len(seen) >= number

    wait_until(tried, PATIENCE * 2, f"{number} tries of the migration")


@pytest.mark.slow
def test_a_migration_of_a_full_table_waits_for_an_idle_transaction_without_holding_up_the_others(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], release: Release
) -> None:
    new = release.add_column(oldest_worker=release.head)
    work = pq.task(name="work", queue="q")(lambda number: None)
    fill(admin)
    sent: list[int] = []
    with psycopg.connect(database) as idle, running(pq, concurrency=4, lease=30) as watched:
        idle.execute("SELECT FROM pgqueue.job LIMIT 1")
        with busy(lambda: sent.append(work.enqueue(1))) as [producer]:
            producer.some_turns()
            upgrade = Upgrade(database)
            wait_for_tries(admin, 3)
            producer.some_turns()
            assert not upgrade.answers
            idle.rollback()
            assert upgrade.result() == migrate.MigrationResult(before=release.head, after=new)
            producer.some_turns()
        print(f"\nlongest enqueue {producer.longest:.2f} s of {producer.turns}")
        assert producer.longest < LONGEST
        wait_for_count(admin, len(sent), "archive", "queue = 'q' AND state = 'completed' AND attempt = 1")
        assert not watched.seen(EventName.LEASE_LOST)
        assert not watched.seen(EventName.JOB_FAILED)
    assert watched.status == 0
    assert count(admin, "job", "queue = 'q'") == 0
    assert count(admin, "job", "queue = 'backlog' AND more IS NULL") == BACKLOG


@pytest.mark.slow
def test_from_the_first_revision_to_this_one_neither_enqueues_nor_claims_are_held_up(empty_database: str) -> None:
    migrate.to(empty_database, "0001")
    with (
        pgqueue.PgQueue(empty_database) as pq,
        psycopg.connect(empty_database, autocommit=True) as admin,
        psycopg.connect(empty_database, autocommit=True) as worker,
        psycopg.connect(empty_database) as idle,
    ):
        fill(admin)
        idle.execute("SELECT FROM pgqueue.job, pgqueue.worker LIMIT 1")
        with busy(lambda: pq.enqueue("work", queue="q") and None, lambda: worker.execute(TAKE) and None) as everybody:
            upgrade = Upgrade(empty_database)
            wait_for_tries(admin, 2)
            for one in everybody:
                one.some_turns()
            assert not upgrade.answers
            idle.rollback()
            assert upgrade.result().after == migrate.heads()[0]
        print(f"\nlongest enqueue and claim {[round(one.longest, 2) for one in everybody]} s")
        assert max(one.longest for one in everybody) < LONGEST
        waiting = len(pq.claim("q", limit=10_000))
        assert waiting + count(admin, "archive") == everybody[0].turns


def test_a_migration_gives_way_before_it_makes_a_worker_the_victim_of_a_deadlock(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], release: Release
) -> None:
    lock = "'LOCK TABLE SCHEMA.{} IN ACCESS EXCLUSIVE MODE'"
    new = release.add("two_tables", up=f"{lock.format('job')}, 'SELECT pg_sleep(0.1)', {lock.format('lease')}")
    with psycopg.connect(database) as caller:
        caller.execute("SELECT FROM pgqueue.lease FOR UPDATE")
        upgrade = Upgrade(database)
        wait_until(lambda: admin.execute(HOLDS_JOB).fetchone() == (1,), PATIENCE, "the migration is between both")
        pq.enqueue("work", queue="q", using=caller)
        assert not upgrade.answers
        caller.commit()
    assert upgrade.result().after == new
    assert count(admin, "job") == 1


def test_a_worker_of_this_release_goes_on_and_starts_on_the_schema_of_the_next_that_allows_it(
    pq: pgqueue.PgQueue,
    database: str,
    admin: psycopg.Connection[Any],
    release: Release,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str | None] = []
    look = maintenance.unfit_schema
    monkeypatch.setattr(maintenance, "REPAIR_EVERY", 0.2)
    monkeypatch.setattr(maintenance, "unfit_schema", lambda link: looks.append(look(link)))
    release.add_column(oldest_worker=release.head)
    release.add_column("lease", oldest_worker=release.head)
    new = release.add_column("archive", oldest_worker=release.head)

    @pq.task(name="work", queue="q", max_attempts=2, retry=pgqueue.Fixed(0))
    def work(number: int) -> None:
        if number % 10 == 0:
            raise ValueError("once more") if pgqueue.current_job().attempt == 1 else pgqueue.DeadLetter("no")
        if number % 10 == 1 and pgqueue.current_job().attempt == 1:
            raise ValueError("once more")

    def hundred(number: int) -> None:
        work.enqueue_many([(n,) for n in range(100)])
        wait_for_count(admin, 10 * number, "dead_letter")
        wait_for_count(admin, 90 * number, "archive")

    with running(pq, poll=0.2, breaker_failures=0, unfit_failures=0) as before:
        hundred(1)  # from now on its statements are prepared
        assert migrate.upgrade(database).after == new
        hundred(2)
        looked = len(looks)
        wait_until(lambda: len(looks) > looked, PATIENCE, "it has looked at the schema again")
        with running(pq, poll=0.2, breaker_failures=0, unfit_failures=0):
            hundred(3)
        assert not before.seen(EventName.LOOP_FAILED)
    assert (before.status, set(looks)) == (0, {None})


def test_a_worker_of_this_release_leaves_a_schema_that_does_not_allow_it_any_more(
    pq: pgqueue.PgQueue,
    database: str,
    admin: psycopg.Connection[Any],
    release: Release,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maintenance, "REPAIR_EVERY", 0.2)
    new = release.add_column()
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq, poll=0.2) as watched:
        migrate.upgrade(database)
        failed = watched.wait_for(EventName.WORKER_FAILED, loop="maintenance", error="SchemaError")
        assert f"at revision {new}, this pgqueue" in failed.facts["detail"]
        assert watched.join() == 1
    with pytest.raises(SchemaError, match=f"at revision {new}.*upgrade the package"):
        Worker(pq, WorkerOptions()).run()
    assert count(admin, "worker") == 0


def test_a_schema_that_breaks_a_worker_ends_it_at_once(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], release: Release
) -> None:
    """Not a minute later: what fails on the schema looks at its revision."""
    release.add("gone", up="'ALTER TABLE SCHEMA.job RENAME COLUMN run_at TO due'")
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq, poll=0.2) as watched:
        migrate.upgrade(database)
        watched.wait_for(EventName.WORKER_FAILED, loop="maintenance", error="SchemaError")
        assert watched.join() == 1


def test_workers_of_another_revision_refuse_with_one_sentence(
    empty_database: str, tmp_path: Path, release: Release
) -> None:
    cli = CommandLine(tmp_path, empty_database)
    migrate.to(empty_database, "0001")
    assert "is at revision 0001, this pgqueue" in cli.sentence(1, "worker", "--app", "shop")
    new = release.add_column()
    migrate.upgrade(empty_database)
    assert f"is at revision {new}, this pgqueue" in cli.sentence(1, "worker", "--app", "shop")
    assert "upgrade the package" in cli.sentence(1, "migrate")
    assert cli.run("migrate", "--check")[0] == 1


def test_the_package_of_this_release_leaves_the_schema_of_the_next_as_it_is_and_runs_on_it(
    database: str, tmp_path: Path, release: Release
) -> None:
    cli = CommandLine(tmp_path, database)
    new = release.add_column(oldest_worker=release.head)
    migrate.upgrade(database)
    assert f"nothing to do (revision {new})" in cli.good("migrate")
    assert "still runs on it" in cli.good("migrate", "--check")
    with cli.worker() as program:
        cli.good("enqueue", "shop.note", "--app", "shop", "--args", '["hello"]')
        cli.wait_for_mark("hello")
        program.process.terminate()
        assert program.wait() == 0
    with psycopg.connect(database) as connection:  # a note of another revision says nothing about this one
        connection.execute("UPDATE pgqueue.schema_version SET version_num = '9999'")
    assert "is at revision 9999" in cli.sentence(1, "worker", "--app", "shop")


def test_the_way_back_takes_its_note_along(database: str, release: Release) -> None:
    note = "SELECT obj_description('pgqueue.schema_version'::regclass)"
    release.add_column()
    with psycopg.connect(database, autocommit=True) as connection:
        before = connection.execute(note).fetchone()
        assert before is not None
        assert before[0].startswith(f"Revision {release.head}: workers of revision ")
        migrate.upgrade(database)
        assert connection.execute(note).fetchone() != before
        migrate.to(database, release.head)
        assert connection.execute(note).fetchone() == before

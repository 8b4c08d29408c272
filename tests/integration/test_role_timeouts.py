"""A database that is strict, full or read-only for a while: the worker backs off, lives, and does all of its jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName, embedded, migrate
from pgqueue.worker import Worker, WorkerOptions
from tests.conftest import FAST
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, running, wait_for_count

STRICT = {
    "statement_timeout": "1s",
    "lock_timeout": "100ms",
    "idle_in_transaction_session_timeout": "1s",
}


def configure(admin: psycopg.Connection[Any], **settings: str | None) -> None:
    """What sessions of this database begin with from now on; None resets it. The sessions that there are end."""
    [(name,)] = admin.execute("SELECT current_database()").fetchall()
    for setting, value in settings.items():
        change = f"RESET {setting}" if value is None else f"SET {setting} = '{value}'"
        admin.execute(f'ALTER DATABASE "{name}" {change}'.encode())
    end_others(admin)


def end_others(admin: psycopg.Connection[Any]) -> None:
    """End every session in this database but our own, and wait until they are gone."""
    others = "datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    ended = [pid for (pid,) in admin.execute(f"SELECT pid FROM pg_stat_activity WHERE {others}".encode()).fetchall()]
    admin.execute("SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [ended])
    left = "SELECT pid FROM pg_stat_activity WHERE pid = ANY (%s)"
    wait_until(lambda: not admin.execute(left, [ended]).fetchall(), PATIENCE, "the sessions are gone")


def alive(watched: Watched) -> bool:
    return watched.thread.is_alive() and all(part._thread.is_alive() for part in watched.loops().values())


def test_a_worker_lives_and_does_all_jobs_under_strict_timeouts_of_its_sessions(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    configure(admin, **STRICT)

    @pq.task(name="work", queue="q", retry=pgqueue.Fixed(0))
    def work(number: int) -> None:
        if number % 10 == 0 and pgqueue.current_job().attempt == 1:
            raise ValueError("once more")

    with psycopg.connect(database, autocommit=True) as session, running(pq, lease=30.0, poll=0.2) as watched:
        shown = [session.execute(f"SHOW {name}".encode()).fetchone() for name in STRICT]
        assert shown == [(value,) for value in STRICT.values()]
        work.enqueue_many([(number,) for number in range(200)])
        wait_for_count(admin, 200, "archive")
        # Somebody's lock lasts longer than the settles may wait for it.
        admin.execute("BEGIN")
        admin.execute("LOCK TABLE pgqueue.archive IN EXCLUSIVE MODE")
        work.enqueue_many([(number,) for number in range(200)])
        watched.wait_for(EventName.LOOP_FAILED, loop="settle")
        wait_until(lambda: len(watched.seen(EventName.LOOP_FAILED, loop="settle")) > 2, PATIENCE, "it tries again")
        admin.execute("COMMIT")
        wait_for_count(admin, 400, "archive", "state = 'completed' AND lost = 0")
        watched.wait_for(EventName.LOOP_RECOVERED, loop="settle")
        assert alive(watched)
    assert watched.status == 0
    assert count(admin, "job") == count(admin, "dead_letter") == 0


def test_jobs_that_enqueue_more_than_the_pool_can_serve_at_once_are_all_done(
    database: str, admin: psycopg.Connection[Any]
) -> None:
    with pgqueue.PgQueue(database, pool_size=2) as pq:

        @pq.task(name="child", queue="q")
        def child(number: int) -> None: ...

        @pq.task(name="parent", queue="q")
        def parent(number: int) -> None:
            with psycopg.connect(database) as connection, connection.transaction():
                for _ in range(3):
                    child.enqueue(number, using=connection)
                child.enqueue(number)  # over the pool, while the transaction is open

        parent.enqueue_many([(number,) for number in range(100)])
        with running(pq, lease=30.0, poll=0.2, concurrency=20) as watched:
            wait_for_count(admin, 500, "archive", "attempt = 1 AND lost = 0")
            assert not watched.seen(EventName.LEASE_LOST)
            assert not watched.seen(EventName.JOB_FAILED)
    assert count(admin, "job") == count(admin, "dead_letter") == 0


def test_sessions_do_not_grow_with_failing_jobs(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    @pq.task(name="work", queue="q", max_attempts=1)
    def work(number: int) -> None:
        if number % 20 == 0:
            pq.enqueue("other", queue="elsewhere")
        raise ValueError(number)

    def sessions() -> int:
        ours = "datname = current_database() AND backend_type = 'client backend'"
        statement = f"SELECT count(*) FROM pg_stat_activity WHERE {ours}".encode()
        [(number,)] = admin.execute(statement).fetchall()
        return int(number)

    with running(pq, lease=30.0, poll=0.2, breaker_failures=0, unfit_failures=0) as watched:
        work.enqueue_many([(number,) for number in range(200)])
        wait_for_count(admin, 200, "dead_letter")
        before = sessions()
        work.enqueue_many([(number,) for number in range(2000)])
        wait_for_count(admin, 2200, "dead_letter")
        # The pool may not have reached its size before; the worker's own are one a loop, and one for what is rare.
        assert sessions() <= max(before, 1 + pq.settings.pool_size + len(watched.loops()) + 1)
    assert count(admin, "job", "queue = 'elsewhere'") == 110


class Full:
    """A small server, and whoever takes its last connections: those kept for superusers too, since all here are."""

    def __init__(self, server: embedded.Server) -> None:
        self.url = server.url
        self.hogs: list[psycopg.Connection[Any]] = []
        migrate.upgrade(self.url, schema="pgqueue")

    def fill(self) -> None:
        """Take what is left."""
        while True:
            try:
                self.hogs.append(psycopg.connect(self.url, application_name="hog"))
            except psycopg.OperationalError:
                return

    def free(self) -> None:
        while self.hogs:
            self.hogs.pop().close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    options = ("-c", "fsync=off", "-c", "max_connections=16")
    with embedded.start(tmp_path / "postgres", options=options) as server:
        small = Full(server)
        try:
            yield small
        finally:
            small.free()


def test_a_worker_on_a_server_without_free_connections_backs_off_and_goes_on(full: Full) -> None:
    with pgqueue.PgQueue(full.url, pool_size=2) as pq, psycopg.connect(full.url, autocommit=True) as look:
        work = pq.task(name="work", queue="q")(lambda: None)
        with running(pq, lease=30.0, poll=0.2) as watched:
            work.enqueue()
            wait_for_count(look, 1, "archive")
            pq.close()

            def refusals() -> list[pgqueue.Event]:
                failed = watched.seen(EventName.LOOP_FAILED)
                return [event for event in failed if re.search("slots|clients", event.facts["detail"])]

            def squeeze() -> bool:
                """The worker's sessions end, and others take their places, if they are there before it is back."""
                look.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgqueue'"
                )
                full.fill()
                return len(refusals()) > 3

            wait_until(squeeze, PATIENCE, "it is refused, and tries again")
            assert alive(watched)
            assert all(event.facts["retry_in"] > 0.01 for event in refusals())
            work.enqueue(using=look)
            full.free()
            wait_for_count(look, 2, "archive")
            assert alive(watched)
        assert watched.status == 0


def test_a_worker_goes_on_when_its_database_was_read_only_for_a_while(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    work = pq.task(name="work", queue="q")(lambda: None)
    with running(pq, lease=30.0, poll=0.2) as watched:
        work.enqueue()
        wait_for_count(admin, 1, "archive")
        configure(admin, default_transaction_read_only="on")
        for name in ("claim", "heartbeat"):
            if name == "heartbeat":
                watched.worker.heartbeat.ask()
            watched.wait_for(EventName.LOOP_FAILED, loop=name, error="DatabaseUnavailable")
        with pytest.raises(pgqueue.DatabaseUnavailable, match="no writes"):
            work.enqueue()
        # The sessions that there are stay read-only: a worker that kept them would never work again.
        [(name,)] = admin.execute("SELECT current_database()").fetchall()
        admin.execute("SET default_transaction_read_only = off")
        admin.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only'.encode())
        refused = 0
        while refused <= pq.settings.pool_size:  # the pool drops such a session when it is refused there
            try:
                work.enqueue()
                break
            except pgqueue.DatabaseUnavailable:
                refused += 1
        wait_for_count(admin, 2, "archive")
        watched.wait_for(EventName.LOOP_RECOVERED, loop="claim")
        assert alive(watched)
    assert watched.status == 0


def test_a_worker_that_is_started_on_a_read_only_database_says_so_and_leaves(
    database: str, admin: psycopg.Connection[Any]
) -> None:
    configure(admin, default_transaction_read_only="on")
    with pgqueue.PgQueue(database) as pq:
        pq.task(name="work", queue="q")(lambda: None)
        with pytest.raises(pgqueue.DatabaseUnavailable, match="accepts no writes"):
            Worker(pq, WorkerOptions()).run()


def test_target_session_attrs_finds_the_server_that_accepts_writes(
    database: str, server_url: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    primary = psycopg.conninfo.conninfo_to_dict(database)
    options = (*FAST, "-c", "default_transaction_read_only=on")
    with embedded.start(tmp_path / "postgres", options=options) as replica:
        other = psycopg.conninfo.conninfo_to_dict(replica.url)
        both = {key: f"{other[key]},{primary.get(key, default)}" for key, default in (("host", ""), ("port", "5432"))}
        parts: dict[str, Any] = {**primary, **both, "target_session_attrs": "read-write"}
        url = psycopg.conninfo.make_conninfo(**parts)
        with pgqueue.PgQueue(url) as pq:
            work = pq.task(name="work", queue="q")(lambda: None)
            work.enqueue()
            with running(pq, lease=30.0, poll=0.2) as watched:
                wait_for_count(admin, 1, "archive")
                end_others(admin)
                work.enqueue()
                wait_for_count(admin, 2, "archive")
                assert alive(watched)

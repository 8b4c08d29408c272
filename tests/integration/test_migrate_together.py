"""Several migrations at once, and migrations that are killed: real processes on a real server."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import psycopg
import pytest

from pgqueue import migrate
from pgqueue.errors import SchemaError

PROGRAM = """
import sys
from pgqueue import migrate
result = migrate.upgrade(sys.argv[1], lock_timeout=float(sys.argv[2]))
print("applied" if result.before != result.after else "waited")
"""
TABLES = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = 'pgqueue'"
BLOCKED = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND wait_event_type = 'Lock'
"""
OTHERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def start(dsn: str, lock_timeout: float = 60) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, dsn, str(lock_timeout)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def number(connection: psycopg.Connection, query: str) -> int | None:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


def blocked_pid(watcher: psycopg.Connection) -> int:
    """The backend of the migration, once it waits for a lock in the middle of its run."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if pid := number(watcher, BLOCKED):
            return pid
        time.sleep(0.02)
    raise AssertionError("the migration never came to the lock that this test holds")


def block_halfway(connection: psycopg.Connection) -> None:
    """Take the name of a later table in a transaction that has not ended: the migration waits when it gets there."""
    connection.execute("CREATE SCHEMA IF NOT EXISTS pgqueue")
    connection.commit()
    connection.execute("CREATE TABLE pgqueue.archive (id bigint)")


def test_of_five_processes_one_applies_and_all_succeed(empty_database: str) -> None:
    processes = [start(empty_database) for _ in range(5)]
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 5, answers
    assert sorted(answer[0].strip() for answer in answers) == ["applied"] + ["waited"] * 4
    assert migrate.check(empty_database).state == "current"


def test_a_migration_whose_backend_is_terminated_halfway_leaves_nothing(empty_database: str) -> None:
    with psycopg.connect(empty_database) as blocker, psycopg.connect(empty_database, autocommit=True) as watcher:
        block_halfway(blocker)
        process = start(empty_database)
        watcher.execute("SELECT pg_terminate_backend(%s)", (blocked_pid(watcher),))
        _, complaint = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "DatabaseUnavailable" in complaint
        blocker.rollback()
        assert number(watcher, TABLES) == 0
        assert migrate.upgrade(empty_database).before is None
        assert migrate.check(empty_database).state == "current"


def test_a_migration_that_is_killed_halfway_leaves_nothing(empty_database: str) -> None:
    with psycopg.connect(empty_database) as blocker, psycopg.connect(empty_database, autocommit=True) as watcher:
        block_halfway(blocker)
        process = start(empty_database)
        blocked_pid(watcher)
        process.kill()
        process.communicate(timeout=60)
        blocker.rollback()
        assert migrate.upgrade(empty_database).before is None
        assert migrate.check(empty_database).state == "current"


def test_a_table_lock_that_goes_away_only_delays_the_migration(empty_database: str) -> None:
    with psycopg.connect(empty_database) as blocker, psycopg.connect(empty_database, autocommit=True) as watcher:
        block_halfway(blocker)
        process = start(empty_database)
        first = blocked_pid(watcher)
        while blocked_pid(watcher) == first:  # it gives way after DDL_PATIENCE, and comes back on another connection
            assert process.poll() is None
            time.sleep(0.02)
        blocker.rollback()
        answer, complaint = process.communicate(timeout=60)
        assert answer.strip() == "applied", complaint
        assert migrate.check(empty_database).state == "current"


def test_a_migration_killed_at_any_moment_can_be_run_again(empty_database: str) -> None:
    process = start(empty_database)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint
    for _ in range(5):
        migrate.to(empty_database, "base")
        process = start(empty_database)
        with psycopg.connect(empty_database, autocommit=True) as watcher:
            deadline = time.monotonic() + 30
            while not number(watcher, OTHERS) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.001)
        time.sleep(random.uniform(0, 0.1))
        process.kill()
        process.communicate(timeout=60)
        migrate.upgrade(empty_database)
        assert migrate.check(empty_database).state == "current"


def test_the_wait_for_another_migration_is_bounded(empty_database: str) -> None:
    with psycopg.connect(empty_database) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('pgqueue migrate pgqueue', 0))")
        started = time.monotonic()
        with pytest.raises(SchemaError, match="another migration"):
            migrate.upgrade(empty_database, lock_timeout=0.3)
        assert 0.25 < time.monotonic() - started < 30
        migrate.upgrade(empty_database, schema="other", lock_timeout=0.3)


def test_a_table_that_is_in_the_way_is_reported_and_nothing_is_changed(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA pgqueue")
        connection.execute("CREATE TABLE pgqueue.archive (id bigint)")
        with pytest.raises(SchemaError, match="archive"):
            migrate.upgrade(empty_database)
        assert number(connection, TABLES) == 1

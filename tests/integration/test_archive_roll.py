"""The function that makes tomorrow's partitions of the archive and drops the old ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date, timedelta

import psycopg
import pytest

from pgqueue import migrate

PARTITIONS = """
    SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'pgqueue.archive'::regclass ORDER BY c.relname
"""
FINISH = """
    INSERT INTO pgqueue.archive (id, queue, task, priority, attempt, lost, state, created_at, finished_at)
    VALUES (1, 'q', 't', 0, 1, 0, 'completed', %(at)s, %(at)s) RETURNING tableoid::regclass::text
"""


@pytest.fixture
def db(database: str) -> Iterator[psycopg.Connection]:
    """A connection whose time zone is far from UTC: the days of the archive are UTC's."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SET TimeZone = 'Pacific/Kiritimati'")
        drop_days(connection)  # of the day when this run began, which may be yesterday
        roll(connection, None)
        yield connection


def roll(db: psycopg.Connection, keep: str | None = "7 days") -> int:
    row = db.execute("SELECT pgqueue.archive_roll(%s::interval)", (keep,)).fetchone()
    assert row is not None
    return int(row[0])


def utc_today(db: psycopg.Connection) -> date:
    row = db.execute("SELECT (clock_timestamp() AT TIME ZONE 'UTC')::date").fetchone()
    assert row is not None
    return row[0]  # type: ignore[no-any-return]


def partitions(db: psycopg.Connection) -> list[str]:
    return [row[0] for row in db.execute(PARTITIONS)]


def name(day: date) -> str:
    return f"archive_{day:%Y%m%d}"


def drop_days(db: psycopg.Connection) -> None:
    for partition in partitions(db)[:-1]:
        db.execute(f"DROP TABLE pgqueue.{partition}".encode())


def add_day(db: psycopg.Connection, day: date) -> None:
    bounds = f"FROM ('{day} 00:00+00') TO ('{day + timedelta(days=1)} 00:00+00')"
    db.execute(f"CREATE TABLE pgqueue.{name(day)} PARTITION OF pgqueue.archive FOR VALUES {bounds}".encode())


def finish(db: psycopg.Connection, day: date) -> str:
    row = db.execute(FINISH, {"at": f"{day} 12:00+00"}).fetchone()
    assert row is not None
    return str(row[0])


def test_a_migrated_schema_has_today_and_three_days_more(empty_database: str) -> None:
    migrate.upgrade(empty_database)
    with psycopg.connect(empty_database, autocommit=True) as db:
        today = utc_today(db)
        assert partitions(db) == [*(name(today + timedelta(days=n)) for n in range(4)), "archive_rest"]
        assert roll(db) == 0, "a second call finds nothing to do"


def test_rows_land_in_the_partition_of_their_day(db: psycopg.Connection) -> None:
    today = utc_today(db)
    for day in (today, today + timedelta(days=3)):
        assert finish(db, day) == f"pgqueue.{name(day)}"
    assert finish(db, today + timedelta(days=4)) == "pgqueue.archive_rest"


def test_days_older_than_asked_are_dropped_and_no_others(db: psycopg.Connection) -> None:
    yesterday = utc_today(db) - timedelta(days=1)
    for days in (0, 1, 30):
        add_day(db, yesterday - timedelta(days=days))
    assert roll(db, None) == 0, "without a limit nothing is dropped"
    assert roll(db, "1 day") == 2
    assert partitions(db)[0] == name(yesterday)
    assert roll(db, "-30 days") == 1, "a negative limit is none: yesterday goes, today stays"
    assert partitions(db)[0] == name(yesterday + timedelta(days=1))


def test_old_rows_of_the_default_partition_are_deleted(db: psycopg.Connection) -> None:
    old, young = utc_today(db) - timedelta(days=9), utc_today(db) - timedelta(days=2)
    assert finish(db, old) == finish(db, young) == "pgqueue.archive_rest"
    assert roll(db) == 1
    assert [row[0] for row in db.execute("SELECT (finished_at AT TIME ZONE 'UTC')::date FROM pgqueue.archive")] == [
        young
    ]


def test_rows_already_in_the_default_partition_do_not_stop_the_other_days(db: psycopg.Connection) -> None:
    drop_days(db)
    today = utc_today(db)
    assert finish(db, today) == "pgqueue.archive_rest"
    assert roll(db) == 3
    assert partitions(db) == [*(name(today + timedelta(days=n)) for n in range(1, 4)), "archive_rest"]
    assert finish(db, today + timedelta(days=1)) == f"pgqueue.{name(today + timedelta(days=1))}"
    assert roll(db) == 0


@pytest.mark.parametrize("lock", ["LOCK TABLE pgqueue.archive IN ACCESS EXCLUSIVE MODE", "SELECT FROM pgqueue.archive"])
def test_a_locked_archive_puts_the_roll_off_and_breaks_nothing(
    db: psycopg.Connection, database: str, lock: str
) -> None:
    drop_days(db)
    add_day(db, utc_today(db) - timedelta(days=30))
    with psycopg.connect(database) as other:
        other.execute(lock.encode())
        started = time.monotonic()
        assert roll(db) == 0
        assert time.monotonic() - started < 30
    assert roll(db) == 5


def test_a_locked_row_of_the_default_partition_does_not_stop_the_roll(db: psycopg.Connection, database: str) -> None:
    finish(db, utc_today(db) - timedelta(days=30))
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgqueue.archive FOR UPDATE")
        assert roll(db) == 0
    assert roll(db) == 1


def test_of_two_rolls_at_once_one_does_the_work(db: psycopg.Connection, database: str) -> None:
    drop_days(db)
    with psycopg.connect(database) as other:
        assert roll(other) == 4
        assert roll(db) == 0
    assert len(partitions(db)) == 5


def test_a_view_on_an_old_day_keeps_that_day_only(db: psycopg.Connection) -> None:
    old = utc_today(db) - timedelta(days=30)
    add_day(db, old)
    add_day(db, old + timedelta(days=1))
    db.execute(f"CREATE VIEW report AS SELECT id FROM pgqueue.{name(old)}".encode())
    assert roll(db) == 1
    assert name(old) in partitions(db)


def test_a_role_needs_the_right_to_roll_and_no_other(db: psycopg.Connection) -> None:
    drop_days(db)
    with db.transaction(force_rollback=True):
        db.execute("CREATE ROLE pgqueue_test_roll")
        db.execute("GRANT USAGE ON SCHEMA pgqueue TO pgqueue_test_roll")
        db.execute("SET LOCAL ROLE pgqueue_test_roll")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), db.transaction():
            roll(db)
        db.execute("RESET ROLE")
        db.execute("GRANT EXECUTE ON FUNCTION pgqueue.archive_roll TO pgqueue_test_roll")
        db.execute("SET LOCAL ROLE pgqueue_test_roll")
        assert roll(db) == 4


def test_partitions_are_no_drift(db: psycopg.Connection, database: str) -> None:
    drop_days(db)
    assert migrate.check(database).state == "current"

"""Revision 0005: the table of schedules comes and goes, and nothing else does."""

from __future__ import annotations

import psycopg

from pgqueue import migrate
from tests.conftest import execute
from tests.integration.test_migrate import listing


def before(database: str) -> str:
    """The revision that 0005 follows."""
    [step] = [step for step in migrate.heads() if step]
    assert step >= "0005"
    from alembic.script import ScriptDirectory

    down = ScriptDirectory(str(migrate.migrations_path())).get_revision("0005").down_revision
    assert isinstance(down, str)
    return down


def test_the_way_down_drops_the_schedules_and_keeps_their_jobs(database: str) -> None:
    execute(database, "INSERT INTO pgqueue.schedule (name, task, every) VALUES ('s', 't', 60)")
    execute(database, "INSERT INTO pgqueue.job (queue, task, headers) VALUES ('q', 't', '{\"schedule\": \"s\"}')")
    migrate.to(database, before(database))
    assert "schedule.name" not in listing(database)
    assert execute(database, "SELECT task FROM pgqueue.job") == [("t",)]
    migrate.upgrade(database)
    assert execute(database, "SELECT name FROM pgqueue.schedule") == []


def test_a_name_is_a_schedule_once_and_rows_get_their_defaults(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        insert = "INSERT INTO pgqueue.schedule (name, task, cron) VALUES ('s', 't', '* * * * *') RETURNING"
        columns = "tz, missed, grace, overlap, queue, priority, max_attempts, version, definition, superseded"
        row = connection.execute(f"{insert} {columns}, next_at <= clock_timestamp()".encode()).fetchone()
        assert row == ("UTC", "once", 60.0, True, "default", 0, 20, 1, None, [], True)
        try:
            connection.execute(f"{insert} name".encode())
        except psycopg.errors.UniqueViolation:
            return
    raise AssertionError("a second one of that name")

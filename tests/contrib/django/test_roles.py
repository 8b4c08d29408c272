"""The role that Django assumes is that of workers and commands too."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections

from pgqueue.contrib.django import queue, queues
from pgqueue.contrib.django.databases import url_of
from tests.conftest import execute
from tests.contrib.django.conftest import connected, refreshed, work
from tests.contrib.django.shop import tasks
from tests.contrib.django.test_checks import found


@pytest.fixture(params=["plain", "with a \\ and a blank"])
def role(request: Any, empty_database: str) -> Iterator[str]:
    """A role that may make a schema in a database of its own."""
    name = f"{request.param} {uuid.uuid4().hex[:8]}"
    execute(empty_database, f'CREATE ROLE "{name}" NOLOGIN')
    database = psycopg.conninfo.conninfo_to_dict(empty_database)["dbname"]
    execute(
        empty_database, f'GRANT CREATE ON DATABASE "{database}" TO "{name}"; GRANT ALL ON SCHEMA public TO "{name}"'
    )
    yield name
    execute(empty_database, f'DROP OWNED BY "{name}" CASCADE; DROP ROLE "{name}"')


def test_migrations_jobs_and_workers_are_those_of_the_role(
    role: str, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues._queues.clear()
    monkeypatch.setitem(
        connections.settings["default"], "OPTIONS", {"assume_role": role, "options": "-c statement_timeout=70s"}
    )
    with connected(default=empty_database):
        call_command("migrate", run_syncdb=True, verbosity=0)
        with psycopg.connect(url_of("default")) as own:
            row = own.execute("SELECT current_user::text, current_setting('statement_timeout')").fetchone()
        assert row == (role, "70s")
        assert found(databases=["default"]) == {}
        result = tasks.echo.enqueue("by the role")
        work(queue())
        assert refreshed(result).return_value == "by the role"
        with connection.cursor() as cursor:
            cursor.execute("SELECT tableowner = %s FROM pg_tables WHERE tablename = 'archive'", [role])
            assert cursor.fetchall() == [(True,)]
    queues._queues.clear()

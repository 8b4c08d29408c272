"""Fixtures: a real server, and a database of its own for every test.

The server is the one of PGQUEUE_TEST_DATABASE_URL (a role that may create databases), or else the embedded one. A migrated
template is made once per run and cloned per test.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import pytest

import pgqueue
from pgqueue import embedded, migrate
from pgqueue.worker import worker as worker_module

FAST = ("-c", "fsync=off", "-c", "max_connections=300")
"""Tests kill processes, not the machine: waiting for its disk would only make them slow."""


# An example of a property takes as long as the machine lets it.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell without job control starts background commands with SIGINT ignored, and every process below inherits that; the
    # tests that send it mean to be heard.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    # The same under nohup: still ignored here, but not by the programs that are started.
    signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """A URL of the server under test, to a database that holds nothing of ours."""
    given = os.environ.get("PGQUEUE_TEST_DATABASE_URL")
    if given:
        yield given
        return
    # One server for all workers of a parallel run: whoever starts first starts it, whoever leaves last stops it.
    with embedded.start(server_folder(), options=FAST) as server:
        yield server.url


def server_folder() -> Path:
    """Where the server of this run lives: named after the process that began the run."""
    beginner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return Path(tempfile.gettempdir()) / f"pgqueue-tests-{beginner}"


def pytest_sessionfinish() -> None:
    """The run is over, and its server with it: nothing of it stays."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(server_folder(), ignore_errors=True)


def url_of(server_url: str, database: str) -> str:
    """The same server, another database."""
    parts = psycopg.conninfo.conninfo_to_dict(server_url)
    return psycopg.conninfo.make_conninfo(**{**parts, "dbname": database})


def execute(url: str, statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """One statement on a connection of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


@pytest.fixture(scope="session")
def template(server_url: str) -> Iterator[str]:
    """The name of a migrated database."""
    name = f"pgqueue_template_{uuid.uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}"')
    migrate.upgrade(url_of(server_url, name), schema="pgqueue")
    yield name
    execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')


def _fresh(server_url: str, origin: str) -> Iterator[str]:
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}" TEMPLATE "{origin}"')
    yield url_of(server_url, name)
    execute(server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture
def database(server_url: str, template: str) -> Iterator[str]:
    """The DSN of a migrated database that belongs to this test alone."""
    yield from _fresh(server_url, template)


@pytest.fixture
def empty_database(server_url: str) -> Iterator[str]:
    """The DSN of an empty database that belongs to this test alone."""
    yield from _fresh(server_url, "template0")


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process may take longer than their two seconds for the last writes, as a busy machine may make them:
    for tests of what is written then."""
    monkeypatch.setattr(worker_module, "LEAVING", 20.0)
    monkeypatch.setattr(worker_module, "CHILDREN_END", 10.0)


@pytest.fixture
def pq(database: str) -> Iterator[pgqueue.PgQueue]:
    """A queue on a database of its own."""
    with pgqueue.PgQueue(database) as queue:
        yield queue


@pytest.fixture
def admin(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A second session, in autocommit, to look behind the scenes with."""
    with psycopg.connect(database, autocommit=True) as connection:
        yield connection

"""Fixtures: a database that Django has migrated, and Django's connections to it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import django
import psycopg
import pytest
from asgiref.sync import SyncToAsync
from django.core.management import call_command
from django.db import connections
from django.test.utils import setup_test_environment, teardown_test_environment

import pgqueue
from pgqueue.contrib.django import queue, queues
from pgqueue.worker import Worker, WorkerOptions
from tests.conftest import execute, url_of
from tests.contrib.django.settings import database as entry

# Before a test asks Django for its settings: those that another one would configure have nothing in them.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.contrib.django.settings")
django.setup()


@pytest.fixture(scope="session", autouse=True)
def instrumented() -> Iterator[None]:
    """As a test runner of Django has it: an answer of the test client knows what it was rendered from."""
    setup_test_environment()
    yield
    teardown_test_environment()


@pytest.fixture(scope="session")
def shop_template(server_url: str) -> Iterator[str]:
    """The name of a database that `manage.py migrate` has made."""
    name = f"pgqueue_shop_{uuid.uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}"')
    with connected(default=url_of(server_url, name)):
        call_command("migrate", run_syncdb=True, verbosity=0)
    yield name
    execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def shop(server_url: str, shop_template: str) -> Iterator[str]:
    """The URL of a database of the shop that belongs to this test alone; Django's default connections lead there."""
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}" TEMPLATE "{shop_template}"')
    url = url_of(server_url, name)
    queues._queues.clear()  # what they remember is of another database
    with connected(default=url):
        yield url
    execute(server_url, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture
def pq(shop: str) -> pgqueue.PgQueue:
    """The queue behind the default backend."""
    return queue()


@pytest.fixture
def admin(shop: str) -> Iterator[psycopg.Connection[Any]]:
    """A second session, in autocommit, to look behind the scenes with."""
    with psycopg.connect(shop, autocommit=True) as connection:
        yield connection


def work(pq: pgqueue.PgQueue, **options: Any) -> None:
    """Run the jobs of a queue in threads of this process, until there are none."""
    # The poll is short: the end of the last job is found by looking.
    assert Worker(pq, WorkerOptions(**{"drain": True, "grace": 5.0, "poll": 0.1, **options})).run() == 0


def close_pool(connection: Any) -> None:
    """That of Django's option `pool`."""
    connection.close_pool()


def refreshed(result: Any) -> Any:
    """The same result, read again."""
    result.refresh()
    return result


class connected:  # noqa: N801 - used as a function is
    """Django's connections of these aliases lead there for the time of the block."""

    def __init__(self, **urls: str) -> None:
        self._entries = {alias: entry(url) for alias, url in urls.items()}
        self._before: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> None:
        close_everywhere()
        for alias, one in self._entries.items():
            chosen = connections.settings[alias]
            self._before[alias] = dict(chosen)
            chosen.update(one)

    def __exit__(self, *_error: object) -> None:
        close_everywhere()
        for alias, before in self._before.items():
            connections.settings[alias].update(before)


def close_everywhere() -> None:
    """In this thread, and in that of what tests in an event loop do synchronously."""
    connections.close_all()
    SyncToAsync.single_thread_executor.submit(connections.close_all).result()


@contextmanager
def other_is(**settings: Any) -> Iterator[None]:
    """The alias "other" has these settings for the time of the block."""
    chosen = connections.settings["other"]
    before = dict(chosen)
    with suppress(AttributeError):
        del connections["other"]  # made of the settings before, where it was used already
    chosen.update(settings)
    try:
        yield
    finally:
        with suppress(AttributeError):
            del connections["other"]
        chosen.clear()
        chosen.update(before)

"""Throw-away databases: one server and one migrated template for a session of tests, a clone for each that wants one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from pgqueue import embedded, migrate
from pgqueue.embedded.server import check_platform
from pgqueue.errors import ConfigurationError
from pgqueue.testing.leftovers import remove_abandoned, server_folder

VARIABLE = "PGQUEUE_TEST_DATABASE_URL"
FAST = ("-c", "fsync=off", "-c", "synchronous_commit=off", "-c", "full_page_writes=off", "-c", "max_connections=300")
"""Nothing of it is to survive a loss of power."""
PREFIX = "pgqueue_test_"
OTHERS = """
SELECT backend_xid IS NOT NULL, pid FROM pg_stat_activity WHERE datname = %(database)s AND backend_type = 'client backend'
"""
LEFT_OPEN = "pgqueue_prepare_template left a transaction open in the template: commit it, and close the connection"


@contextmanager
def server(given: str | None) -> Iterator[str]:
    """The URL of a server on which databases may be made: the given one, or else a private one, which all processes of a
    parallel run share: whoever comes first starts it, whoever leaves last stops it."""
    if given:
        yield given
        return
    check_platform()
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        remove_abandoned()
    with embedded.start(server_folder(), options=FAST) as started:
        yield started.url


def url_of(server_url: str, database: str) -> str:
    """The same server, another database."""
    parts: dict[str, Any] = {**psycopg.conninfo.conninfo_to_dict(server_url), "dbname": database}
    return psycopg.conninfo.make_conninfo(**parts)


@contextmanager
def database(server_url: str, origin: str | None = None) -> Iterator[str]:
    """The name of a new database, a clone of `origin` or an empty one, which is dropped at the end."""
    name = PREFIX + uuid.uuid4().hex[:16]
    template = sql.Identifier(origin or "template0")
    _execute(server_url, sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), template))
    try:
        yield name
    finally:
        _execute(server_url, sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))


def migrated(url: str, schema: str) -> None:
    """Make the queue's schema there."""
    migrate.upgrade(url, schema=schema)


def end_sessions(server_url: str, name: str) -> None:
    """End the sessions that were left open in a database that is to be cloned; ConfigurationError where one has work that is
    not committed."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        rows = connection.execute(OTHERS, {"database": name}).fetchall()
        if any(writes for writes, _ in rows):
            raise ConfigurationError(LEFT_OPEN)
        for _, pid in rows:
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))


def _execute(url: str, statement: sql.Composed) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


@contextmanager
def rolled_back(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in a transaction that is rolled back at the end, whatever happened."""
    with psycopg.connect(url, autocommit=False) as connection:
        try:
            connection.execute("SELECT 1")
            yield connection
        finally:
            if not connection.closed:
                connection.rollback()

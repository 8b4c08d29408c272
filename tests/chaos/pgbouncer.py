"""A PgBouncer in transaction mode before a server, for the time of a block."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from tests.chaos.cluster import Node
from tests.waiting import wait_until

PATIENCE = 30.0
HOW = "no pgbouncer on PATH: install it, or run `bash .ci/pgbouncer FOLDER` and set PGQUEUE_TEST_PGBOUNCER to what it prints"
SETTINGS = """\
[databases]
* = host=127.0.0.1 port={port} user=postgres password={password}

[pgbouncer]
listen_addr =
unix_socket_dir = {folder}
listen_port = 6432
auth_type = any
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 300
logfile = {folder}/log
pidfile = {folder}/pid
"""


def program() -> str:
    """The pgbouncer to run; skips the test where there is none."""
    found = os.environ.get("PGQUEUE_TEST_PGBOUNCER") or shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if not found:
        pytest.skip(HOW)
    return found


class Pooler:
    """Leads to one server, over a few sessions that all clients share."""

    def __init__(self, folder: Path, node: Node) -> None:
        self.folder = folder
        self.node = node

    def url(self, database: str) -> str:
        """The way to a database through the pooler."""
        return f"postgresql://postgres@/{quote(database)}?host={quote(str(self.folder))}&port=6432"

    def sessions(self, database: str, statement: str, number: int) -> list[list[tuple[Any, ...]]]:
        """The answers of `number` sessions of the pool, each pinned by a transaction while the others are asked."""
        clients = [psycopg.connect(self.url(database), prepare_threshold=None) for _ in range(number)]
        try:
            answers = [client.execute(statement.encode()).fetchall() for client in clients]
            pids = {client.execute("SELECT pg_backend_pid()").fetchone() for client in clients}
            assert len(pids) == number
            return answers
        finally:
            for client in clients:
                client.close()


@contextmanager
def pooler(node: Node, *, size: int = 2) -> Iterator[Pooler]:
    """A PgBouncer with that many sessions per database. Its socket is in a folder that only its account may enter."""
    binary = program()
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-pooler-"))
    other: dict[str, Any] = {}
    if os.geteuid() == 0:  # it refuses to run as root
        account = pwd.getpwnam("nobody")
        other = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        os.chown(folder, account.pw_uid, account.pw_gid)
    settings = folder / "pgbouncer.ini"
    settings.write_text(SETTINGS.format(port=node.port, password=node.place.password, folder=folder, size=size))
    process = subprocess.Popen(
        [binary, str(settings)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **other
    )
    try:
        started = Pooler(folder, node)
        wait_until(lambda: process.poll() is not None or _accepts(started), PATIENCE, "PgBouncer accepts connections")
        assert process.poll() is None, (folder / "log").read_text() if (folder / "log").exists() else "it did not start"
        yield started
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(started: Pooler) -> bool:
    try:
        psycopg.connect(started.url("postgres"), connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True

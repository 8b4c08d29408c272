"""Servers on TCP ports of 127.0.0.1, for tests that need more than the suite's own: one alone, or two, one a standby."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

from pgqueue.embedded import find_binaries
from pgqueue.embedded.account import Account, server_account
from pgqueue.embedded.binaries import readable_binaries
from tests.conftest import FAST
from tests.waiting import wait_until

PATIENCE = 60.0


def reserved_port() -> socket.socket:
    """A socket on a port of 127.0.0.1 that nobody else is given while it is open. A server may listen there all the same:
    both set SO_REUSEADDR, and this one does not listen."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class Place:
    """A folder that the account of the servers may enter, their programs, and one password for all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.account: Account = server_account()
        self.programs = readable_binaries(find_binaries(), self.account, folder)
        self.password = secrets.token_hex(8)
        if self.account.switches:
            os.chown(folder, self.account.uid, self.account.gid)

    def run(self, program: str, *words: str | Path) -> None:
        """Run one of PostgreSQL's programs to its end, which must be a good one."""
        status, said = self.account.run([self.programs / program, *words])
        assert status == 0, said

    def needs(self, *programs: str) -> None:
        """Skip the test where these programs are not among those of the servers."""
        missing = [name for name in programs if not (self.programs / name).exists()]
        if missing:
            pytest.skip(f"{self.programs} holds no {', '.join(missing)}: set PGQUEUE_PG_BIN to a full installation")


class Node:
    """One server."""

    def __init__(self, place: Place, name: str) -> None:
        self.place = place
        self.data = place.folder / name
        self._reserved = reserved_port()
        self.port = int(self._reserved.getsockname()[1])

    def end(self) -> None:
        """Kill it if it runs, and let its port go."""
        self.kill()
        self._reserved.close()

    def __del__(self) -> None:
        self._reserved.close()

    def make(self, *more: str | Path) -> None:
        """Its data folder, new; `more` are words for initdb."""
        word = self.place.folder / "word"
        word.write_text(self.place.password)
        word.chmod(0o644)  # the folder is closed to others
        self.place.run(
            "initdb", "--no-sync", "-D", self.data, "-U", "postgres", "-E", "UTF8", "--locale=C",
            "--auth=scram-sha-256", f"--pwfile={word}", *more,
        )  # fmt: skip

    def copy(self, primary: Node) -> None:
        """Its data folder, as the standby of `primary`."""
        self.place.run(
            "pg_basebackup",
            "--no-sync",
            "-d",
            primary.url("postgres"),
            "-D",
            self.data,
            "-R",
            "-X",
            "stream",
            "-c",
            "fast",
        )

    def start(self) -> None:
        """Run it, until it accepts connections."""
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        words = [*FAST, *(word for name, value in settings.items() for word in ("-c", f"{name}={value}"))]
        options = " ".join(word if word == "-c" else f"'{word}'" for word in words)
        log = self.data / "server.log"
        self.place.run("pg_ctl", "-D", self.data, "-w", "-t", "60", "-l", log, "-o", options, "start")

    def url(self, database: str = "postgres") -> str:
        """The URL of one of its databases."""
        return f"postgresql://postgres:{self.place.password}@127.0.0.1:{self.port}/{quote(database)}"

    def execute(self, statement: str, *params: Any, database: str = "postgres") -> list[tuple[Any, ...]]:
        """One statement on a connection of its own."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def accepts(self) -> bool:
        """Whether it can be connected to."""
        with suppress(psycopg.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    def runs(self) -> bool:
        """Whether its process is there, be it in recovery."""
        with suppress(FileNotFoundError, ValueError):
            return _lives(int((self.data / "postmaster.pid").read_text().split("\n", 1)[0]))
        return False

    def kill(self) -> None:
        """SIGKILL for the server and all of its processes, at once: nothing is written any more, nobody is told."""
        file = self.data / "postmaster.pid"
        with suppress(FileNotFoundError):
            lines = file.read_text().splitlines()
            server = int(lines[0])
            for pid in (server, *_children(server)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not _children(server) and not _lives(server), PATIENCE, f"the end of server {server}")
            file.unlink()
            # What a server that was killed cannot do itself.
            if len(lines) > 6 and re.fullmatch(r"\s*\d+\s+\d+\s*", lines[6]):
                subprocess.run(["ipcrm", "-m", lines[6].split()[1]], check=False, capture_output=True)


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, its_parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
            if int(its_parent) == parent and state != "Z":
                found.append(int(stat.parent.name))
    return found


def _lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


class Pair:
    """A primary and its streaming standby."""

    def __init__(self, place: Place) -> None:
        self.primary = Node(place, "first")
        self.standby = Node(place, "second")

    def synchronise(self) -> None:
        """From now on no commit of the primary is acknowledged before the standby has it too."""
        self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'")
        self.primary.execute("SELECT pg_reload_conf()")
        wait_until(
            lambda: self.primary.execute("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'quorum'"),
            PATIENCE,
            "the synchronous standby",
        )

    def url(self, *, standby_first: bool = False, **parameters: str) -> str:
        """One URL of both."""
        both = (self.standby, self.primary) if standby_first else (self.primary, self.standby)
        where = ",".join(f"127.0.0.1:{node.port}" for node in both)
        query = "&".join(f"{name}={value}" for name, value in parameters.items())
        return f"postgresql://postgres:{self.primary.place.password}@{where}/postgres" + (f"?{query}" if query else "")

    def caught_up(self) -> None:
        """Wait until the standby has replayed what the primary has written."""
        [(at,)] = self.primary.execute("SELECT pg_current_wal_flush_lsn()::text")
        replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        wait_until(lambda: self.standby.execute(replayed, at) == [(True,)], PATIENCE, "the standby follows")


@contextmanager
def place() -> Iterator[Place]:
    """A folder for servers, below none that is closed to the account that runs them; removed at the end."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("the processes of a server are found in /proc, which this system lacks")
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-cluster-"))
    try:
        yield Place(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def single() -> Iterator[Node]:
    """One server for the time of the block."""
    with place() as here:
        here.needs("pg_ctl")
        node = Node(here, "only")
        try:
            node.make()
            node.start()
            yield node
        finally:
            node.end()


@contextmanager
def pair() -> Iterator[Pair]:
    """A primary and its standby, which streams asynchronously until told otherwise."""
    with place() as here:
        here.needs("pg_ctl", "pg_basebackup")
        both = Pair(here)
        try:
            both.primary.make()
            both.primary.start()
            both.standby.copy(both.primary)
            both.standby.start()
            yield both
        finally:
            both.primary.end()
            both.standby.end()

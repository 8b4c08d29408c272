"""A disk that is really full: a small file system of its own, filled with zeros until the server is refused its blocks.

What is asked to be stored meanwhile is refused in the hands of the caller, what was done meanwhile is kept. When there
is room again, the work goes on by itself.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import migrate
from pgqueue.events import EventName
from tests.chaos.cluster import Node, Place, place
from tests.waiting import wait_until
from tests.workers import running

PATIENCE = 90.0
SOON = 30.0
"""Seconds from room on the disk until outcomes are written. An idle machine needs at most the two of a back-off."""
MEGABYTES = 96
PAGE = 4096

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Disk:
    """A file system that holds little."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Take all that is left."""
        descriptor = os.open(self.path / "zeros", os.O_WRONLY | os.O_CREAT)
        try:
            for size in (64 * PAGE, PAGE):
                with suppress_full():
                    while True:
                        os.write(descriptor, bytes(size))
        finally:
            os.close(descriptor)

    def empty(self) -> None:
        """Make room."""
        (self.path / "zeros").unlink()


@contextmanager
def suppress_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise


@contextmanager
def small_disk(here: Place) -> Iterator[Disk]:
    """One that belongs to the account of the servers."""
    path = here.folder / "small"
    path.mkdir()
    try:
        options = f"size={MEGABYTES}m,mode=0755,uid={here.account.uid},gid={here.account.gid}"
        words = ["mount", "-t", "tmpfs", "-o", options, "pgqueue-test", str(path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no `mount` here: a disk that is full cannot be made")
    if done.returncode != 0:
        pytest.skip(f"a disk that is full cannot be made: {done.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class Enqueuer(threading.Thread):
    """Business transactions, one after the other: a row and a job of the same key. `refused` holds the errors by key,
    `unsure` the keys whose commit got no answer."""

    def __init__(self, url: str, task: Any) -> None:
        super().__init__(name="enqueuer", daemon=True)
        self.url = url
        self.task = task
        self.committed: set[int] = set()
        self.unsure: set[int] = set()
        self.refused: dict[int, psycopg.Error] = {}
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._connection: psycopg.Connection[Any] | None = None

    def run(self) -> None:
        """Until stopped."""
        key = 0
        try:
            while not self.stopping.wait(0.03):
                key += 1
                self._business(key)
        except BaseException as error:
            self.error = error
        finally:
            self._forget()

    def end(self) -> None:
        """Stop, and raise what went wrong with itself."""
        self.stopping.set()
        self.join(PATIENCE)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error

    def _business(self, key: int) -> None:
        asked = False
        try:
            if self._connection is None:
                self._connection = psycopg.connect(self.url, connect_timeout=5)
            self._connection.execute("INSERT INTO business VALUES (%s)", [key])
            self.task.enqueue(key, random.Random(key).randbytes(15_000).hex(), using=self._connection)
            asked = True
            self._connection.commit()
            self.committed.add(key)
        except psycopg.Error as error:
            if asked:
                self.unsure.add(key)
            else:
                self.refused[key] = error
            self._forget()

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()


class Scene:
    """A database, its worker's application, and somebody who enqueues. While `gate` is closed, no job ends."""

    def __init__(self, node: Node, max_attempts: int) -> None:
        self.node = node
        migrate.upgrade(node.url(), schema="pgqueue")
        node.execute("CREATE TABLE business (key bigint PRIMARY KEY)")
        self.gate = threading.Event()
        self.gate.set()
        self.runs: Counter[int] = Counter()
        self.pq = pgqueue.PgQueue(node.url(), connect_timeout=5.0)
        task = self.pq.task(name="work", queue="q", max_attempts=max_attempts, retry=pgqueue.Fixed(0))(self._work)
        self.enqueuer = Enqueuer(node.url(), task)

    def _work(self, key: int, blob: str) -> None:
        self.gate.wait(PATIENCE)
        self.runs[key] += 1

    def count(self, table: str) -> int:
        """Rows of a table."""
        return int(self.node.execute(f"SELECT count(*) FROM {table}")[0][0])

    def keys(self, table: str) -> list[int]:
        """The keys of its jobs, or of its business rows."""
        column = "key" if table == "business" else "(args ->> 0)::bigint"
        return [key for (key,) in self.node.execute(f"SELECT {column} FROM {table} ORDER BY 1")]

    def drained(self) -> None:
        """Wait until nothing is left to do."""
        wait_until(lambda: self.count("pgqueue.job") == 0, PATIENCE, "all work has ended")

    def agrees(self) -> None:
        """Every business row has its job, completed once, and what was refused left neither."""
        done = self.keys("pgqueue.archive")
        assert self.keys("business") == done
        assert self.enqueuer.committed <= set(done) <= self.enqueuer.committed | self.enqueuer.unsure
        assert not set(self.enqueuer.refused) & {*done, *self.runs}
        assert self.count("pgqueue.dead_letter") == 0
        assert self.node.execute("SELECT DISTINCT state FROM pgqueue.archive") == [("completed",)]


@contextmanager
def scene(node: Node, max_attempts: int) -> Iterator[Scene]:
    """The enqueuer at work for the time of the block."""
    made = Scene(node, max_attempts)
    with made.pq:
        made.enqueuer.start()
        try:
            yield made
        finally:
            made.gate.set()
            made.enqueuer.end()


@contextmanager
def tight_server(*, log_there: bool) -> Iterator[tuple[Node, Disk]]:
    """A server whose database, or whose write-ahead log, is on the small disk."""
    with place() as here:
        here.needs("pg_ctl")
        with small_disk(here) as disk:
            node = Node(here, "only")
            try:
                node.make(*(("-X", disk.path / "wal", "--wal-segsize=1") if log_there else ()))
                with (node.data / "postgresql.conf").open("a") as settings:
                    settings.write("max_wal_size = 8MB\nmin_wal_size = 2MB\n" if log_there else "")
                node.start()
                if not log_there:
                    tables = disk.path / "tables"
                    tables.mkdir()
                    os.chown(tables, here.account.uid, here.account.gid)
                    node.execute(f"CREATE TABLESPACE small LOCATION '{tables}'")
                    node.execute("ALTER DATABASE postgres SET default_tablespace = small")
                yield node, disk
            finally:
                node.end()


def test_a_full_disk_refuses_enqueues_and_keeps_outcomes_waiting_until_there_is_room() -> None:
    with (
        tight_server(log_there=False) as (node, disk),
        scene(node, max_attempts=1) as stage,
        running(stage.pq, queues=("q",), concurrency=4) as watched,
    ):
        wait_until(lambda: len(stage.runs) > 20, PATIENCE, "work goes on")
        stage.gate.clear()
        wait_until(lambda: watched.worker.threads.running() == 4, PATIENCE, "jobs run")
        disk.fill()
        wait_until(lambda: len(stage.enqueuer.refused) > 3, PATIENCE, "enqueues are refused")
        stage.gate.set()
        failed = watched.wait_for(EventName.LOOP_FAILED, loop="settle")
        assert "No space left on device" in failed.facts["detail"]
        assert {type(error) for error in stage.enqueuer.refused.values()} == {psycopg.errors.DiskFull}
        waiting = watched.worker.settler.backlog()
        assert waiting > 0
        disk.empty()
        room_since = time.monotonic()
        watched.wait_for(EventName.LOOP_RECOVERED, loop="settle")
        took = time.monotonic() - room_since
        before = len(stage.enqueuer.committed)
        wait_until(lambda: len(stage.enqueuer.committed) > before + 10, PATIENCE, "enqueues go on")
        stage.enqueuer.end()
        stage.drained()
        print(
            f"\n{len(stage.enqueuer.refused)} enqueues refused; {waiting} outcomes waited, written {took:.2f} s after"
        )
        assert took < SOON
        stage.agrees()
        # The outcomes were kept: nothing ran a second time, though each job had one attempt only.
        assert set(stage.runs.values()) == {1}
        assert stage.node.execute("SELECT DISTINCT attempt, lost FROM pgqueue.archive") == [(1, 0)]


def bring_back(node: Node) -> None:
    """As a supervisor does: a server that cannot write its log ends for good when its recovery cannot either."""

    def back() -> bool:
        if not node.accepts() and not node.runs():
            node.start()
        return node.accepts()

    wait_until(back, PATIENCE, "the server is back")


def test_a_full_disk_under_the_log_ends_the_server_and_nothing_of_it_is_lost() -> None:
    attempts = 3
    with (
        tight_server(log_there=True) as (node, disk),
        scene(node, max_attempts=attempts) as stage,
        running(stage.pq, queues=("q",), concurrency=4) as watched,
    ):
        wait_until(lambda: len(stage.runs) > 20, PATIENCE, "work goes on")
        disk.fill()
        log = node.data / "server.log"
        wait_until(lambda: "PANIC" in log.read_text(errors="replace"), PATIENCE, "the server gives up")
        watched.wait_for(EventName.LOOP_FAILED)
        wait_until(lambda: stage.enqueuer.refused, PATIENCE, "the enqueuer has its error")
        disk.empty()
        bring_back(node)
        room_since = time.monotonic()
        before = len(stage.runs)
        wait_until(lambda: len(stage.runs) > before + 5, PATIENCE, "work goes on")
        took = time.monotonic() - room_since
        stage.enqueuer.end()
        stage.drained()
        lost, refused = len(stage.enqueuer.unsure), len(stage.enqueuer.refused)
        print(f"\n{refused} enqueues refused, {lost} commits without an answer; work went on {took:.2f} s after")
        stage.agrees()
        # The crash of a server may forget claims, and with them one attempt.
        assert max(stage.runs.values()) <= attempts + 1

"""The processes of a run: the server, the workers, the producer. Each is known by its pid and ended by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tests.chaos.proxy import Proxy, target_of
from tests.history.fleet import GRACE, ROOT, Fleet, FleetOptions, Post
from tests.history.server import PrivateServer
from tests.soak.app import QUEUE, VARIABLE

LEAVING = 60.0
"""Seconds that the producer may take for its last transaction, while the server comes back."""


class Server(PrivateServer):
    """A server with room for speed. Its processes are killed, not the machine: it does not wait for the disk."""

    # A log of one gigabyte at most between two checkpoints: what is written since the last one is replayed after a crash.
    options: ClassVar = tuple(
        word
        for setting in ("fsync=off", "max_connections=100", "shared_buffers=512MB", "max_wal_size=1GB")
        for word in ("-c", setting)
    )
    tables: ClassVar = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """The files that the processes share."""

    path: Path

    @property
    def marks(self) -> Path:
        """One byte for every number."""
        return self.path / "marks"

    @property
    def journal(self) -> Path:
        """What became of each transaction."""
        return self.path / "journal"

    @property
    def hold(self) -> Path:
        """While it exists, the producer waits."""
        return self.path / "hold"


class SpeedPost(Post):
    """The place of one worker, straight at the server: a proxy would be the slowest part."""

    def __init__(self, number: int, url: str, proxy: Proxy, folder: Folder, options: FleetOptions) -> None:
        super().__init__(number, url, proxy, folder.path, options)
        self.marks = folder.marks

    def start(self) -> None:
        """A new worker, which keeps no archive."""
        self.starts += 1
        self.provoked = False
        self.log = self.folder / f"worker-{self.number}-{self.starts}.log"
        numbers = {"lease": self.options.lease, "concurrency": self.options.concurrency, "grace": GRACE}
        words = [sys.executable, "-m", "pgqueue", "worker", "--app", "tests.soak.app:pq", "--queues", QUEUE]
        words += [word for name, value in numbers.items() for word in (f"--{name}", f"{value:g}")]
        more = {VARIABLE: str(self.marks), "PGQUEUE_ARCHIVE": "false"}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment(self.url, **more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )


def environment(url: str, **more: str) -> dict[str, str]:
    """Nothing of the host's configuration."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PG"))}
    return {**bare, "PYTHONPATH": str(ROOT), "PGQUEUE_DATABASE_URL": url, **more}


@contextmanager
def fleet(url: str, folder: Folder, options: FleetOptions) -> Iterator[tuple[Fleet, Proxy]]:
    """Posts for the workers, and the proxy that the parts of the history checker expect and nobody connects to."""
    with Proxy(target_of(url)) as unused:
        made = Fleet([SpeedPost(number, url, unused, folder, options) for number in range(options.workers)])
        try:
            yield made, unused
        finally:
            made.kill()


@contextmanager
def producer(url: str, folder: Folder, *, rate: float, numbers: int, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """The producer, which is killed at the end if it has not left."""
    words = [sys.executable, "-m", "tests.soak.producer", "--rate", f"{rate:g}", "--numbers", str(numbers)]
    words += ["--seed", str(seed), "--journal", str(folder.journal), "--hold", str(folder.hold)]
    with (folder.path / "producer.log").open("wb") as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(url), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def end_producer(process: subprocess.Popen[bytes], folder: Folder) -> None:
    """Let it leave; RuntimeError, with what it said, when it left otherwise."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    status = process.wait(LEAVING)
    if status != 0:
        said = (folder.path / "producer.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the producer left with status {status}:\n{said}")

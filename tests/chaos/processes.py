"""Worker processes that are started to be killed: known by their pid, and ended by it, whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Workers:
    """Starts worker processes on one database."""

    def __init__(self, database: str, log: Path) -> None:
        self.database = database
        self.log = log
        self.app = "tests.chaos.app:pq"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *, lease: float = 2.0, concurrency: int = 5, **options: float) -> subprocess.Popen[bytes]:
        """One more worker on the queue "chaos"."""
        words = [sys.executable, "-m", "pgqueue", "worker", "--app", self.app, "--queues", "chaos"]
        for name, value in {"lease": lease, "concurrency": concurrency, **options}.items():
            words += [f"--{name}", f"{value:g}"]
        environment = {**os.environ, "PGQUEUE_DATABASE_URL": self.database, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        self.processes.append(process)
        return process

    def alive(self) -> list[subprocess.Popen[bytes]]:
        """Those that still run."""
        return [process for process in self.processes if process.poll() is None]

    def keep(self, number: int, **options: float) -> None:
        """Replace what has died, so that so many run."""
        for _ in range(number - len(self.alive())):
            self.start(**options)  # type: ignore[arg-type]

    def end(self) -> None:
        """Kill what is left, and take in every exit status."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@contextmanager
def workers(database: str, folder: Path) -> Iterator[Workers]:
    """Worker processes for the time of the block; pytest shows what they said where a test fails."""
    started = Workers(database, folder / "workers.log")
    try:
        yield started
    finally:
        started.end()
        print(started.log.read_text(errors="replace")[-4000:] if started.log.exists() else "no worker was started")

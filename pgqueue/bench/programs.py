"""A worker of the product or of a peer, as a process group of its own: started, watched, ended by its pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pgqueue.bench.tally import VARIABLE, Tally

STOP_SECONDS = 20.0


class Program:
    """A running program and its tally."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.tally = Tally(folder)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                list(words),
                env={**os.environ, **environment, VARIABLE: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def last_words(self) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-1500:].strip()

    def log(self) -> str:
        """All that it printed."""
        return self._log.read_text(errors="replace")

    def cpu_seconds(self) -> float:
        """Processor time of the program and its children so far; 0 where there is no /proc."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError):
                fields = path.read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == self.process.pid:  # its session
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """Ask it to end; kill what has not ended in time."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Program]:
    """A program that runs during the block and is ended with all its children afterwards."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-bench-") as folder:
        program = Program(words, environment, Path(folder))
        try:
            yield program
        finally:
            program.stop()


def worker_words(*options: str) -> list[str]:
    """The command line of pgqueue's own worker on the benchmark's tasks."""
    return [
        sys.executable,
        "-m",
        "pgqueue",
        "worker",
        "--app",
        "pgqueue.bench.app:pq",
        "--log-level",
        "warning",
        *options,
    ]


def worker_environment(url: str, *, archive: bool = True) -> dict[str, str]:
    """The environment of pgqueue's own worker."""
    return {"PGQUEUE_DATABASE_URL": url, "PGQUEUE_ARCHIVE": "true" if archive else "false"}

"""The worker processes of the demo: started with the real command, one of them killed, none of them left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from pgqueue.demo.errors import DemoError
from pgqueue.demo.stage import APP, QUEUE_SCHEMA, examples_path

LEASE = 3.0
CONCURRENCY = 2
COMMAND = (
    *(sys.executable, "-m", "pgqueue", "worker", "--app", f"{APP}:pq", "--queues", "avatars", "--drain"),
    *("--concurrency", str(CONCURRENCY), "--lease", f"{LEASE:g}", "--grace", "2"),
)
LOOK_EVERY = 0.02
GOODBYE = 3.0
LAST_WORDS = 0.15
"""Seconds after which a statement that a stopped process had sent is done."""

HELD = f"""
    SELECT w.pid, array_agg((j.args ->> 0)::bigint ORDER BY j.id)
    FROM {QUEUE_SCHEMA}.worker AS w
    JOIN {QUEUE_SCHEMA}.lease AS l ON l.worker_id = w.id
    JOIN {QUEUE_SCHEMA}.job AS j ON j.queue = l.queue AND j.id = ANY (l.job_ids) AND j.lease_id = l.id
    GROUP BY w.pid
"""  # noqa: S608 - the schema is a constant


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """The worker that was killed: its number, its process, and the uploads whose jobs it held at that moment."""

    number: int
    pid: int
    held: tuple[int, ...]


class Workers:
    """`count` worker processes that leave when the queue is drained; leaving the block ends those that still run."""

    def __init__(self, count: int, *, environment: Mapping[str, str], logs: Path) -> None:
        self.count = count
        self.logs = logs
        self.processes: list[subprocess.Popen[bytes]] = []
        # The application is found through the path, so that the same words start it from a wheel and from a checkout;
        # the last entry is this very pgqueue, however it came to be importable here.
        package = str(Path(__file__).resolve().parents[2])
        path = filter(None, [str(examples_path()), os.environ.get("PYTHONPATH"), package])
        self._environment = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path)}

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for number in range(1, self.count + 1):
                self._start(number)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def running(self) -> bool:
        """Whether one of them still works."""
        return any(process.poll() is None for process in self.processes)

    def kill_one_with_jobs(self, connection: psycopg.Connection[Any]) -> Killed:
        """Wait until a worker holds jobs, and kill it; DemoError when all of them are done before that."""
        while self.running():
            for pid, _ in connection.execute(HELD.encode()).fetchall():
                killed = self._kill(pid, connection)
                if killed is not None:
                    return killed
            time.sleep(LOOK_EVERY)
        self.check()
        raise DemoError("The workers were done before one of them could be killed: use more uploads.")

    def check(self, killed: Killed | None = None) -> None:
        """DemoError when a worker ended otherwise than by itself and well, the killed one excepted."""
        for number, process in enumerate(self.processes, 1):
            if process.poll() not in (None, 0) and (killed is None or number != killed.number):
                log = self.log(number)
                said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                raise DemoError(f"Worker {number} ended with status {process.poll()}, see {log}; it said: {said[0]}")

    def log(self, number: int) -> Path:
        """The file that a worker prints to."""
        return self.logs / f"worker-{number}.log"

    def end(self) -> None:
        """End every process that still runs: politely, then not. No process of ours outlives this."""
        left = [process for process in self.processes if process.poll() is None]
        for process in left:
            process.terminate()
            process.send_signal(signal.SIGCONT)  # it may have been stopped a moment ago
        deadline = time.monotonic() + GOODBYE
        try:
            for process in left:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for process in left:
                process.kill()  # does nothing to a process that was waited for
                process.wait()

    def _start(self, number: int) -> None:
        with self.log(number).open("wb") as log:
            # The folder of the examples is also the working directory: `python -m` looks there first, and a module
            # that happens to be called `avatars` in the user's folder is not ours.
            process = subprocess.Popen(
                COMMAND,
                cwd=examples_path(),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes.append(process)

    def _kill(self, pid: int, connection: psycopg.Connection[Any]) -> Killed | None:
        """Kill the process if it holds jobs. It is stopped first: between the look and the kill nothing can be settled."""
        numbers = {process.pid: number for number, process in enumerate(self.processes, 1) if process.poll() is None}
        if pid not in numbers:
            return None
        process = self.processes[numbers[pid] - 1]
        process.send_signal(signal.SIGSTOP)
        time.sleep(LAST_WORDS)
        held = dict(connection.execute(HELD.encode()).fetchall()).get(pid)
        if not held:
            process.send_signal(signal.SIGCONT)
            return None
        process.kill()
        process.wait()
        return Killed(number=numbers[pid], pid=pid, held=tuple(held))

"""The workers of a run: each behind a network of its own, and started again whenever it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.proxy import Proxy, target_of
from tests.history.app import QUEUE
from tests.history.planted import VARIABLE

ROOT = Path(__file__).parents[2]
PAUSE = 0.3
GRACE = 2.0
LEAVING = 20.0
"""Seconds that a worker with so much grace may take to leave, on a very busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """`planted`: the fault that the workers carry. `faketime`: the library that gives them other clocks."""

    workers: int = 3
    concurrency: int = 10
    lease: float = 2.0
    planted: str = ""
    faketime: Path | None = None


class Post:
    """The place of one worker: its proxy, and the process that stands there now."""

    def __init__(self, number: int, url: str, proxy: Proxy, folder: Path, options: FleetOptions) -> None:
        self.number = number
        self.url = url
        self.proxy = proxy
        self.folder = folder
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "never started"
        self.starts = 0
        self.skew = ""
        self.provoked = False
        self._resting_until = 0.0

    @property
    def pid(self) -> int:
        """The process, 0 when none runs."""
        return self.process.pid if self.process is not None and self.process.poll() is None else 0

    @property
    def up(self) -> bool:
        """Whether a worker runs here that has begun to work."""
        return self.pid != 0 and "started: queues" in self.said()

    def said(self) -> str:
        """The log of the worker of now, or of the last one."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def start(self) -> None:
        """A new worker."""
        self.starts += 1
        self.provoked = False
        self.log = self.folder / f"worker-{self.number}-{self.starts}.log"
        numbers = {"lease": self.options.lease, "concurrency": self.options.concurrency, "grace": GRACE, "poll": 0.5}
        words = [sys.executable, "-m", "pgqueue", "worker", "--app", "tests.history.app:pq", "--queues", QUEUE]
        words += [word for name, value in numbers.items() for word in (f"--{name}", f"{value:g}")]
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=self._environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _environment(self) -> dict[str, str]:
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PG"))}
        ours = {
            "PYTHONPATH": str(ROOT),
            "PGQUEUE_DATABASE_URL": self.proxy.url(self.url),
            "PGQUEUE_CONNECT_TIMEOUT": "5",  # a connect that a cut network swallowed must not outlast the run
            "HISTORY_URL": self.url,
            "HISTORY_LEASE": f"{self.options.lease:g}",
            VARIABLE: self.options.planted,
        }
        if self.skew and self.options.faketime is not None:
            ours |= {
                "LD_PRELOAD": str(self.options.faketime),
                "FAKETIME": self.skew,
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        return {**bare, **ours}

    def signal(self, number: signal.Signals, *, provoked: bool = False) -> None:
        """Send a signal to the worker of now; `provoked`: its end is our doing."""
        self.provoked = self.provoked or provoked
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def tend(self) -> str | None:
        """Start a new worker where none runs; returns what is wrong about the end of the last one."""
        if self.process is not None and self.process.poll() is None:
            return None
        if self.process is not None and self._resting_until == 0.0:
            self._resting_until = time.monotonic() + PAUSE
            if not self.provoked and self.up_once():
                return f"worker {self.number}.{self.starts} left by itself, status {self.process.returncode}:\n{self.tail()}"
        if time.monotonic() >= self._resting_until:
            self._resting_until = 0.0
            self.start()
        return None

    def up_once(self) -> bool:
        """Whether the last worker had begun to work; one that finds no server at its start may leave."""
        return "started: queues" in self.said()

    def tail(self) -> str:
        """The end of the log."""
        return "\n".join(self.said().splitlines()[-15:])

    def story(self) -> str:
        """How often a worker was started here, and the ends of the last three logs: the newest may be empty still."""
        logs = sorted(self.folder.glob(f"worker-{self.number}-*.log"), key=lambda path: path.stat().st_mtime)[-3:]
        ends = ["\n".join(path.read_text(errors="replace").splitlines()[-15:]) for path in logs]
        return "\n".join([f"worker {self.number}: {self.starts} starts, process {self.pid}", *ends])


class Fleet:
    """All posts. The supervisor looks after them from a thread of its own, until `stop`."""

    def __init__(self, posts: list[Post]) -> None:
        self.posts = posts
        self.complaints: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start all workers, and look after them."""
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(0.05):
            for post in self.posts:
                complaint = post.tend()
                if complaint:
                    self.complaints.append(complaint)

    def stop(self) -> None:
        """Let every worker leave; what does not leave in time is killed, and complained of."""
        self._ending.set()
        self._thread.join()
        for post in self.posts:
            post.signal(signal.SIGCONT)
            post.signal(signal.SIGTERM, provoked=True)
        for post in self.posts:
            if post.process is not None:
                try:
                    status = post.process.wait(LEAVING)
                except subprocess.TimeoutExpired:
                    self.complaints.append(f"worker {post.number} does not leave:\n{post.tail()}")
                else:
                    if status != 0 and post.up_once():
                        self.complaints.append(f"worker {post.number} left with status {status}:\n{post.tail()}")

    def kill(self) -> None:
        """Whatever happened: nothing stays."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        for post in self.posts:
            if post.process is not None:
                with suppress(ProcessLookupError):
                    post.process.kill()
                post.process.wait()


@contextmanager
def fleet(url: str, folder: Path, options: FleetOptions) -> Iterator[Fleet]:
    """Posts for the workers of one database; nobody works before `start`."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(target_of(url))) for _ in range(options.workers)]
        posts = [Post(number, url, proxy, folder, options) for number, proxy in enumerate(proxies)]
        made = Fleet(posts)
        try:
            yield made
        finally:
            made.kill()

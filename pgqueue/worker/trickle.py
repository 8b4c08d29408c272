"""Progress on its way out of a child process: the latest report of each job, not more often than the worker cares for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pgqueue.job import Job

EVERY = 0.25
Message = dict[str, Any]


class Trickle:
    """`put` returns at once; a thread, there from the first report on, sends what is the latest then."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._latest: dict[int, Message] = {}
        self._bell = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, job: Job, **message: Any) -> None:
        """Send this of the job, or what comes after it."""
        with self._lock:
            self._latest[job.id] = {**message, "id": job.id, "token": job.token}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pgqueue-progress", daemon=True)
                self._thread.start()
        self._bell.set()

    def flush(self) -> None:
        """Send what waits, now."""
        with self._lock:
            latest, self._latest = self._latest, {}
            for message in latest.values():
                self._send(**message)

    def _run(self) -> None:
        while True:
            self._bell.wait()
            self._bell.clear()
            try:
                self.flush()
            except OSError:
                return  # the line is closed, and the process is about to end
            time.sleep(EVERY)

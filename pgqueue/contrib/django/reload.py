"""Starting a worker again when its code changes, in development.

A parent starts the worker as a process of its own. In that process a thread of Django's own autoreloader looks for changes;
at one it stops the worker gracefully, and the parent starts the next. A worker that does not come up, because of a mistake
in the code, is started again at the next change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from django.utils import autoreload

from pgqueue.worker.processes import stop_signals

CHANGED = 3
"""The exit status by which a worker says that it wants to be started again, as Django's own."""
MISTAKE = 2
LOOK = 0.5
_changed = threading.Event()


def is_child() -> bool:
    """Whether this process was started by `supervise`."""
    return os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) == "true"


def status(ended: int) -> int:
    """The exit status of a worker that has ended with this one."""
    return CHANGED if _changed.is_set() else ended


def program() -> list[str]:
    """How this process was started, without its arguments."""
    words = [str(word) for word in autoreload.get_child_arguments()]
    return words[: len(words) - len(sys.argv[1:])]


def watch() -> None:
    """Stop this worker gracefully when a file changes, and when its parent is gone."""
    threading.Thread(target=_watch_files, name="pgqueue-autoreload", daemon=True).start()
    threading.Thread(target=_watch_parent, args=(os.getppid(),), name="pgqueue-parent", daemon=True).start()


def _watch_files() -> None:
    try:
        autoreload.get_reloader().run(threading.main_thread())
    except SystemExit:
        _changed.set()
        os.kill(os.getpid(), signal.SIGTERM)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


def supervise() -> int:
    """Run this command line in a process of its own, again after every change; its exit status in the end."""
    return _Supervisor().run()


class _Supervisor:
    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._stops = 0
        for number in stop_signals():
            signal.signal(number, self._stop)

    def run(self) -> int:
        """Until the worker was asked to stop, or has nothing more to do."""
        words = [str(word) for word in autoreload.get_child_arguments()]
        env = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
        while True:
            before = self._files()
            # In a session of its own: Ctrl-C in a terminal reaches the parent alone, which asks the child once.
            self._child = subprocess.Popen(words, env=env, start_new_session=True)
            for _ in range(self._stops):
                self._child.send_signal(signal.SIGTERM)
            ended = self._child.wait()
            self._child = None
            if self._stops:
                return max(0, ended)
            if ended in (0, MISTAKE):
                return ended
            if ended != CHANGED:
                said = f"pgqueue: the worker has ended with status {ended}; it is started again when its code changes"
                print(said, file=sys.stderr, flush=True)
                if not self._wait_for_a_change(before):
                    return max(0, ended)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def _wait_for_a_change(self, before: dict[Path, float]) -> bool:
        """A change since the worker was started: it may have come already. False when a stop was asked for."""
        while not self._stops:
            if self._files() != before:
                return True
            time.sleep(LOOK)
        return False

    def _files(self) -> dict[Path, float]:
        reloader: Any = autoreload.StatReloader()
        return dict(reloader.snapshot_files())

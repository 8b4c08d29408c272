"""The real program in processes of its own: run to its end, or started and watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

PATIENCE = 60.0
APP = """
    import os
    import threading
    import time

    import pgqueue

    pq = pgqueue.PgQueue()


    def mark(text):
        with open("marks", "a") as file:
            file.write(text + "\\n")


    @pq.task(queue="images")
    def note(text):
        mark(text)


    @pq.task(queue="images")
    def linger(seconds):
        mark(f"begun {os.getpid()}")
        time.sleep(seconds)
        mark("ended")


    @pq.task(queue="images", max_attempts=1)
    def fail(text):
        raise ValueError(text)


    @pq.task(queue="images")
    def leave_a_thread():
        threading.Thread(target=time.sleep, args=(600,)).start()
        mark("thread")
"""


def environment(folder: Path, database: str | None, **more: str) -> dict[str, str]:
    """Nothing of the host's configuration; without a database, the private one would be in `folder`."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PG"))}
    ours = {"PGQUEUE_DATA_DIR": str(folder / "private"), "HOME": str(folder), "PYTHONWARNINGS": "error"}
    url = {} if database is None else {"PGQUEUE_DATABASE_URL": database}
    return {**bare, **ours, **url, **more}


class Program:
    """A running pgqueue; `errors` is what it has said on stderr so far."""

    def __init__(self, folder: Path, words: tuple[str, ...], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", *words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line.decode())

    @property
    def errors(self) -> str:
        return "".join(self._lines)

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.errors.count(text) >= times, PATIENCE, f"{times} × {text!r} in:\n{self.errors}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = PATIENCE) -> int:
        status = self.process.wait(seconds)
        self._reader.join(PATIENCE)
        return status

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what a task forked holds the pipe open
        self.process.wait()
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), "somebody still holds stderr open"
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class CommandLine:
    """`pgqueue` in a folder that holds the application `shop`, against one database (None: none is configured)."""

    def __init__(self, folder: Path, database: str | None) -> None:
        self.folder = folder
        self.database = database
        self.write("shop.py", APP)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(textwrap.dedent(text))

    def run(self, *words: str, stdin: str = "", **env: str) -> tuple[int, str, str]:
        """The exit status, and what was printed to stdout and stderr."""
        done = subprocess.run(
            [sys.executable, "-m", "pgqueue", *words],
            cwd=self.folder,
            env=environment(self.folder, self.database, **env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 5,  # a test that hangs is ended before by its own timeout
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def good(self, *words: str, **env: str) -> str:
        """What was printed by a command that succeeded and had nothing to complain about."""
        status, output, errors = self.run(*words, **env)
        assert (status, errors) == (0, ""), (status, output, errors)
        return output

    def json(self, *words: str) -> list[dict[str, Any]]:
        """The array printed by a command with --json."""
        value = json.loads(self.good(*words, "--json"))
        assert isinstance(value, list)
        return value

    def sentence(self, status: int, *words: str, **env: str) -> str:
        """The one sentence of a command that refused with this status."""
        found, output, errors = self.run(*words, **env)
        assert (found, output) == (status, ""), (found, output, errors)
        lines = errors.splitlines()
        assert len(lines) == 1, errors
        assert lines[0].startswith("pgqueue: "), errors
        return lines[0].removeprefix("pgqueue: ")

    @contextmanager
    def started(self, *words: str, **env: str) -> Iterator[Program]:
        """A program that runs, and is killed at the end if it still does."""
        program = Program(self.folder, words, environment(self.folder, self.database, **env))
        try:
            yield program
        finally:
            program.end()

    @contextmanager
    def worker(self, *words: str, **env: str) -> Iterator[Program]:
        """A worker that has started."""
        with self.started("worker", "--app", "shop", *words, **env) as program:
            program.wait_for("started: queues")
            yield program

    def marks(self) -> list[str]:
        """What tasks have left behind."""
        file = self.folder / "marks"
        return file.read_text().splitlines() if file.exists() else []

    def wait_for_mark(self, start: str, times: int = 1) -> None:
        wait_until(
            lambda: sum(line.startswith(start) for line in self.marks()) >= times, PATIENCE, f"the mark {start!r}"
        )

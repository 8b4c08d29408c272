"""The album examples as a user runs them: a server, a worker, and a browser that uploads photographs."""

from __future__ import annotations

import html
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from tests.callers import sqlalchemy_url
from tests.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE = 60.0
FIGURE = re.compile(r'<figure data-id="(\d+)" data-name="([^"]*)" data-state="([^"]*)"')
ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class Example:
    """How one of the examples is set up and run, in the folder `examples`."""

    setup: tuple[str, ...]
    server: str
    free_port: tuple[str, ...]
    worker: str
    upload: str


ALEMBIC = "alembic -c sqlalchemy_album/alembic.ini"
EXAMPLES_BY_NAME = {
    "flask": Example(
        setup=("flask create-tables", "flask pgqueue migrate", "flask pgqueue status"),
        server="flask run",
        free_port=("--port", "0"),
        worker="flask pgqueue worker",
        upload="POST",
    ),
    "fastapi": Example(
        setup=("pgqueue migrate", "pgqueue status"),
        server="uvicorn fastapi_album.app:app",
        free_port=("--port", "0"),
        worker="pgqueue worker --app fastapi_album.app:pq",
        upload="POST",
    ),
    "sqlalchemy": Example(
        setup=(f"{ALEMBIC} upgrade head", "pgqueue migrate", f"{ALEMBIC} check"),
        server="python -m sqlalchemy_album.app",
        free_port=("0",),
        worker="pgqueue worker --app sqlalchemy_album.app:pq",
        upload="PUT",
    ),
}
"""Each command is one of its README."""


def command_line(words: Sequence[str]) -> list[str]:
    """The same with the program of this environment."""
    program, *arguments = words
    found = sys.executable if program == "python" else shutil.which(program, path=sysconfig.get_path("scripts"))
    assert found, f"{program} is not installed here"
    return [found, *arguments]


def environment(database: str, folder: Path) -> dict[str, str]:
    """The variables that the examples read, and nothing of this machine's configuration."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PG", "FLASK_"))}
    url = sqlalchemy_url(database)
    return {
        **bare,
        "HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
        "FLASK_APP": "flask_album",
        "PGQUEUE_DATABASE_URL": url.set(drivername="postgresql").render_as_string(hide_password=False),
        "FLASK_SQLALCHEMY_DATABASE_URI": url.render_as_string(hide_password=False),
    }


class Running:
    """A program that runs; `said` is what it has written so far."""

    def __init__(self, words: Sequence[str], env: dict[str, str], folder: Path = EXAMPLES) -> None:
        self.process = subprocess.Popen(
            command_line(words),
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._killed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line.decode(errors="replace"))

    @property
    def said(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until something like this was said."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None or re.search(pattern, self.said), self.said
            return re.search(pattern, self.said)

        match = wait_until(found, PATIENCE, f"{pattern!r} in what was said")
        assert match is not None
        return match

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; its status."""
        os.kill(self.process.pid, number)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """End it and what it has started, whatever it does."""
        if self._killed:
            return
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def started(words: Sequence[str], env: dict[str, str], folder: Path = EXAMPLES) -> Iterator[Running]:
    """A program during the block."""
    program = Running(words, env, folder)
    try:
        yield program
    finally:
        program.kill()


class Site:
    """A running server, as a browser sees it."""

    def __init__(self, example: Example, server: Running) -> None:
        self.example = example
        self.server = server
        self.address = f"http://127.0.0.1:{server.wait_for(ADDRESS.pattern)[1]}"

    def get(self, path: str) -> bytes:
        """The body of a page."""
        with urllib.request.urlopen(self.address + path, timeout=PATIENCE) as response:
            body = response.read()
            assert isinstance(body, bytes)
            return body

    def status_of(self, path: str) -> int:
        """How the server answers."""
        try:
            self.get(path)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        return 200

    def photos(self) -> dict[int, tuple[str, str]]:
        """Name and state of every photograph, by id, as the page shows them."""
        page = self.get("/").decode()
        return {int(number): (html.unescape(name), state) for number, name, state in FIGURE.findall(page)}

    def upload(self, name: str, picture: bytes) -> None:
        """Send a photograph in the way of this site."""
        (self._post if self.example.upload == "POST" else self._put)(name, picture)

    def _post(self, name: str, picture: bytes) -> None:
        mark = uuid.uuid4().hex
        head = f'--{mark}\r\nContent-Disposition: form-data; name="photo"; filename="{name}"\r\n'
        body = f"{head}Content-Type: image/jpeg\r\n\r\n".encode() + picture + f"\r\n--{mark}--\r\n".encode()
        headers = {"Content-Type": f"multipart/form-data; boundary={mark}"}
        self._send(urllib.request.Request(f"{self.address}/photos", body, headers, method="POST"))

    def _put(self, name: str, picture: bytes) -> None:
        self._send(urllib.request.Request(f"{self.address}/photos/{quote(name)}", picture, method="PUT"))

    def _send(self, request: urllib.request.Request) -> None:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert response.status < 300, response.status
            response.read()


def is_answered(call: Callable[[], object]) -> bool:
    """Whether a server answers at all."""
    try:
        call()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True

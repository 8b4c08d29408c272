"""A Redis of the benchmark's own: on a socket in a temporary folder, ended by its pid."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 10.0


def missing() -> str | None:
    """Why no Redis can be started, or None."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed"
    return None if importlib.util.find_spec("redis") else "redis is not installed"


def server_version() -> str:
    """As ``7.0.15``."""
    text = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    return next((word[2:] for word in text.split() if word.startswith("v=")), "?")


@contextmanager
def started(fsync: str = "everysec") -> Iterator[Path]:
    """The socket of a fresh server with an append-only file; `fsync` is its appendfsync."""
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-bench-redis-"))
    socket = folder / "redis.sock"
    words = ["--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--logfile", "log"]
    words += ["--appendonly", "yes", "--appendfsync", fsync, "--daemonize", "no"]
    process = subprocess.Popen(["redis-server", *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        _wait(socket)
        yield socket
    finally:
        process.terminate()
        process.wait(PATIENCE)
        shutil.rmtree(folder, ignore_errors=True)


def client(socket: str | Path) -> Any:
    """A redis-py client."""
    import redis

    return redis.Redis(unix_socket_path=str(socket))


def _wait(socket: Path) -> None:
    import redis

    end = time.monotonic() + PATIENCE
    while True:
        try:
            client(socket).ping()
        except redis.ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return

"""The handle of one user of a private PostgreSQL."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import platformdirs

from pgqueue.embedded.cluster import reach_server, shut_server_down
from pgqueue.embedded.folder import PORT, Folder
from pgqueue.embedded.locks import Lock, is_free
from pgqueue.errors import EmbeddedError


class Server:
    """One use of a running private PostgreSQL; `start` makes it. Leaving its `with` block calls `stop`.

    A process forked from the one that called `start` may use the URL, but neither its end nor a `stop` in it has
    any effect on the server.
    """

    def __init__(self, folder: Folder, use: Lock, *, started: bool) -> None:
        self._folder = folder
        self._use: Lock | None = use
        self._process = os.getpid()
        self._started = started
        self._version = _server_version(self.url)
        atexit.register(self.stop)

    @property
    def url(self) -> str:
        """The URL of the database `postgres`, for psycopg; with the scheme replaced, for SQLAlchemy."""
        return self.url_for("postgres")

    def url_for(self, database: str) -> str:
        """The URL of `database` on this server, which need not exist yet."""
        # The socket's folder travels as a parameter: SQLAlchemy does not understand it in the place of the host.
        # The port is named because libpq would take it from PGPORT.
        return f"postgresql://postgres@/{quote(database, safe='')}?host={quote(str(self._folder.sockets))}&port={PORT}"

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory: `postgresql.conf` and `server.log` lie there."""
        return self._folder.data

    @property
    def version(self) -> str:
        """The server's version, as ``18.6``."""
        return self._version

    @property
    def started(self) -> bool:
        """Whether this use started the server; False if it joined one that ran."""
        return self._started

    def stop(self) -> None:
        """End this use, and the server with it if it was the last one; called again, it does nothing.

        Called at the end of the process by itself. Raises `EmbeddedError` if the server does not end within two
        minutes.
        """
        use, self._use = self._use, None
        atexit.unregister(self.stop)
        if use is None:
            return
        if os.getpid() != self._process:
            use.close()
        else:
            _leave(self._folder, use)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._use is None else self._version
        return f"<Server {state} at {self._folder.root}>"


def start(path: str | os.PathLike[str] | None = None, *, options: Sequence[str] = ()) -> Server:
    """Start the private PostgreSQL that lies in the folder `path`, or join it where it runs.

    `path` is made at first use; without it, ``PGQUEUE_DATA_DIR`` or else a folder in the user's data is taken.
    `options` are words of the `postgres` command line, as ``["-c", "max_connections=50"]``; they have no effect on a
    server that runs already. The server listens on no TCP port, and only to the account of this process. It ends with
    its last user; where that one was killed, the next user finds the server running, joins it and ends it.

    Raises `EmbeddedError` where there are no PostgreSQL programs, the folder cannot be used, or the server does not
    start; and on Windows.
    """
    check_platform()
    root = Path(path or os.environ.get("PGQUEUE_DATA_DIR") or platformdirs.user_data_path("pgqueue") / "postgres")
    folder = Folder(Path(os.path.realpath(root)))
    try:
        return _start(folder, options)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise EmbeddedError(f"PostgreSQL cannot be started in {folder.root}: {error.strerror}{place}.") from error


def check_platform() -> None:
    """EmbeddedError where no private PostgreSQL can be had: on Windows, which has no accounts as Unix has them."""
    if sys.platform == "win32" or not hasattr(os, "geteuid"):
        raise EmbeddedError(
            "pgqueue cannot start a PostgreSQL of its own on Windows: install PostgreSQL and give pgqueue its URL "
            "(PGQUEUE_DATABASE_URL)."
        )


def _start(folder: Folder, options: Sequence[str]) -> Server:
    folder.create()
    with Lock(folder.lock) as lock:
        folder.check_owner(lock)
        use = Lock(folder.users)
        use.acquire(shared=True)
        try:
            return Server(folder, use, started=reach_server(folder, options))
        except BaseException:
            _give_up(folder, use)
            raise


def _leave(folder: Folder, use: Lock) -> None:
    try:
        lock = Lock(folder.lock)
    except FileNotFoundError:  # the folder was deleted: PostgreSQL notices, and ends, within a minute
        use.release()
        return
    with lock:
        _give_up(folder, use)


def _give_up(folder: Folder, use: Lock) -> None:
    use.release()
    if is_free(folder.users):
        shut_server_down(folder)


def _server_version(url: str) -> str:
    import psycopg

    try:
        with psycopg.connect(url, autocommit=True) as connection:
            reported = connection.info.parameter_status("server_version") or ""
    except psycopg.Error as error:
        raise EmbeddedError(f"The private PostgreSQL runs but refuses this process: {error}") from error
    return reported.split(" ", 1)[0]

"""Where a benchmark plays: a server of its own (or a given one), and a fresh database for every run."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from pgqueue import embedded, migrate

SERVER_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
}
SHOWN = (*SERVER_SETTINGS, "wal_level", "autovacuum", "huge_pages")


class Stage:
    """A server and the sizes of a run. `scale` multiplies numbers of jobs; `seconds` is the length of timed parts."""

    def __init__(self, url: str, *, scale: float = 1.0, seconds: float = 10.0) -> None:
        self.url = url
        self.scale = scale
        self.seconds = seconds
        self._template = f"pgqueue_bench_{uuid.uuid4().hex[:8]}"
        execute(url, f"CREATE DATABASE {self._template}")
        migrate.upgrade(self.url_of(self._template), schema="pgqueue")

    def jobs(self, number: int, *, least: int = 200, unit: int = 1) -> int:
        """`number` scaled, a multiple of `unit`."""
        wanted = max(least, int(number * self.scale))
        return max(unit, wanted - wanted % unit)

    def url_of(self, database: str) -> str:
        """The same server, another database."""
        return make_conninfo(self.url, dbname=database)

    @contextmanager
    def database(self, *, ready: bool = True) -> Iterator[str]:
        """The URL of a database for one run: with the schema of pgqueue, or empty. It is dropped afterwards."""
        name = f"pgqueue_bench_{uuid.uuid4().hex[:8]}"
        execute(self.url, f"CREATE DATABASE {name} TEMPLATE {self._template if ready else 'template0'}")
        try:
            yield self.url_of(name)
        finally:
            execute(self.url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def settle(self) -> None:
        """Write out what earlier runs left in memory, so that nobody pays for somebody else."""
        with suppress(psycopg.errors.InsufficientPrivilege):
            execute(self.url, "CHECKPOINT")

    def settings(self) -> Mapping[str, str]:
        """The server's version and the settings that decide about speed and durability."""
        shown = dict(
            execute(self.url, "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY (%s)", SHOWN)
        )
        version = execute(self.url, "SHOW server_version")[0][0]
        return {"server_version": version, **{name: shown[name] for name in SHOWN if name in shown}}

    def close(self) -> None:
        """Drop the template."""
        execute(self.url, f"DROP DATABASE IF EXISTS {self._template} WITH (FORCE)")


def execute(url: str, statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """One statement, on a connection of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        return query(connection, statement, *params)


def query(connection: psycopg.Connection[Any], statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """One statement on this connection; its rows."""
    values = [list(value) if isinstance(value, tuple) else value for value in params]
    cursor = connection.execute(statement.encode(), values or None)
    return cursor.fetchall() if cursor.description else []


@contextmanager
def opened(database_url: str | None = None, *, scale: float = 1.0, seconds: float = 10.0) -> Iterator[Stage]:
    """A stage on the given server (a role that may create databases), or on a private one in a folder of its own, with
    fsync on, that is gone afterwards."""
    if database_url:
        with _staged(database_url, scale, seconds) as stage:
            yield stage
        return
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-bench-"))
    folder.chmod(0o755)  # where the server runs as another account, it has to enter
    try:
        with (
            embedded.start(folder / "postgres", options=_words()) as server,
            _staged(server.url, scale, seconds) as stage,
        ):
            yield stage
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _staged(url: str, scale: float, seconds: float) -> Iterator[Stage]:
    stage = Stage(url, scale=scale, seconds=seconds)
    try:
        yield stage
    finally:
        stage.close()


def _words() -> Sequence[str]:
    settings = dict(SERVER_SETTINGS)
    root = embedded.find_binaries().parent
    if any(root.rglob("pg_stat_statements.so")) or any(root.rglob("pg_stat_statements.dylib")):
        # Loaded, and switched on only in the databases whose statements are counted.
        settings |= {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "none"}
    return [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]

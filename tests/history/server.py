"""A private PostgreSQL that may be stopped, crashed and started again, with databases of their own for each run."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import psycopg

from pgqueue import embedded, migrate
from tests.history.lane_record import LANE_TABLES
from tests.history.record import TABLES
from tests.waiting import wait_until

OPTIONS = ("-c", "fsync=off", "-c", "max_connections=130")
"""Processes are killed, not the machine. Few enough connections that a run can fill them up."""
PATIENCE = 60.0


class PrivateServer:
    """The server of the folder, for the time of the block."""

    options: ClassVar[Sequence[str]] = OPTIONS
    tables: ClassVar[str] = TABLES + LANE_TABLES

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Self:
        self.server = embedded.start(self.folder, options=self.options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.start()
        self.server.stop()

    def new_database(self) -> str:
        """The URL of a migrated database, with `tables` in it."""
        name = f"history_{uuid.uuid4().hex[:8]}"
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        url = self.server.url_for(name)
        migrate.upgrade(url, schema="pgqueue")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(self.tables.encode())
        return url

    def stop(self, how: signal.Signals) -> None:
        """SIGINT: in order; SIGQUIT: at once, as a crash."""
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):
            os.kill(int((self.server.data / "postmaster.pid").read_text().split("\n", 1)[0]), how)

    def start(self) -> None:
        """The same server again, or nothing where it runs; returns when it accepts connections."""
        embedded.start(self.folder, options=self.options).stop()

    def accepts(self) -> bool:
        """Whether it can be connected to."""
        with suppress(psycopg.OperationalError):
            psycopg.connect(self.server.url, autocommit=True).close()
            return True
        return False

    def restart(self, how: signal.Signals) -> None:
        """Stop it this way, and start it again."""
        self.stop(how)
        wait_until(lambda: not self.accepts(), PATIENCE, "the server has stopped")
        self.start()


def rows(url: str, statement: str, *params: Any) -> list[tuple[Any, ...]] | None:
    """One statement on a connection of its own; None while the server is away."""
    try:
        with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []
    except psycopg.OperationalError:
        return None

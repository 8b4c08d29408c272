"""Where the demo plays: two schemas of its own, made anew at every run, and the example application on top of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg

from pgqueue import migrate
from pgqueue.demo.errors import DemoError

QUEUE_SCHEMA = "pgqueue_demo"
APP_SCHEMA = "avatars_demo"
APP = "avatars.app"
MADE_BY_US = "made by `pgqueue demo`, which drops it at every run"


def examples_path() -> Path:
    """Where the examples are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "examples"
    return installed if (installed / "avatars" / "app.py").exists() else package.parent / "examples"


def environment(database_url: str, thumbnails: Path) -> dict[str, str]:
    """What the application and its workers are told."""
    return {
        "PGQUEUE_DATABASE_URL": database_url,
        "PGQUEUE_SCHEMA": QUEUE_SCHEMA,
        "PGQUEUE_ARCHIVE": "true",
        "AVATARS_THUMBNAILS": str(thumbnails),
    }


def load_app(settings: Mapping[str, str]) -> ModuleType:
    """The example application, imported as its workers import it, with these settings in the environment."""
    if os.environ.get("PGQUEUE_DATABASE_URL") != settings["PGQUEUE_DATABASE_URL"]:
        os.environ.pop("PGQUEUE_LISTEN_URL", None)  # it belongs to the other database
    os.environ.update(settings)
    examples = examples_path()
    if not (examples / "avatars" / "app.py").exists():
        raise DemoError(f"The example application is missing: {examples} is not there. Install pgqueue again.")
    sys.path.insert(0, str(examples))
    return importlib.import_module(APP)


@contextmanager
def clean_stage(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Both schemas as new, for this process alone; yields a connection in autocommit. DemoError when another demo runs."""
    # prepare_threshold: the database may be behind a pooler that gives every transaction another session.
    with (
        psycopg.connect(database_url, prepare_threshold=None, application_name="pgqueue demo") as guard,
        psycopg.connect(
            database_url, prepare_threshold=None, application_name="pgqueue demo", autocommit=True
        ) as connection,
    ):
        # The lock lives as long as this transaction, which stays open and idle: a killed demo lets go of it.
        guard.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        free = guard.execute("SELECT pg_try_advisory_xact_lock(hashtextextended('pgqueue demo', 0))").fetchone()
        if free != (True,):
            raise DemoError("Another `pgqueue demo` runs in this database: wait until it is done.")
        _renew_schemas(connection)
        migrate.upgrade(database_url, schema=QUEUE_SCHEMA)
        yield connection


def _renew_schemas(connection: psycopg.Connection[Any]) -> None:
    with connection.transaction():
        connection.execute("SET LOCAL client_min_messages = warning")
        for schema in (QUEUE_SCHEMA, APP_SCHEMA):
            found = connection.execute(
                "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = %s", (schema,)
            ).fetchone()
            if found is not None and found[0] != MADE_BY_US:
                raise DemoError(f"This database has a schema {schema} that `pgqueue demo` did not make: rename it.")
            connection.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE".encode())
            connection.execute(f"CREATE SCHEMA {schema}".encode())
            connection.execute(f"COMMENT ON SCHEMA {schema} IS '{MADE_BY_US}'".encode())

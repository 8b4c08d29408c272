"""Emptying the queue's tables, for `flush` and for tests."""

from __future__ import annotations

from typing import Any

from django.db import router

from pgqueue.contrib.django import revisions
from pgqueue.tables import metadata_for


def empty(connection: Any) -> None:
    """Remove every job, dead letter, result, schedule and so on from the queues in this database. The schema stays."""
    if connection.vendor != "postgresql" or not router.allow_migrate(connection.alias, revisions.LABEL):
        return
    for schema in revisions.schemas_in(connection.alias):
        with connection.cursor() as cursor:
            filled = [name for name in _existing(cursor, schema) if _holds_rows(cursor, schema, name)]
            if filled:
                cursor.execute("TRUNCATE " + ", ".join(f'"{schema}".{name}' for name in filled))


def _existing(cursor: Any, schema: str) -> list[str]:
    names = sorted(table.name for table in metadata_for(schema).tables.values())
    cursor.execute(
        "SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = ANY(%s)",
        [schema, names],
    )
    return [name for (name,) in cursor.fetchall()]


def _holds_rows(cursor: Any, schema: str, name: str) -> bool:
    # Truncating a table costs more than looking into it, and most are empty behind a test.
    cursor.execute(f'SELECT EXISTS (SELECT FROM "{schema}".{name})')  # noqa: S608 - names of our own
    return bool(cursor.fetchone()[0])

"""Revision 0002: what a worker says of itself. Workers of the release before it beat on, and going down leaves nothing."""

from __future__ import annotations

import psycopg
from psycopg.types.json import Jsonb

from pgqueue import migrate

COLUMNS = """
    SELECT column_name FROM information_schema.columns
    WHERE table_schema = 'pgqueue' AND table_name = 'worker' AND column_name IN ('completed', 'circuits')
    ORDER BY column_name
"""
EARLIER_BEAT = """
    INSERT INTO pgqueue.worker (id, name, hostname, pid, version, queues, concurrency, lease_seconds)
    VALUES (7, 'old', 'host', 1, '0', '{q}', 1, 30)
    ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp()
"""


def test_a_worker_of_the_earlier_release_beats_on_the_new_schema(empty_database: str) -> None:
    migrate.to(empty_database, "0001")
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute(EARLIER_BEAT)
        migrate.upgrade(empty_database)
        connection.execute(EARLIER_BEAT)
        assert connection.execute("SELECT id, completed, circuits FROM pgqueue.worker").fetchall() == [(7, {}, None)]


def test_the_way_down_drops_both_columns_and_keeps_the_workers(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        assert connection.execute(COLUMNS).fetchall() == [("circuits",), ("completed",)]
        connection.execute(EARLIER_BEAT)
        connection.execute("UPDATE pgqueue.worker SET completed = %s", [Jsonb({"q": 5})])
        migrate.to(database, "0001")
        assert connection.execute(COLUMNS).fetchall() == []
        assert connection.execute("SELECT id FROM pgqueue.worker").fetchall() == [(7,)]

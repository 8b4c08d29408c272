"""The plans of what is asked of messages that are kept: by index, in the topic's own tables, with and without statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.sql import statements
from tests.plans.test_hot_statements import nodes

SQL = statements("pgqueue")
ROWS = 20_000
STATEMENTS: dict[str, dict[str, Any]] = {
    "message_publish": {
        "headers": None,
        "told": "{}",
        "channel": None,
        "args": ["[1]"],
        "kwargs": [None],
        "keys": [None],
    },
    "message_deliver": {"name": "g", "ids": [5, 6, 7], "channel": None},
    "message_late": {},
    "message_find": {"id": 7},
    "replay_next": {"name": "g", "look": 100, "limit": 50},
    "replay_fresh": {"name": "g", "limit": 50},
}


@pytest.fixture
def session(pq: pgqueue.PgQueue, database: str) -> Iterator[psycopg.Connection[Any]]:
    """Many messages, one of which is new, in two of three topics."""
    for topic in ("orders", "others"):
        pq.keep_topic(topic, count=4 * ROWS)
    with psycopg.connect(database, autocommit=True) as connection:
        for topic in ("orders", "others"):
            fill = """
                INSERT INTO pgqueue.message (id, topic, segment, version, xid, published_at)
                SELECT n, %s, 1, 0, pg_current_xact_id()::text::int8, now() FROM generate_series(1, %s) AS n
            """
            connection.execute(fill, [topic, ROWS])
        connection.execute("SELECT setval('pgqueue.message_id_seq', %s)", [ROWS])
        pq.subscribe("orders", "work", group="g", start="beginning")
        pq.publish("orders", [1])
        yield connection


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("name", STATEMENTS)
def test_messages_are_found_by_index_and_only_those_of_their_topic(
    name: str, analyzed: bool, session: psycopg.Connection[Any]
) -> None:
    if analyzed:
        session.execute("ANALYZE")
    words = b"EXPLAIN (ANALYZE, FORMAT JSON) "
    with session.transaction(force_rollback=True):
        cursor = session.cursor()
        cursor.execute(words + SQL[name], {"topic": "orders", **STATEMENTS[name]}, prepare=False)
        row = cursor.fetchone()
    assert row is not None
    read = [node for node in nodes(row[0][0]["Plan"]) if "Scan" in node["Node Type"] and "Relation Name" in node]
    of_messages = [node for node in read if node["Relation Name"].startswith("message")]
    assert not [node for node in of_messages if node["Relation Name"].startswith("message_2")]
    for node in of_messages:
        assert node["Actual Rows"] <= 200, node
        assert node["Node Type"] != "Seq Scan" or node["Actual Rows"] + node.get("Rows Removed by Filter", 0) == 0, node

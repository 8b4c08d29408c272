"""No sequence is used up by what happens all the time: heartbeats, idle looks, refused calls."""

from __future__ import annotations

import os
from typing import Any

import psycopg

import pgqueue
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import worker as worker_ops
from pgqueue.ops.worker import Identity

ALL = "SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'pgqueue' ORDER BY 1"
TYPES = """
    SELECT c.relname, a.attname, format_type(a.atttypid, NULL)
    FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
    WHERE c.relnamespace = 'pgqueue'::regnamespace AND c.relkind IN ('r', 'p') AND a.attnum > 0
      AND (a.attname ~ '(^|_)ids?$' OR a.attname = 'position')
"""
IDENTITY = Identity(name="w", hostname="h", pid=os.getpid(), version="0", queues=["q"], concurrency=1, lease=30.0)


def test_a_thousand_heartbeats_and_idle_looks_move_no_sequence(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    pq.enqueue("t", queue="q")
    worker_id = pq.run(worker_ops.register(IDENTITY))
    [job] = pq.claim("q", lease=3600)
    pq.pause("q")
    before = admin.execute(ALL).fetchall()
    assert len(before) == 6
    for _ in range(1000):
        pq.run(worker_ops.beat(worker_id, IDENTITY, worker_ops.Report()))
        pq.run(worker_ops.beat_leases(worker_id, "q", [job.token], lease=3600))
    for _ in range(100):
        pq.pause("q")
        pq.resume("q")
        assert pq.claim("q") == []
        pq.extend(job, 3600)
        pq.rescue("q")
        pq.run(rescue_ops.promote("q", channel=None))
        pq.run(rescue_ops.adopt("q"))
    assert admin.execute(ALL).fetchall() == before


def test_a_refused_enqueue_moves_no_sequence(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    before = admin.execute(ALL).fetchall()
    for _ in range(100):
        try:
            pq.enqueue("t", [float("nan")], queue="q")
        except pgqueue.PayloadError:
            continue
        raise AssertionError
    assert admin.execute(ALL).fetchall() == before


def test_every_id_and_every_place_in_line_has_sixty_four_bits(admin: psycopg.Connection[Any]) -> None:
    rows = admin.execute(TYPES).fetchall()
    assert len(rows) >= 8
    assert {kind for _, name, kind in rows if name != "pid"} <= {"bigint", "bigint[]"}
    assert {kind for (kind,) in admin.execute("SELECT DISTINCT data_type::text FROM pg_sequences")} == {"bigint"}

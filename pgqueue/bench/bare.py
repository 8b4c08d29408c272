"""The floor of a life cycle: the three statements that no queue in PostgreSQL can do without, on a table with nothing else.

No queue names, priorities, attempts, leases, fences, retries, archive or checks; psycopg, prepared statements, the same JSON
on both sides, every insert and delete durable. What goes beyond it is what the queue costs; the rest is PostgreSQL and disk.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
import psycopg

from pgqueue.bench.app import message
from pgqueue.bench.errors import Miscount
from pgqueue.bench.life_cycle import number_of_jobs
from pgqueue.bench.stage import Stage
from pgqueue.bench.values import Metrics
from pgqueue.ops import Int8s, Texts

TABLE = (
    "CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, taken boolean DEFAULT false, body text) "
    "WITH (fillfactor = 45)"
)
ENQUEUE = "INSERT INTO bare (body) SELECT unnest(%(bodies)b::text[])"
CLAIM = (
    "UPDATE bare SET taken = true WHERE id = ANY (ARRAY(SELECT id FROM bare WHERE NOT taken AND id > %(after)b ORDER BY id "
    "LIMIT %(limit)b FOR NO KEY UPDATE SKIP LOCKED)) RETURNING id, body"
)
COMPLETE = "DELETE FROM bare WHERE id = ANY (%(ids)b::int8[])"


def bare_life_cycle(stage: Stage, batch: int) -> Metrics:
    """Insert `batch`, take `batch`, read them, delete them; and again."""
    number = number_of_jobs(stage, batch)
    with stage.database() as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE.encode())
        cursor = connection.cursor(binary=True)
        after = _turns(cursor, batch, 10, 0)
        stage.settle()
        began = time.perf_counter()
        _turns(cursor, batch, number // batch, after)
        spent = time.perf_counter() - began
    return {"jobs/s": number / spent}


def _turns(cursor: psycopg.Cursor[Any], batch: int, turns: int, after: int) -> int:
    for turn in range(turns):
        bodies = Texts([orjson.dumps([message(turn * batch + n)]).decode() for n in range(batch)])
        cursor.execute(ENQUEUE, {"bodies": bodies}, prepare=True)
        cursor.execute(CLAIM, {"after": after, "limit": batch}, prepare=True)
        taken = cursor.fetchall()
        if sum(1 for _, body in taken if "n" in orjson.loads(body)[0]) != batch:
            raise Miscount(f"{batch} rows were inserted and {len(taken)} were taken")
        ids = Int8s([row[0] for row in taken])
        cursor.execute(COMPLETE, {"ids": ids}, prepare=True)
        after = max(ids)
    return after

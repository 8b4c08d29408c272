"""Enqueue: one by one beside a bare INSERT of the same row; in a caller's transaction; in bulk beside a bare COPY."""

from __future__ import annotations

import time

import orjson
import psycopg

from pgqueue import PgQueue
from pgqueue.bench.app import PLAIN, message
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage, execute, query
from pgqueue.bench.values import Metrics

INSERT = (
    "INSERT INTO pgqueue.job (queue, task, args, priority, max_attempts) VALUES (%s, %s, %s::json, %s, %s) RETURNING id"
)
COPY = "COPY pgqueue.job (queue, task, args, priority, max_attempts) FROM STDIN"


def one_by_one(stage: Stage) -> Metrics:
    """Every job durable before the next begins."""
    number = stage.jobs(3000)
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=PLAIN, queue="bench")(_nothing)
        for n in range(50):
            task.enqueue(message(n))
        began = time.perf_counter()
        for n in range(number):
            task.enqueue(message(n))
        spent = time.perf_counter() - began
        _check(url, number + 50)
    return {"jobs/s": number / spent}


def bare_insert(stage: Stage) -> Metrics:
    """The floor: psycopg, the same row, one commit each."""
    number = stage.jobs(3000)
    with stage.database() as url, psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.cursor()
        for n in range(number + 50):
            if n == 50:
                began = time.perf_counter()
            row = ("bench", PLAIN, orjson.dumps([message(n)]).decode(), 0, 20)
            cursor.execute(INSERT, row, prepare=True)
            cursor.fetchone()
        spent = time.perf_counter() - began
        _check(url, number + 50)
    return {"jobs/s": number / spent}


def in_transaction(stage: Stage) -> Metrics:
    """One by one inside a caller's transaction, with one commit at the end."""
    number = stage.jobs(20_000)
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=PLAIN, queue="bench")(_nothing)
        with psycopg.connect(url) as connection:
            began = time.perf_counter()
            for n in range(number):
                task.enqueue(message(n), using=connection)
            connection.commit()
            spent = time.perf_counter() - began
        _check(url, number)
    return {"jobs/s": number / spent}


def bulk(stage: Stage, size: int) -> Metrics:
    """enqueue_many calls of `size` jobs, each durable when it returns."""
    size = stage.jobs(size, least=10)
    calls = max(1, min(300, stage.jobs(200_000) // size))
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=PLAIN, queue="bench")(_nothing)
        task.enqueue_many([(message(0),)])
        stage.settle()
        began = time.perf_counter()
        for _ in range(calls):
            task.enqueue_many((message(n),) for n in range(size))
        spent = time.perf_counter() - began
        _check(url, size * calls + 1)
    return {"jobs/s": size * calls / spent}


def bare_copy(stage: Stage, size: int) -> Metrics:
    """The floor of bulk: COPY of the same rows, as text, into the same table."""
    size = stage.jobs(size, least=10)
    calls = max(1, min(300, stage.jobs(200_000) // size))
    with stage.database() as url, psycopg.connect(url, autocommit=True) as connection:
        stage.settle()
        began = time.perf_counter()
        for _ in range(calls):
            with connection.cursor().copy(COPY) as copy:
                for n in range(size):
                    arguments = orjson.dumps([message(n)]).replace(b"\\", b"\\\\")
                    copy.write(b"bench\tplain\t%b\t0\t20\n" % arguments)
        spent = time.perf_counter() - began
        found = query(connection, "SELECT count(*) FROM pgqueue.job")[0][0]
    if found != size * calls:
        raise Miscount(f"{size * calls} rows were copied and {found} arrived")
    return {"jobs/s": size * calls / spent}


def _nothing(message: dict[str, object]) -> None: ...


def _check(url: str, number: int) -> None:
    found = execute(url, "SELECT count(*) FROM pgqueue.job")[0][0]
    if found != number:
        raise Miscount(f"{number} jobs were enqueued and {found} are there")

"""What a batch waits for, and what not: slots of a limit, jobs that are superseded."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg

import pgqueue
from pgqueue.sql import statements
from tests.waiting import wait_until
from tests.workers import PATIENCE, running, wait_for_count

Admin = psycopg.Connection[Any]
SQL = statements("pgqueue")
LONG = 600.0


def test_a_batch_in_a_limited_queue_is_as_full_as_the_limit_allows(pq: pgqueue.PgQueue, admin: Admin) -> None:
    calls: list[int] = []
    task = pq.task(name="work", queue="q", batch=20, batch_wait=LONG)(lambda jobs: calls.append(len(jobs)))
    pq.limit_queue("q", running=50)
    task.enqueue_many((number,) for number in range(20))
    with running(pq, concurrency=1):
        wait_for_count(admin, 20, "archive")
    assert calls == [20]


def test_a_batch_does_not_wait_for_jobs_that_the_limit_of_its_queue_keeps_away(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    calls: list[int] = []
    task = pq.task(name="work", queue="q", batch=20, batch_wait=LONG)(lambda jobs: calls.append(len(jobs)))
    pq.limit_queue("q", running=3)
    task.enqueue_many((number,) for number in range(6))
    with running(pq, concurrency=1):
        wait_for_count(admin, 6, "archive")
    assert calls == [3, 3]


def test_a_key_that_is_superseded_again_and_again_runs_when_its_batch_has_waited_long_enough(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ran: list[int] = []
    done = threading.Event()

    def work(jobs: pgqueue.Batch) -> None:
        ran.extend(job.args[0] for job in jobs)
        done.set()

    task = pq.task(name="work", queue="q", batch=20, batch_wait=2.0)(work)
    newest = task.options(unique_key="avatar", on_conflict="supersede")
    with running(pq, concurrency=1, lease=3.0) as watched:
        wait_until(watched.worker._hearing, PATIENCE, "it hears")
        end = time.monotonic() + PATIENCE
        number = 0
        while not done.is_set() and time.monotonic() < end:
            newest.enqueue(number)
            number += 1
            done.wait(0.4)
        assert ran, f"{number} uploads, and none was shown"


def test_a_claim_that_hangs_holds_up_its_own_queue_and_no_other(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    limited = pq.task(name="limited", queue="limited")(lambda: None)
    free = pq.task(name="free", queue="free")(lambda: None)
    pq.limit_queue("limited", running=5)
    with psycopg.connect(database) as frozen:
        frozen.execute(SQL["limit_begin"])
        frozen.execute(SQL["limit_lock"], {"queue": "limited", "wait": True})
        frozen.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        with running(pq, queues=("limited", "free")):
            limited.enqueue()
            free.enqueue()
            wait_for_count(admin, 1, "archive", "task = 'free'")
            frozen.rollback()
            wait_for_count(admin, 2, "archive")

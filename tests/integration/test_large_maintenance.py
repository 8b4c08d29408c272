"""Maintenance of very many rows: in small statements, past what others hold, and to its end."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.workers import count

Admin = psycopg.Connection[Any]
LETTERS = """
    INSERT INTO pgqueue.dead_letter (id, queue, task, priority, attempt, max_attempts, lost, created_at, reason, died_at)
    SELECT n, 'q', 't', 0, 1, 1, 0, now(), 'test', now() - (300000 - n) * interval '1 second'
    FROM generate_series(1, %s) AS n
"""
LOST = """
    WITH made AS (
        INSERT INTO pgqueue.lease (id, queue, job_ids, claimed_at, expires_at)
        SELECT n, 'q', ARRAY[n], now() - interval '1 day', now() - (20000 - n) * interval '1 second'
        FROM generate_series(1, %s) AS n RETURNING id
    )
    INSERT INTO pgqueue.job (id, queue, task, position, attempt, lease_id) SELECT id, 'q', 't', id, 1, id FROM made
"""


def limited(database: str, seconds: int) -> pgqueue.PgQueue:
    """A queue whose statements end after so many seconds, as a role of a careful host may have it."""
    return pgqueue.PgQueue(psycopg.conninfo.make_conninfo(database, options=f"-c statement_timeout={seconds}s"))


@pytest.mark.slow
def test_two_purgers_of_two_hundred_thousand_need_no_long_statement_and_share_the_work(
    database: str, admin: Admin, pq: pgqueue.PgQueue
) -> None:
    number = 200_000
    admin.execute(LETTERS, [number])
    gone: list[int] = []
    errors: list[BaseException] = []
    together = threading.Barrier(2)

    def purge() -> None:
        try:
            with limited(database, 5) as purger:
                purger.status()  # connected
                together.wait(60)
                gone.append(purger.purge(queue="q"))
        except BaseException as error:
            errors.append(error)

    purgers = [threading.Thread(target=purge) for _ in range(2)]
    for purger in purgers:
        purger.start()
    rounds = 0
    while any(purger.is_alive() for purger in purgers):
        pq.enqueue("t", queue="q")
        pq.complete(pq.claim("q"))  # the purge keeps nobody from working
        rounds += 1
    for purger in purgers:
        purger.join()
    assert errors == []
    assert sum(gone) == number
    assert min(gone) > 0
    assert rounds > 1
    assert count(admin, "dead_letter") == 0


def test_a_purge_goes_past_ten_thousand_letters_that_somebody_holds(database: str, admin: Admin) -> None:
    admin.execute(LETTERS, [10_005])
    with psycopg.connect(database) as other, limited(database, 20) as pq:
        other.execute("SELECT FROM pgqueue.dead_letter WHERE id <= 10000 FOR UPDATE")
        assert pq.purge(queue="q") == 5
        assert pq.redrive(ids=[1, 2, 3]) == []
        other.rollback()
        assert pq.purge(queue="q") == 10_000


def test_a_rescue_goes_past_ten_thousand_leases_that_somebody_holds(database: str, admin: Admin) -> None:
    admin.execute(LOST, [10_005])
    with psycopg.connect(database) as other, limited(database, 20) as pq:
        other.execute("SELECT FROM pgqueue.lease WHERE id <= 10000 FOR UPDATE")
        assert sorted(pq.rescue("q").returned) == list(range(10_001, 10_006))
        assert sorted(job.id for job in pq.claim("q", limit=100)) == list(range(10_001, 10_006))
        other.rollback()
    assert count(admin, "lease", "id <= 10000") == 10_000


def test_a_rescue_goes_past_ten_thousand_jobs_that_somebody_holds(database: str, admin: Admin) -> None:
    admin.execute(LOST, [10_005])
    with psycopg.connect(database) as other, limited(database, 20) as pq:
        other.execute("SELECT FROM pgqueue.job WHERE id <= 10000 FOR UPDATE")
        assert sorted(pq.rescue("q").returned) == list(range(10_001, 10_006))
        other.rollback()
        assert len(pq.rescue("q").returned) == 10_000
    assert count(admin, "lease") == 0
    assert count(admin, "job", "lease_id IS NULL AND lost = 1") == 10_005

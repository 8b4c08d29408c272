"""Revision 0011: limits come and go, and jobs and pauses stay."""

from __future__ import annotations

import pgqueue
from pgqueue import migrate
from tests.conftest import execute
from tests.integration.test_migrate import listing


def test_the_way_down_keeps_jobs_and_pauses_and_lets_go_what_waited_for_a_token(
    database: str, pq: pgqueue.PgQueue
) -> None:
    limited = [pq.enqueue("work", queue="limited") for _ in range(2)]
    keyed = [pq.enqueue("work", queue="keyed", concurrency_key="a", concurrency_limit=5) for _ in range(2)]
    pq.pause("paused")
    pq.limit_queue("limited", running=1, rate=1, per=3600)
    pq.limit_key("keyed", "a", rate=1, per=3600)
    assert len(pq.claim("limited", limit=5)) == len(pq.claim("keyed", limit=5)) == 1
    migrate.to(database, "0010")
    left = listing(database)
    gone = ("queue.most_running", "queue.rate", "queue.tokens", "queue.limit_definition", "lane.rate", "lane.wakes_at")
    assert not [name for name in gone if name in left]
    assert execute(database, "SELECT name FROM pgqueue.queue WHERE paused_at IS NOT NULL") == [("paused",)]
    assert execute(database, "SELECT due_at FROM pgqueue.admission") == [(None,)]
    migrate.upgrade(database)
    assert migrate.check(database).state is migrate.SchemaState.CURRENT
    assert pq.limits() == []
    assert [job.id for job in pq.claim("limited", limit=5)] == limited[1:]
    assert [job.id for job in pq.claim("keyed", limit=5)] == keyed[1:]

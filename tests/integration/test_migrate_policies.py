"""Revisions 0006 and 0007: pauses, expiry and ageing come and go, and jobs and lasting pauses stay."""

from __future__ import annotations

import psycopg
import pytest

import pgqueue
from pgqueue import migrate, version
from pgqueue.ops import worker as worker_ops
from tests.conftest import execute
from tests.integration.test_migrate import listing

EARLIER_CLAIM = """
    UPDATE pgqueue.job SET lease_id = nextval('pgqueue.lease_tie_seq'), attempt = attempt + 1
    WHERE id = (
        SELECT id FROM pgqueue.job
        WHERE queue = 'q' AND position IS NOT NULL AND lease_id IS NULL AND run_at IS NULL
          AND NOT EXISTS (SELECT 1 FROM pgqueue.queue WHERE name = 'q' AND paused_at IS NOT NULL)
        ORDER BY priority DESC, position LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED)
    RETURNING id
"""


def test_the_way_down_keeps_jobs_and_lasting_pauses_and_ends_those_that_are_over(
    database: str, pq: pgqueue.PgQueue
) -> None:
    job_id = pq.enqueue("work", queue="over", expires_in=60)
    for queue, seconds in (("over", 60), ("later", 3600), ("lasting", None)):
        pq.pause(queue, seconds=seconds)
    execute(database, "UPDATE pgqueue.queue SET paused_until = now() - interval '1 s' WHERE name = 'over'")
    migrate.to(database, "0005")
    left = listing(database)
    gone = ("job.expires_at", "job.job_expiry", "schedule.expires_in", "queue.paused_until", "queue.ageing")
    assert not [name for name in gone if name in left]
    paused = "SELECT name, paused_at IS NOT NULL FROM pgqueue.queue ORDER BY name"
    assert execute(database, paused) == [("lasting", True), ("later", True), ("over", False)]
    assert execute(database, "SELECT id FROM pgqueue.job") == [(job_id,)]
    migrate.upgrade(database)
    assert migrate.check(database).state is migrate.SchemaState.CURRENT
    assert [job.id for job in pq.claim("over")] == [job_id]


def test_a_worker_of_the_release_before_goes_on_working_on_it(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate.to(empty_database, "0005")
    execute(empty_database, "INSERT INTO pgqueue.job (queue, task, position) VALUES ('q', 'work', 1), ('q', 'work', 2)")
    with psycopg.connect(empty_database, autocommit=True) as worker:
        assert worker.execute(EARLIER_CLAIM).fetchall() == [(1,)]
        migrate.upgrade(empty_database)
        assert worker.execute(EARLIER_CLAIM).fetchall() == [(2,)]
    with pgqueue.PgQueue(empty_database) as pq:
        found, note = pq.run(worker_ops.schema_version())
    assert found == version.SCHEMA_REVISION
    for revision, runs in (("0005", True), ("0004", True), ("0003", False)):
        monkeypatch.setattr(version, "SCHEMA_REVISION", revision)
        assert version.runs_on(found, note) is runs

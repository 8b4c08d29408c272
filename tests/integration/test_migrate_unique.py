"""Revisions 0009 and 0010: older jobs and workers go on, and the way down strands no job."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import migrate, version
from pgqueue.ops import unique as unique_ops
from pgqueue.ops import worker as worker_ops
from tests.conftest import execute

BEFORE = "0008"


def test_jobs_of_the_earlier_release_are_claimed_and_settled_on_the_new_schema(empty_database: str) -> None:
    migrate.to(empty_database, BEFORE)
    with psycopg.connect(empty_database, autocommit=True) as connection, pgqueue.PgQueue(empty_database) as pq:
        connection.execute("INSERT INTO pgqueue.job (queue, task, unique_key) VALUES ('q', 't', 'k'), ('q', 't', NULL)")
        migrate.upgrade(empty_database)
        first = pq.enqueue("t", queue="q", unique_key="k")
        assert len(pq.claim("q", limit=5)) == 2
        second = pq.enqueue("t", queue="q", unique_key="k", on_conflict="supersede")
        assert second > first


def test_the_way_down_lets_what_waits_behind_a_running_job_run(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection, pgqueue.PgQueue(database) as pq:
        options: dict[str, Any] = {"queue": "q", "unique_key": "k", "on_conflict": "supersede"}
        pq.enqueue("t", **options)
        pq.claim("q")
        second = pq.enqueue("t", **options)
        pq.enqueue("t", queue="q", unique_key="w", unique_for=60)
        migrate.to(database, BEFORE)
        rows = connection.execute("SELECT run_at <= now() FROM pgqueue.job WHERE id = %s", [second]).fetchall()
        assert rows == [(True,)]
        left = connection.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace AND relname ~ 'window|job_next'"
            " UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'pgqueue'::regnamespace"
            " AND proname ~ 'merge|follow|expire'"
        ).fetchall()
        assert left == []


def test_a_worker_of_the_release_before_may_stay_and_runs_no_two_jobs_of_a_key_at_once(
    database: str, pq: pgqueue.PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, note = pq.run(worker_ops.schema_version())
    for revision, runs in ((BEFORE, True), ("0004", True), ("0003", False)):
        monkeypatch.setattr(version, "SCHEMA_REVISION", revision)
        assert version.runs_on(found, note) is runs
    options: dict[str, Any] = {"queue": "q", "unique_key": "k", "on_conflict": "supersede"}
    first = pq.enqueue("t", **options)
    [job] = pq.claim("q")
    second = pq.enqueue("t", **options)
    # What an older worker does with a job that failed: it knows of nothing that waits behind it.
    execute(database, "UPDATE pgqueue.job SET lease_id = NULL, run_at = now() WHERE lease_id IS NOT NULL")
    assert pq.promote("q") == [first]
    assert [one.id for one in pq.claim("q", limit=5)] == [job.id]
    execute(database, "UPDATE pgqueue.job SET lease_id = NULL WHERE lease_id IS NOT NULL")
    assert pq.run(unique_ops.follow("q", archive=True)) == [second], "a newer worker lets the newer job follow"
    assert [one.id for one in pq.claim("q", limit=5)] == [second]

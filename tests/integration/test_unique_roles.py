"""Unique keys under the roles of least privilege."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from tests.integration.test_roles import acting, prefix  # noqa: F401 - `prefix` is a fixture
from tests.workers import count, running, wait_for_count


def test_a_producer_enqueues_with_unique_keys_and_changes_no_job_that_waits(
    database: str,
    prefix: str,  # noqa: F811
    admin: psycopg.Connection[Any],
) -> None:
    with acting(database, prefix, "producer") as pq:
        task = pq.task(name="t", queue="q", unique_key=lambda n: f"n:{n}")(lambda n: None)
        first = task.enqueue(1)
        assert task.enqueue(1) == first
        assert task.enqueue_many([(1,), (2,)])[0] == first
        with pytest.raises(pgqueue.DuplicateJob):
            task.options(on_conflict="raise").enqueue(1)
        admin.execute("UPDATE pgqueue.job SET expires_at = now() - interval '1 s' WHERE id = %s", [first])
        assert task.enqueue(1) > first, "it has expired, and is gone"
        third = task.options(unique_for=60).enqueue(3)
        assert task.options(unique_for=60).enqueue(3) == third
        for mode in ("replace", "merge", "supersede"):
            with pytest.raises(pgqueue.SchemaError, match=r"job_enqueue_over needs .* on job"):
                task.options(on_conflict=mode).enqueue(1)
    assert count(admin, "job") == 3


def test_a_worker_lets_jobs_follow_under_its_role(
    database: str,
    prefix: str,  # noqa: F811
    admin: psycopg.Connection[Any],
) -> None:
    with acting(database, prefix, "worker") as pq:

        @pq.task(name="t", queue="q", unique_key="k", on_conflict="supersede", unique_for=0.5)
        def task(number: int) -> None:
            if number < 2:
                task.enqueue(number + 1)

        @pq.task(name="m", queue="q", unique_key="m", on_conflict="merge")
        def merged(numbers: list[int]) -> None: ...

        task.enqueue(0)
        merged.enqueue([1])
        merged.enqueue([2])
        with running(pq) as watched:
            wait_for_count(admin, 4, "archive")
            assert not watched.seen(pgqueue.EventName.LOOP_FAILED)
    with acting(database, prefix, "reader") as reader:
        assert reader.jobs() == []

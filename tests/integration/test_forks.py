"""Forks after connections were opened, where a shared TLS session would be torn by the first byte of the child."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.tls import over_tls
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
Admin = psycopg.Connection[Any]


@pytest.fixture
def secured(database: str, tmp_path: Path) -> Iterator[pgqueue.PgQueue]:
    with over_tls(database, tmp_path) as url, pgqueue.PgQueue(url) as pq:
        with psycopg.connect(url) as session:
            assert session.pgconn.ssl_in_use
        yield pq


def fork(work: Any) -> int:
    """The pid of a child that does `work` and leaves without any of pytest's own ends; status 0 when it went well."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        os._exit(status)


def test_children_and_their_parent_enqueue_over_tls_at_the_same_time(secured: pgqueue.PgQueue, admin: Admin) -> None:
    secured.enqueue("parent", queue="q")

    def work() -> None:
        for _ in range(20):
            secured.enqueue("child", queue="q")
        secured.close()

    children = [fork(work) for _ in range(3)]
    for _ in range(20):
        secured.enqueue("parent", queue="q")
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    for _ in range(5):
        secured.enqueue("parent", queue="q")
    assert count(admin, "job", "task = 'parent'") == 26
    assert count(admin, "job", "task = 'child'") == 60


def test_a_child_that_ends_at_once_closes_nothing_of_its_parent(secured: pgqueue.PgQueue, admin: Admin) -> None:
    secured.enqueue("t", queue="q")
    sessions = "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgqueue' AND datname = current_database()"
    before = {pid for (pid,) in admin.execute(sessions)}
    assert before
    for _ in range(5):
        assert os.waitpid(fork(secured.close), 0)[1] == 0
        secured.enqueue("t", queue="q")
    assert before <= {pid for (pid,) in admin.execute(sessions)}


def test_a_task_that_forks_and_enqueues_in_the_child_works_over_tls(secured: pgqueue.PgQueue, admin: Admin) -> None:
    forking = multiprocessing.get_context("fork")

    @secured.task(name="parent", queue="q")
    def parent() -> None:
        secured.enqueue("left", queue="results")
        child = forking.Process(target=lambda: secured.enqueue("from the child", queue="results"))
        child.start()
        child.join(PATIENCE)
        secured.enqueue("after", queue="results")
        if child.exitcode != 0:
            raise RuntimeError(f"the child left with {child.exitcode}")

    ids = parent.enqueue_many([()] * 4)
    with running(secured, queues=("q",), concurrency=2) as watched:
        wait_for_count(admin, 12, "job", "queue = 'results'")
        wait_for_count(admin, 4, "archive", "task = 'parent' AND state = 'completed'")
        assert not watched.seen(pgqueue.EventName.JOB_FAILED)
        assert not watched.seen(pgqueue.EventName.LOOP_FAILED)
    assert count(admin, "archive", f"id = ANY ('{{{','.join(map(str, ids))}}}') AND attempt = 1") == 4
    wait_until(lambda: count(admin, "lease") == 0, PATIENCE, "no lease is left")

"""Django's connections around every job, in the thread, the event loop or the child process that runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django
import psycopg
import pytest
from django.db import connection, connections, transaction

import pgqueue
from pgqueue.contrib.django import hygiene, queue
from tests.conftest import execute
from tests.contrib.django.conftest import close_pool, work
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.models import Note, Order
from tests.waiting import wait_until
from tests.workers import running

PATIENCE = 60.0
OURS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'shop'"


@contextmanager
def settings_of_the_connection(**changes: Any) -> Iterator[None]:
    """Other settings of Django's connections, which carry a name of their own to be counted by."""
    chosen = connections.settings["default"]
    before = dict(chosen)
    assert queue().settings.database_url, "found before that name: the worker's own connections do not carry it"
    options = {"application_name": "shop", **changes.pop("OPTIONS", {})}
    connections.close_all()
    chosen.update(OPTIONS=options, **changes)
    try:
        yield
    finally:
        connections["default"].close()
        if options.get("pool"):
            close_pool(connections["default"])
        chosen.clear()
        chosen.update(before)


def open_connections(url: str) -> int:
    return int(execute(url, OURS)[0][0])


def end_backend(url: str, pid: int) -> None:
    assert execute(url, "SELECT pg_terminate_backend(%s, 60000)", pid) == [(True,)]


def results(*enqueued: Any) -> list[Any]:
    for result in enqueued:
        result.refresh()
    return list(enqueued)


def test_five_hundred_jobs_leak_no_connection(pq: pgqueue.PgQueue, shop: str) -> None:
    with settings_of_the_connection():
        for number in range(250):
            tasks.note.enqueue(str(number))
            tasks.note_async.enqueue(str(number))
        connections.close_all()
        most = 0

        def look() -> bool:
            nonlocal most
            most = max(most, open_connections(shop))
            return bool(execute(shop, "SELECT count(*) = 0 FROM pgqueue.job")[0][0])

        with running(pq, concurrency=5, poll=0.1):
            wait_until(look, PATIENCE, "all jobs are done")
            wait_until(lambda: open_connections(shop) == 0, PATIENCE, "all connections are closed")
    assert most <= 20, "as many as jobs at once, five threads and five coroutines, and those that are closing"
    assert Note.objects.count() == 500


def test_connections_last_as_long_as_the_settings_say(pq: pgqueue.PgQueue, shop: str) -> None:
    with settings_of_the_connection(CONN_MAX_AGE=0):
        enqueued = [tasks.note.enqueue(str(number)) for number in range(4)]
        work(pq, concurrency=1)
        assert len({result.return_value for result in results(*enqueued)}) == 4
    with settings_of_the_connection(CONN_MAX_AGE=600):
        enqueued = [tasks.note.enqueue(str(number)) for number in range(4)]
        with running(pq, concurrency=1, poll=0.1):
            wait_until(lambda: all(one.is_finished for one in results(*enqueued)), PATIENCE, "four jobs")
            assert len({result.return_value for result in enqueued}) == 1
            # A stale one is noticed before the next job has it.
            end_backend(shop, enqueued[0].return_value)
            tasks.breaks_its_transaction.enqueue()
            wait_until(lambda: pq.count_dead_letters() == 1, PATIENCE, "a job has met the broken connection")
            after = tasks.note.enqueue("after")
            wait_until(lambda: results(after)[0].is_finished, PATIENCE, "the job after it")
            assert after.status == "SUCCESSFUL"
        assert open_connections(shop) == 1, "that of this thread: those of the worker's have ended with it"


def test_a_healthy_connection_is_asked_for_where_the_settings_say_so(pq: pgqueue.PgQueue, shop: str) -> None:
    with settings_of_the_connection(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True), running(pq, concurrency=1, poll=0.1):
        first = tasks.note.enqueue("first")
        wait_until(lambda: results(first)[0].is_finished, PATIENCE, "the first job")
        end_backend(shop, first.return_value)
        second = tasks.note.enqueue("second")
        wait_until(lambda: results(second)[0].is_finished, PATIENCE, "the second job")
        assert second.status == "SUCCESSFUL"


@pytest.mark.skipif(django.VERSION < (5, 1), reason="there is no pool in this Django")
def test_the_pool_of_django_is_shared_by_the_threads_and_nothing_stays_taken(pq: pgqueue.PgQueue, shop: str) -> None:
    with settings_of_the_connection(OPTIONS={"pool": {"min_size": 1, "max_size": 3, "timeout": 30}}):
        enqueued = [one.enqueue(str(number)) for number in range(10) for one in (tasks.note, tasks.note_async)]
        connections.close_all()
        with running(pq, concurrency=4, poll=0.1):
            wait_until(lambda: execute(shop, "SELECT count(*) FROM pgqueue.job") == [(0,)], PATIENCE, "all jobs")
            assert open_connections(shop) <= 3
        assert {result.status for result in results(*enqueued)} == {"SUCCESSFUL"}


@pytest.mark.parametrize("how", ["autocommit", "atomic", "begin"])
def test_a_transaction_that_a_job_left_open_is_rolled_back_and_the_attempt_has_failed(
    how: str, pq: pgqueue.PgQueue
) -> None:
    with settings_of_the_connection(CONN_MAX_AGE=600):
        left, after = tasks.leaves_a_transaction.enqueue(how), tasks.note.enqueue("after")
        work(pq, concurrency=1)
        results(left, after)
        assert left.status == "FAILED"
        assert "left a transaction open on default" in left.errors[0].traceback
        assert after.status == "SUCCESSFUL"
        assert [note.text for note in Note.objects.all()] == ["after"]


def test_a_transaction_that_failed_is_not_carried_over(pq: pgqueue.PgQueue) -> None:
    with settings_of_the_connection(CONN_MAX_AGE=600):
        broken, after = tasks.breaks_its_transaction.enqueue(), tasks.note.enqueue("after")
        work(pq, concurrency=1)
        assert [result.status for result in results(broken, after)] == ["FAILED", "SUCCESSFUL"]
        assert broken.errors[0].exception_class is django.db.IntegrityError
        assert Order.objects.count() == 0


def test_each_job_of_the_event_loop_has_a_thread_of_its_own_for_the_orm(pq: pgqueue.PgQueue) -> None:
    """Otherwise one job that is slow there would hold up all the others."""
    together = threading.Barrier(3)

    @pq.task(queue="default", name="together")
    async def meet(number: int) -> None:
        from asgiref.sync import sync_to_async

        def in_the_thread() -> None:
            with transaction.atomic():
                Note.objects.create(text=str(number))
                together.wait(PATIENCE)

        await sync_to_async(in_the_thread)()

    for number in range(3):
        meet.enqueue(number)
    work(pq, concurrency=3)
    assert Note.objects.count() == 3


def test_a_coroutine_whose_thread_hangs_is_cancelled_at_its_timeout(pq: pgqueue.PgQueue) -> None:
    release = threading.Event()

    @pq.task(queue="default", name="hangs", timeout=0.2, max_attempts=1)
    async def hang() -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(release.wait)(PATIENCE)

    try:
        hang.enqueue()
        after = tasks.only_waits.enqueue(0)
        work(pq)
        assert pq.count_dead_letters(task="hangs") == 1
        assert results(after)[0].return_value == "pgqueue-event-loop"
    finally:
        release.set()


def test_a_transaction_left_open_in_the_thread_of_a_coroutine_fails_it(pq: pgqueue.PgQueue) -> None:
    @pq.task(queue="default", name="left", max_attempts=1)
    async def left() -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(transaction.set_autocommit)(False)
        await Note.objects.acreate(text="never there")

    left.enqueue()
    work(pq)
    [letter] = pq.dead_letters(task="left")
    assert "left a transaction open on default" in letter.reason
    assert Note.objects.count() == 0


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_connections_are_looked_after_around_a_batch_too(colour: str, pq: pgqueue.PgQueue) -> None:
    def leave(jobs: pgqueue.Batch) -> None:
        Note.objects.create(text="there")
        transaction.set_autocommit(False)
        Note.objects.create(text="never there")

    async def leave_async(jobs: pgqueue.Batch) -> None:
        from asgiref.sync import sync_to_async

        await sync_to_async(leave)(jobs)

    decorator: Any = pq.task(queue="default", name="left", batch=10, max_attempts=1)
    task = decorator(leave if colour == "plain" else leave_async)
    with settings_of_the_connection(CONN_MAX_AGE=600):
        for _ in range(3):
            task.enqueue()
        after = tasks.note.enqueue("after")
        work(pq, concurrency=1)
        assert [results(after)[0].status, pq.count_dead_letters(task="left")] == ["SUCCESSFUL", 3]
        assert {"left a transaction open on default" in letter.reason for letter in pq.dead_letters()} == {True}
        # What was committed by itself stays, each time that the batch is called.
        assert {note.text for note in Note.objects.all()} == {"after", "there"}


def test_a_job_in_a_child_process_has_its_own_connections_and_the_tasks_of_the_project(
    pq: pgqueue.PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOP_DATABASE", raising=False)  # a child reads the settings anew: they lead nowhere
    enqueued = [tasks.in_a_child.enqueue(str(number)) for number in range(2)]
    work(pq, concurrency=1)
    first, second = results(*enqueued)
    assert (first.status, first.errors) == ("SUCCESSFUL", [])
    assert first.return_value == second.return_value != threading.get_native_id()
    assert sorted(note.text for note in Note.objects.all()) == ["0", "1"]


def test_a_block_around_the_jobs_is_left_alone(pq: pgqueue.PgQueue, shop: str) -> None:
    """That of a test that runs jobs in its own thread and transaction."""
    with transaction.atomic():
        Note.objects.create(text="in the block")
        outer = hygiene.open_blocks()
        assert outer == frozenset({"default"})
        hygiene.refresh(outer)
        assert hygiene.left_open(outer) == []
        hygiene.tidy(outer)
        assert Note.objects.count() == 1
        transaction.set_rollback(True)
    assert Note.objects.count() == 0


def test_the_queries_of_earlier_jobs_are_forgotten_under_debug(pq: pgqueue.PgQueue) -> None:
    connection.force_debug_cursor = True
    try:
        Note.objects.create(text="logged")
        assert connection.queries_log
        hygiene.refresh()
        assert not connection.queries_log
    finally:
        connection.force_debug_cursor = False


def test_a_connection_that_cannot_be_closed_is_given_up(pq: pgqueue.PgQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    Note.objects.create(text="x")
    broken = connections["default"]

    def refuse() -> None:
        raise psycopg.OperationalError("it hangs")

    monkeypatch.setattr(broken, "close_if_unusable_or_obsolete", refuse)
    hygiene.tidy()
    assert connections["default"] is not broken
    broken.connection.close()
    assert Note.objects.count() == 1

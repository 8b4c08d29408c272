"""Enqueue is part of the application's transaction, on the application's own connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import django
import psycopg
import pytest
from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import OperationalError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import AsyncClient, Client, override_settings

import pgqueue
from pgqueue.contrib.django import queue
from tests.conftest import execute, url_of
from tests.contrib.django.conftest import close_pool, connected, other_is, work
from tests.contrib.django.settings import BACKEND, TASKS
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.models import Order

Jobs = Callable[[], list[str]]


@pytest.fixture
def jobs(admin: psycopg.Connection[Any]) -> Jobs:
    """The arguments of all jobs, as another session sees them."""
    return lambda: [args for (args,) in admin.execute("SELECT args::text FROM pgqueue.job ORDER BY id").fetchall()]


class ToPrimary:
    """A router that reads from a replica and writes to the other database."""

    def db_for_read(self, model: Any, **_: Any) -> str:
        return "default"

    def db_for_write(self, model: Any, **_: Any) -> str:
        return "other"

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool:
        return db == "other"


def test_a_job_appears_with_the_commit_of_an_atomic_block(jobs: Jobs) -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
        result = tasks.send_receipt.enqueue(1)
        assert jobs() == []
        assert tasks.send_receipt.get_result(result.id).status == "READY"  # inside, it is seen
    assert jobs() == ["[1]"]


def test_a_job_of_a_rolled_back_block_never_existed(jobs: Jobs) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        tasks.send_receipt.enqueue(1)
        raise ZeroDivisionError
    assert jobs() == []
    assert tasks.send_receipt.enqueue(2).id


def test_a_savepoint_that_is_rolled_back_takes_its_jobs_along_and_no_others(jobs: Jobs) -> None:
    with transaction.atomic():
        tasks.send_receipt.enqueue(1)
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            tasks.send_receipt.enqueue(2)
            raise ZeroDivisionError
        with transaction.atomic():
            tasks.send_receipt.enqueue(3)
    assert jobs() == ["[1]", "[3]"]


def test_outside_of_a_block_a_job_is_there_at_once(jobs: Jobs) -> None:
    tasks.send_receipt.enqueue(1)
    assert jobs() == ["[1]"]


def test_a_refused_enqueue_leaves_the_block_usable(jobs: Jobs) -> None:
    with transaction.atomic():
        for wrong in (float("nan"), "\0", 2**70):
            with pytest.raises(pgqueue.PayloadError):
                tasks.send_receipt.enqueue(wrong)
        with pytest.raises(pgqueue.ArgumentsDoNotBind):
            tasks.send_receipt.enqueue()
        Order.objects.create(number=1)
        tasks.send_receipt.enqueue(1)
    assert jobs() == ["[1]"]
    assert Order.objects.count() == 1


def test_a_block_that_is_to_be_rolled_back_takes_no_more_jobs(jobs: Jobs) -> None:
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic(savepoint=False):
            raise ZeroDivisionError
        with pytest.raises(TransactionManagementError):
            tasks.send_receipt.enqueue(1)
    assert jobs() == []


def test_on_commit_enqueues_after_the_commit(jobs: Jobs) -> None:
    with transaction.atomic():
        transaction.on_commit(partial(tasks.send_receipt.enqueue, 1))
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            transaction.on_commit(partial(tasks.send_receipt.enqueue, 2))
            raise ZeroDivisionError
        assert jobs() == []
    assert jobs() == ["[1]"]


def test_a_request_that_fails_leaves_neither_order_nor_job(jobs: Jobs) -> None:
    connections.settings["default"]["ATOMIC_REQUESTS"] = True
    try:
        client = Client(raise_request_exception=False)
        assert client.get("/broken/1/").status_code == 500
        assert jobs() == []
        assert client.get("/order/2/").status_code == 200
    finally:
        connections.settings["default"]["ATOMIC_REQUESTS"] = False
    assert jobs() == ["[2]"]
    assert [order.number for order in Order.objects.all()] == [2]


async def test_an_asynchronous_request_enqueues_in_its_own_thread(shop: str, jobs: Jobs) -> None:
    response = await AsyncClient().get("/order/3/")
    assert response.status_code == 200
    assert jobs() == ["[3]"]


async def test_in_an_event_loop_the_synchronous_enqueue_is_refused_as_the_orm_is(
    shop: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DJANGO_ALLOW_ASYNC_UNSAFE", raising=False)
    with pytest.raises(SynchronousOnlyOperation):
        tasks.send_receipt.enqueue(1)
    await tasks.send_receipt.aenqueue(2)
    await asyncio.gather(*(tasks.send_receipt.aenqueue(number) for number in (3, 4)))
    assert sorted(jobs()) == ["[2]", "[3]", "[4]"]


def test_bulk_and_the_calls_of_operators_run_in_the_block_too(pq: pgqueue.PgQueue, jobs: Jobs) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        ids = tasks.send_receipt.pgqueue_task.enqueue_many([(number,) for number in range(6_000)])
        assert pq.cancel(ids[:2]) == {ids[0]: "cancelled", ids[1]: "cancelled"}
        assert [job.id for job in pq.claim("mail", limit=2)] == ids[2:4]
        raise ZeroDivisionError
    assert jobs() == []
    # In autocommit all of it or nothing.
    with pytest.raises(pgqueue.PayloadError):
        tasks.send_receipt.pgqueue_task.enqueue_many([(number,) for number in range(6_000)] + [(float("nan"),)])
    assert jobs() == []


def test_a_claim_in_the_block_is_undone_by_its_rollback(pq: pgqueue.PgQueue, jobs: Jobs) -> None:
    result = tasks.send_receipt.enqueue(1)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        [job] = pq.claim("mail")
        pq.complete(job)
        raise ZeroDivisionError
    [job] = pq.claim("mail")
    assert (str(job.id), job.attempt) == (result.id, 1)
    pq.complete(job)
    assert jobs() == []


def test_errors_of_the_database_are_those_of_django(server_url: str, shop: str) -> None:
    with connected(default=url_of(server_url, "no_such_database")), pytest.raises(OperationalError):
        tasks.send_receipt.enqueue(1)
    # And a connection that breaks is replaced, as for the ORM.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        execute(shop, "SELECT pg_terminate_backend(%s)", cursor.fetchone()[0])
    with pytest.raises(OperationalError):
        tasks.send_receipt.enqueue(1)
    assert connection.errors_occurred
    connection.close_if_unusable_or_obsolete()
    tasks.send_receipt.enqueue(1)


def test_a_missing_schema_is_one_sentence_with_the_command_of_django(empty_database: str) -> None:
    with connected(default=empty_database), pytest.raises(pgqueue.SchemaError, match=r"run `manage.py migrate`"):
        tasks.send_receipt.enqueue(1)


def test_a_database_that_is_not_postgresql_is_refused_in_one_sentence(shop: str) -> None:
    elsewhere = {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": "other"}}
    refused = pytest.raises(ImproperlyConfigured, match="database 'other' is SQLite: pgqueue needs PostgreSQL")
    with (
        other_is(ENGINE="django.db.backends.sqlite3", NAME=":memory:"),
        override_settings(TASKS={"default": elsewhere}),
        refused,
    ):
        tasks.noop.enqueue()


def test_jobs_go_where_the_routers_write_and_results_are_read_there(shop: str, empty_database: str) -> None:
    """ "default" stands for the replica: it has the schema as well, and must stay empty."""
    pgqueue_tables = pgqueue.PgQueue(empty_database)
    from pgqueue import migrate

    migrate.upgrade(empty_database)
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.ToPrimary"]), connected(other=empty_database):
        with transaction.atomic(using="other"):
            result = tasks.meaning_of_life.enqueue()
            assert pgqueue_tables.status() == []
        assert queue().database == "other"
        work(queue())
        result.refresh()
        assert result.return_value == 42
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT (SELECT count(*) FROM pgqueue.archive) + (SELECT count(*) FROM pgqueue.job)")
        assert cursor.fetchone() == (0,)
    pgqueue_tables.close()


def test_a_backend_may_name_its_database_and_schema(shop: str, empty_database: str) -> None:
    from pgqueue import migrate

    migrate.upgrade(empty_database, schema="jobs")
    chosen = {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": "other", "schema": "jobs"}}
    with override_settings(TASKS={**TASKS, "other": chosen}), connected(other=empty_database):
        with pytest.raises(ZeroDivisionError), transaction.atomic(using="other"):
            tasks.meaning_of_life.using(backend="other").enqueue()
            raise ZeroDivisionError
        with transaction.atomic(using="default"):  # another database: its transaction is none of this one's
            result = tasks.meaning_of_life.using(backend="other").enqueue()
            assert execute(empty_database, "SELECT id::text FROM jobs.job") == [(result.id,)]
        work(queue("other"))
        result.refresh()
        assert result.return_value == 42


def test_a_handler_commits_its_writes_and_its_completion_together(pq: pgqueue.PgQueue) -> None:
    @pq.task(queue="default", name="together")
    def together(number: int) -> None:
        with transaction.atomic(), pgqueue.current_job().transaction(using=connection):
            Order.objects.create(number=number)
            tasks.send_receipt.enqueue(number)

    together.enqueue(5)
    work(pq)
    assert [(order.number, order.receipts) for order in Order.objects.all()] == [(5, 1)]


@pytest.mark.skipif(django.VERSION < (5, 1), reason="there is no pool in this Django")
def test_enqueue_takes_its_turn_in_the_pool_of_django(shop: str, jobs: Jobs) -> None:
    connections.settings["default"]["OPTIONS"] = {"pool": {"min_size": 1, "max_size": 1}}
    try:
        with transaction.atomic():
            tasks.send_receipt.enqueue(1)
        connections.close_all()
        tasks.send_receipt.enqueue(2)
    finally:
        connections["default"].close()
        close_pool(connections["default"])
        connections.settings["default"]["OPTIONS"] = {}
    assert jobs() == ["[1]", "[2]"]

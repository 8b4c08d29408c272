"""Large bulks go out as a stream of statements: over every kind of connection, and with a failure at any place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.callers import OPENERS, open_caller
from tests.workers import count

SIZE = 100_500
"""More chunks than are on their way at once."""
BAD = 52_000

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the database during app initialization")


def make_task(queue: Any) -> Any:
    def work(number: int) -> None: ...

    return queue.task(name="work", queue="q")(work)


@pytest.fixture
def refusing(admin: psycopg.Connection[Any]) -> None:
    """A server that refuses one row in the middle."""
    admin.execute(f"ALTER TABLE pgqueue.job ADD CONSTRAINT refused CHECK (args::text <> '[{BAD}]')".encode())


@pytest.mark.parametrize("kind", list(OPENERS))
async def test_a_large_bulk_arrives_whole_and_in_order_with_the_callers_commit(
    kind: str, database: str, admin: psycopg.Connection[Any]
) -> None:
    async with open_caller(kind, database) as caller:
        ids = await caller.call(make_task(caller.queue).enqueue_many, [(number,) for number in range(SIZE)])
        assert count(admin, "job") == 0
        await caller.commit()
    rows = admin.execute("SELECT id, (args->>0)::int FROM pgqueue.job ORDER BY id").fetchall()
    assert rows == list(zip(ids, range(SIZE), strict=True))


def test_a_row_that_the_server_refuses_leaves_nothing_of_a_large_bulk(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], refusing: None
) -> None:
    task = make_task(pq)
    with pytest.raises(psycopg.errors.CheckViolation):
        task.enqueue_many((number,) for number in range(SIZE))
    assert count(admin, "job") == 0
    task.enqueue(1)
    assert count(admin, "job") == 1


async def test_the_same_holds_for_an_async_queue(database: str, admin: psycopg.Connection[Any], refusing: None) -> None:
    async with pgqueue.AsyncPgQueue(database) as queue:
        task = make_task(queue)
        with pytest.raises(psycopg.errors.CheckViolation):
            await task.enqueue_many((number,) for number in range(SIZE))
        assert count(admin, "job") == 0
        await task.enqueue(1)
    assert count(admin, "job") == 1


def test_a_savepoint_of_the_caller_survives_a_refused_bulk(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], refusing: None
) -> None:
    task = make_task(pq)
    with psycopg.connect(database) as caller:
        task.enqueue(1, using=caller)
        with pytest.raises(psycopg.errors.CheckViolation), caller.transaction():
            task.enqueue_many(((number,) for number in range(SIZE)), using=caller)
        task.enqueue(2, using=caller)
    assert count(admin, "job") == 2


def test_a_source_that_breaks_off_leaves_nothing_and_a_usable_connection(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    task = make_task(pq)

    def source() -> Iterator[tuple[int]]:
        for number in range(BAD):
            yield (number,)
        raise LookupError("the source broke off")

    with pytest.raises(LookupError):
        task.enqueue_many(source())
    assert count(admin, "job") == 0
    with psycopg.connect(database) as caller:
        with pytest.raises(LookupError), caller.transaction():
            task.enqueue_many(source(), using=caller)
        task.enqueue(1, using=caller)
    assert count(admin, "job") == 1


def test_a_caller_who_is_in_a_pipeline_may_enqueue(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    task = make_task(pq)
    with psycopg.connect(database) as caller, caller.pipeline():
        caller.execute("CREATE TABLE photograph (id int)")
        one = task.enqueue(1, using=caller)
        many = task.enqueue_many(((number,) for number in range(SIZE)), using=caller)
        caller.execute("INSERT INTO photograph VALUES (7)")
    assert count(admin, "job") == SIZE + 1
    assert many[0] == one + 1
    assert admin.execute("SELECT id FROM photograph").fetchall() == [(7,)]


def test_a_source_may_use_the_connection_that_the_bulk_goes_through(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    task = make_task(pq)
    with psycopg.connect(database) as caller:
        rows = caller.cursor()

        def source() -> Iterator[tuple[int]]:
            for start in range(0, SIZE, 1000):
                rows.execute("SELECT generate_series(%s::int, %s::int)", (start, start + 999))
                yield from rows.fetchall()

        task.enqueue_many(source(), using=caller)
    assert count(admin, "job") == (SIZE // 1000 + 1) * 1000

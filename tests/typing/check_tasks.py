"""Read by mypy --strict, never run. An ignore that is not needed fails the check, so every one of them shows an error."""

from collections.abc import Sequence
from typing import assert_type

import psycopg

import pgqueue

pq = pgqueue.PgQueue()
apq = pgqueue.AsyncPgQueue()


@pq.task
def plain(number: int, *, note: str = "") -> str:
    return note * number


@pq.task(queue="q", retry=pgqueue.Fixed(3))
async def coroutine(name: str) -> int:
    return len(name)


@apq.task
def other(number: int) -> None: ...


@pq.schedule("0 3 * * *", tz="Europe/Berlin")
@pq.task
def nightly(days: int = 1) -> None: ...


def reading(sensor: int, value: float = 0.0) -> None: ...


@pq.task(queue="q", batch=100, batch_wait=0.5, payload=reading)
def store(jobs: pgqueue.Batch) -> list[int]:
    return [job.id for job in jobs]


@pq.task(batch=10)
async def gather(jobs: Sequence[pgqueue.BatchJob]) -> None: ...


@apq.task(batch=10, payload=reading)
async def gather_async(jobs: pgqueue.Batch) -> None: ...


async def check(connection: psycopg.Connection) -> None:
    assert_type(plain(1, note="x"), str)
    assert_type(plain.enqueue(1, note="x"), int)
    assert_type(plain.enqueue(1, using=connection), int)
    assert_type(plain.enqueue_many([(1,), (2,)]), list[int])
    assert_type(plain.options(delay=5).enqueue(2), int)
    assert_type(plain.options(using=connection).enqueue(2, note="x"), int)
    assert_type(await coroutine("x"), int)
    assert_type(coroutine.enqueue("x"), int)
    assert_type(await other.enqueue(1), int)
    assert_type(pq.claim("q"), list[pgqueue.Job])
    assert_type(pgqueue.current_job().token, int)
    assert_type(nightly.enqueue(days=2), int)
    assert_type(pq.run_schedule("nightly"), int | None)
    assert_type(await apq.schedules(), list[pgqueue.Schedule])

    assert_type(store(pgqueue.Batch.of([(1, 2.0)])), list[int])
    assert_type(store.enqueue(1, value=2.0), int)
    assert_type(store.options(delay=5).enqueue(1), int)
    assert_type(gather.enqueue(1, "anything", more=2), int)
    assert_type(await gather_async.enqueue(1), int)
    store.enqueue("one")  # type: ignore[call-overload]
    await gather_async.enqueue("one")  # type: ignore[call-overload]
    store("one")  # type: ignore[arg-type]

    nightly.enqueue("one")  # type: ignore[call-overload]
    plain.enqueue("one")  # type: ignore[call-overload]
    plain.enqueue(1, nota="x")  # type: ignore[call-overload]
    plain.enqueue()  # type: ignore[call-overload]
    coroutine.enqueue(5)  # type: ignore[call-overload]
    plain.options(using=connection).enqueue("one")  # type: ignore[call-overload]
    plain.options(using=connection).enqueue()  # type: ignore[call-overload]
    await other.options(delay=5).enqueue("one")  # type: ignore[call-overload]
    plain("one")  # type: ignore[arg-type]

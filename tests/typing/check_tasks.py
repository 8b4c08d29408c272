"""Read by mypy --strict, never run. An ignore that is not needed fails the check, so every one of them shows an error."""

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


async def check(connection: psycopg.Connection) -> None:
    assert_type(plain(1, note="x"), str)
    assert_type(plain.enqueue(1, note="x"), int)
    assert_type(plain.enqueue(1, using=connection), int)
    assert_type(plain.enqueue_many([(1,), (2,)]), list[int])
    assert_type(plain.options(delay=5).enqueue(2), int)
    assert_type(await coroutine("x"), int)
    assert_type(coroutine.enqueue("x"), int)
    assert_type(await other.enqueue(1), int)
    assert_type(pq.claim("q"), list[pgqueue.Job])
    assert_type(pgqueue.current_job().token, int)
    assert_type(nightly.enqueue(days=2), int)
    assert_type(pq.run_schedule("nightly"), int | None)
    assert_type(await apq.schedules(), list[pgqueue.Schedule])

    nightly.enqueue("one")  # type: ignore[call-overload]
    plain.enqueue("one")  # type: ignore[call-overload]
    plain.enqueue(1, nota="x")  # type: ignore[call-overload]
    plain.enqueue()  # type: ignore[call-overload]
    coroutine.enqueue(5)  # type: ignore[call-overload]
    plain("one")  # type: ignore[arg-type]

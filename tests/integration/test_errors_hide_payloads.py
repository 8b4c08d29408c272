"""A constraint of the host refuses a row, and PostgreSQL repeats the whole row in its DETAIL: our errors do not."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgqueue

SECRET = "hunter2-9f3a"
Admin = psycopg.Connection[Any]


def whole_text(error: BaseException) -> str:
    return "".join([str(error), repr(error), repr(error.args), *traceback.format_exception(error)])


def shows_nothing(call: Callable[[], Any]) -> None:
    with pytest.raises(psycopg.errors.CheckViolation) as caught:
        call()
    assert str(caught.value).endswith('violates check constraint "guarded"')
    assert caught.value.sqlstate == "23514"
    assert SECRET not in whole_text(caught.value)


@pytest.fixture
def guarded(admin: Admin) -> None:
    admin.execute("ALTER TABLE pgqueue.job ADD CONSTRAINT guarded CHECK (queue <> 'guarded')")
    admin.execute("ALTER TABLE pgqueue.dead_letter ADD CONSTRAINT guarded CHECK (queue <> 'q')")


@pytest.mark.parametrize("number", [2, 12_000])
def test_a_refused_enqueue_does_not_repeat_its_row(
    pq: pgqueue.PgQueue, database: str, guarded: None, number: int
) -> None:
    @pq.task(queue="guarded", headers={"token": SECRET})
    def task(secret: str) -> None: ...

    shows_nothing(lambda: task.enqueue(SECRET))
    shows_nothing(lambda: task.enqueue_many([(SECRET,)] * number))
    with psycopg.connect(database) as mine:
        shows_nothing(lambda: task.enqueue(SECRET, using=mine))
        mine.rollback()
        shows_nothing(lambda: task.enqueue_many([(SECRET,)] * number, using=mine))


async def test_a_refused_async_enqueue_does_not_repeat_its_row(database: str, guarded: None) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        for number in (1, 12_000):

            @pq.task(name=f"task{number}", queue="guarded")
            async def task(secret: str) -> None: ...

            with pytest.raises(psycopg.errors.CheckViolation) as caught:
                await task.enqueue_many([(SECRET,)] * number)
            assert SECRET not in whole_text(caught.value)


def test_a_refused_settle_does_not_repeat_its_row(pq: pgqueue.PgQueue, guarded: None) -> None:
    pq.enqueue("t", [SECRET], queue="q", headers={"token": SECRET})
    [job] = pq.claim("q")
    shows_nothing(lambda: pq.fail(job, pgqueue.DeadLetter(SECRET)))


def test_the_context_of_a_trigger_is_left_out_too(pq: pgqueue.PgQueue, admin: Admin) -> None:
    admin.execute("""
        CREATE FUNCTION complain() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'not today' USING DETAIL = NEW.args::text, HINT = NEW.args::text; END $$
    """)
    admin.execute("CREATE TRIGGER complain BEFORE INSERT ON pgqueue.job FOR EACH ROW EXECUTE FUNCTION complain()")
    with pytest.raises(psycopg.errors.RaiseException, match=r"\Anot today\Z") as caught:
        pq.enqueue("t", [SECRET], queue="q")
    assert SECRET not in whole_text(caught.value)


def test_no_setting_is_shown_with_its_password() -> None:
    with pgqueue.PgQueue(f"postgresql://me:{SECRET}@host/x", listen_url=f"postgresql://me:{SECRET}@host/y") as pq:
        assert SECRET not in repr(pq.settings)
        assert SECRET not in str(pq.settings)

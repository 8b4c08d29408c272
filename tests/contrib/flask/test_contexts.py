"""An application context around every job: in the thread that runs it, and gone after it, however it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import flask
import psycopg
import pytest
from sqlalchemy import text

import pgqueue
from tests.conftest import _fresh
from tests.contrib.flask.shop import Shop, closing
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]


class Teardowns:
    """What an application was told at the end of its contexts."""

    def __init__(self, app: flask.Flask) -> None:
        self.seen: list[tuple[str, int, str | None]] = []
        app.teardown_appcontext(self._note)

    def _note(self, error: BaseException | None) -> None:
        if "job" in flask.g:
            self.seen.append((flask.g.job, threading.get_ident(), None if error is None else type(error).__name__))


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_each_job_has_a_context_of_its_own_that_is_torn_down_in_its_thread_after_success_and_error(
    colour: str, database: str, admin: Admin
) -> None:
    shop = Shop()
    app = shop.app(database)
    teardowns = Teardowns(app)
    ran: list[tuple[str, int]] = []
    stale: list[str] = []

    def body(name: str, fails: bool) -> None:
        stale.extend(flask.g)
        flask.g.job = name
        ran.append((flask.current_app.name + name, threading.get_ident()))
        if fails:
            raise KeyError(name)

    task: Any = define(shop.pq, colour, body, max_attempts=1)
    with closing(app):
        for number in range(6):
            task.enqueue(f"{number}", number % 2 == 1)
        with running(shop.pq, concurrency=2):
            wait_for_count(admin, 3, "archive", "state = 'completed'")
            wait_for_count(admin, 3, "dead_letter", "reason LIKE 'KeyError%'")
    assert stale == [], "something of another job was in g"
    errors = {f"{number}": "KeyError" if number % 2 else None for number in range(6)}
    assert {name: error for name, _, error in teardowns.seen} == errors
    assert sorted((f"shop{name}", thread) for name, thread, _ in teardowns.seen) == sorted(ran)
    assert not flask.has_app_context()


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_call_of_a_batch_handler_has_one_context_and_one_session(colour: str, database: str, admin: Admin) -> None:
    shop = Shop()
    app = shop.app(database)
    teardowns = Teardowns(app)

    def body(jobs: pgqueue.Batch) -> None:
        assert list(flask.g) == []
        flask.g.job = ",".join(str(job.args[0]) for job in jobs)
        shop.db.session.add_all([shop.Order(note=flask.current_app.name + job.args[0]) for job in jobs])
        shop.db.session.commit()
        if "b" in flask.g.job:
            raise KeyError(flask.g.job)

    task: Any = define(shop.pq, colour, body, max_attempts=1, batch=3)
    with closing(app):
        task.enqueue_many([("1",), ("2",), ("3",), ("a",), ("b",), ("c",)])
        with running(shop.pq, concurrency=1):
            wait_for_count(admin, 3, "archive", "state = 'completed'")
            wait_for_count(admin, 3, "dead_letter", "reason LIKE 'KeyError%'")
        assert shop.orders(app) == [f"shop{name}" for name in "123abc"]
    assert [(name, error) for name, _, error in teardowns.seen] == [("1,2,3", None), ("a,b,c", "KeyError")]


def test_a_timeout_of_a_coroutine_ends_its_context_and_one_of_a_function_does_when_that_ends(
    database: str, admin: Admin
) -> None:
    shop = Shop()
    app = shop.app(database)
    teardowns = Teardowns(app)
    gate = threading.Event()

    @shop.pq.task(name="slow", queue="q", timeout=0.1, max_attempts=1)
    async def slow() -> None:
        flask.g.job = "slow"
        await asyncio.sleep(600)

    @shop.pq.task(name="stuck", queue="q", timeout=0.1)
    def stuck() -> None:
        flask.g.job = "stuck"
        gate.wait(PATIENCE)
        flask.g.still_mine = True

    @shop.pq.task(name="quick", queue="q")
    def quick() -> None:
        assert list(flask.g) == []
        flask.g.job = "quick"

    with closing(app), running(shop.pq, concurrency=1) as worker:
        slow.enqueue()
        wait_for_count(admin, 1, "dead_letter", "reason LIKE 'TimeoutError%'")
        stuck.enqueue()
        worker.wait_for(pgqueue.EventName.JOB_OVERDUE)
        quick.enqueue()
        wait_for_count(admin, 1, "archive", "task = 'quick'")
        assert [(name, error) for name, _, error in teardowns.seen] == [("slow", "CancelledError"), ("quick", None)]
        gate.set()
        wait_for_count(admin, 1, "archive", "task = 'stuck'")
    assert [name for name, _, _ in teardowns.seen] == ["slow", "quick", "stuck"]


def test_the_session_of_a_job_is_removed_after_it_and_a_broken_transaction_is_carried_to_nobody(
    database: str, admin: Admin
) -> None:
    shop = Shop()
    app = shop.app(database, SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0, "pool_timeout": 5})
    sessions: list[Any] = []

    @shop.pq.task(queue="q", max_attempts=1)
    def buy(note: str, how: str) -> None:
        session = shop.db.session()
        assert not session.new
        assert not session.in_transaction()
        sessions.append(session)
        session.add(shop.Order(note=note))
        if how == "breaks":
            session.flush()
            session.execute(text("SELECT 1 / 0"))
        if how == "forgets":
            session.flush()
            return
        session.commit()

    with closing(app):
        for number, how in enumerate(["breaks", "forgets", "commits"] * 3):
            buy.enqueue(f"{number}", how)
        with running(shop.pq, concurrency=2):
            wait_for_count(admin, 3, "dead_letter", "reason LIKE '%DivisionByZero%'")
            wait_for_count(admin, 6, "archive", "state = 'completed'")
        assert sorted(shop.orders(app)) == ["2", "5", "8"]  # two at a time
        with app.app_context():
            assert shop.db.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert len({id(session) for session in sessions}) == 9


def test_a_job_completes_itself_in_the_transaction_of_the_session(database: str, admin: Admin) -> None:
    shop = Shop()
    app = shop.app(database)

    @shop.pq.task(name="follow", queue="later")
    def follow(note: str) -> None: ...

    @shop.pq.task(name="buy", queue="q")
    def buy(note: str) -> None:
        with pgqueue.current_job().transaction(using=shop.db.session):
            shop.db.session.add(shop.Order(note=note))
            follow.enqueue(note, using=shop.db.session)
        shop.db.session.commit()
        raise ValueError("after the commit this changes nothing")

    with closing(app):
        buy.enqueue("once")
        with running(shop.pq, queues=("q",)):
            wait_for_count(admin, 1, "archive", "task = 'buy' AND state = 'completed'")
        assert shop.orders(app) == ["once"]
        assert count(admin, "job", "task = 'follow'") == 1


@pytest.fixture
def second_database(server_url: str, template: str) -> Iterator[str]:
    yield from _fresh(server_url, template)


def test_workers_of_two_applications_in_one_process_run_each_job_in_the_context_of_its_own(
    database: str, second_database: str
) -> None:
    shop = Shop()
    one, two = shop.app(database, "one"), shop.app(second_database, "two")
    seen: list[tuple[str, str]] = []

    @shop.pq.task(name="note", queue="q")
    def note(text: str, again: bool) -> None:
        shop.db.session.add(shop.Order(note=text))
        shop.db.session.commit()
        if again:
            note.enqueue(f"{text} again", False)
        seen.append((text, flask.current_app.name))

    with closing(one, two), running(shop.pq.for_app(one)), running(shop.pq.for_app(two)):
        for app in (one, two):
            with app.app_context():
                note.enqueue(app.name, True)
        wait_until(lambda: len(seen) == 4, PATIENCE, "both jobs and what they enqueued have run")
        assert sorted(seen) == [("one", "one"), ("one again", "one"), ("two", "two"), ("two again", "two")]
        assert shop.orders(one) == ["one", "one again"]
        assert shop.orders(two) == ["two", "two again"]

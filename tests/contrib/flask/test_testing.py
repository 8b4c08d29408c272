"""pgqueue.testing on a Flask queue: only the application that was meant is touched."""

from __future__ import annotations

from collections.abc import Iterator

import flask
import psycopg
import pytest

from pgqueue.contrib.flask import PgQueue
from pgqueue.testing import bound, enqueued_jobs, inline
from tests.conftest import _fresh

NOWHERE = "postgresql://nobody@/nothing?host=/nowhere"


@pytest.fixture
def second_database(server_url: str, template: str) -> Iterator[str]:
    yield from _fresh(server_url, template)


def application(pq: PgQueue, name: str, url: str) -> flask.Flask:
    app = flask.Flask(name)
    app.config["PGQUEUE_DATABASE_URL"] = url
    pq.init_app(app)
    return app


def test_inline_in_one_application_leaves_the_others_as_they_are(database: str) -> None:
    pq = PgQueue()
    one, two = application(pq, "one", NOWHERE), application(pq, "two", database)
    seen: list[tuple[str, str]] = []

    @pq.task(queue="q")
    def work(text: str) -> None:
        seen.append((text, flask.current_app.name))

    with one.app_context(), inline(pq) as ran:
        work.enqueue("of one")
        pq.enqueue(work.name, ["of one again"])
        with two.app_context():
            work.enqueue("of two")
            assert [job.args for job in enqueued_jobs(pq)] == [["of two"]]
        pq.for_app(one).enqueue(work.name, ["by name"])
    assert seen == [("of one", "one"), ("of one again", "one"), ("by name", "one")]
    assert len(ran) == 3
    pq.for_app(two).close()


def test_bound_in_one_application_leaves_the_others_as_they_are(database: str, second_database: str) -> None:
    pq = PgQueue()
    one, two = application(pq, "one", database), application(pq, "two", second_database)

    @pq.task(queue="q")
    def work(text: str) -> None: ...

    with psycopg.connect(database) as connection, one.app_context():
        with bound(pq, connection):
            work.enqueue("of one")
            with two.app_context():
                work.enqueue("of two")
                assert [job.args for job in enqueued_jobs(pq)] == [["of two"]]
            assert [job.args for job in enqueued_jobs(pq)] == [["of one"]]
        connection.rollback()
        assert enqueued_jobs(pq) == []
    with psycopg.connect(second_database) as other:
        assert other.execute("SELECT args FROM pgqueue.job").fetchall() == [(["of two"],)]
    for app in (one, two):
        pq.for_app(app).close()

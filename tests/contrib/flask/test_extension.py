"""The extension: configuration, factories, several applications, blueprints, and enqueues in the session's transaction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flask
import psycopg
import pytest

import pgqueue
from pgqueue import migrate
from pgqueue.contrib.flask import PgQueue
from tests.contrib.flask.shop import Shop, closing
from tests.workers import running, wait_for_count

Admin = psycopg.Connection[Any]


def configured(pq: PgQueue | None = None, **config: Any) -> pgqueue.PgQueue:
    """The queue of an application with this configuration."""
    app = flask.Flask("configured")
    app.config.from_mapping(config)
    pq = pq or PgQueue()
    pq.init_app(app)
    return pq.for_app(app)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGQUEUE_DATABASE_URL", "PGQUEUE_SCHEMA", "PGQUEUE_POOL_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_settings_come_from_the_configuration_then_from_the_code_then_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGQUEUE_SCHEMA", "of_the_environment")
    monkeypatch.setenv("PGQUEUE_POOL_SIZE", "7")
    monkeypatch.setenv("PGQUEUE_DATABASE_URL", "postgresql:///of_the_environment")
    pq = PgQueue(schema="of_the_code", archive=False)
    config = {"PGQUEUE_SCHEMA": "of_the_config", "PGQUEUE_NOTIFY": "off", "PGQUEUE_ARCHIVE_DAYS": 3, "PGQUEUE_APP": "x"}
    settings = configured(pq, **config).settings
    assert (settings.schema, settings.archive, settings.pool_size) == ("of_the_config", False, 7)
    assert (settings.notify, settings.archive_days) == (False, 3)
    assert settings.database_url == "postgresql:///of_the_environment"
    assert configured(pq, PGQUEUE_SCHEMA=None, PGQUEUE_POOL_SIZE="").settings.schema == "of_the_code"


def test_without_a_url_of_its_own_the_queue_is_where_sqlalchemy_is() -> None:
    uri = "postgresql+psycopg://ada:p%40ss@db:5433/shop?sslmode=require"
    assert configured(SQLALCHEMY_DATABASE_URI=uri).settings.database_url == uri.replace("+psycopg", "")
    own = configured(SQLALCHEMY_DATABASE_URI=uri, PGQUEUE_DATABASE_URL="postgresql:///own")
    assert own.settings.database_url == "postgresql:///own"
    assert configured(SQLALCHEMY_DATABASE_URI="sqlite://").settings.database_url is None
    of_the_code = configured(PgQueue(database_url="postgresql:///code"), SQLALCHEMY_DATABASE_URI=uri)
    assert of_the_code.settings.database_url == "postgresql:///code"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("PGQUEUE_DATABSE_URL", "x", "did you mean PGQUEUE_DATABASE_URL?"),
        ("PGQUEUE_COLOUR", "x", "known are PGQUEUE_DATABASE_URL"),
        ("PGQUEUE_POOL_SIZE", "many", "PGQUEUE_POOL_SIZE must be a number"),
        ("PGQUEUE_POOL_SIZE", 0, "pool_size"),
        ("PGQUEUE_NOTIFY", "perhaps", "PGQUEUE_NOTIFY must be true or false"),
    ],
)
def test_a_wrong_configuration_is_refused_in_a_sentence(key: str, value: Any, said: str) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match=said.replace("?", r"\?")):
        configured(**{key: value})


def test_an_application_that_is_not_known_or_has_one_already_is_named() -> None:
    pq, known, stranger = PgQueue(), flask.Flask("known"), flask.Flask("stranger")
    with pytest.raises(pgqueue.ConfigurationError, match="has no Flask application yet"):
        pq.enqueue("anything")
    pq.init_app(known)
    with pytest.raises(pgqueue.ConfigurationError, match="'known' has a PgQueue already"):
        PgQueue().init_app(known)
    with (
        stranger.app_context(),
        pytest.raises(pgqueue.ConfigurationError, match="'stranger' does not know this PgQueue"),
    ):
        pq.enqueue("anything")
    pq.init_app(stranger)
    with pytest.raises(pgqueue.ConfigurationError, match="several Flask applications"):
        pq.enqueue("anything")


def test_the_only_application_needs_no_context(database: str, admin: Admin) -> None:
    app = flask.Flask("only")
    app.config["PGQUEUE_DATABASE_URL"] = database
    pq = PgQueue(app)

    @pq.task(queue="q")
    def work(number: int) -> None: ...

    job_id = work.enqueue(1)
    assert [job.id for job in pq.jobs()] == [job_id]
    [job] = pq.claim("q")
    pq.complete(job)
    assert pq.result(job_id) is not None
    pq.close()


def test_an_application_that_is_gone_is_not_counted() -> None:
    pq = PgQueue()

    def create_app(name: str) -> flask.Flask:
        app = flask.Flask(name)
        app.config.update(TESTING=True, PGQUEUE_SCHEMA=name)
        pq.init_app(app)
        return app

    for name in ("first", "second", "third"):  # as the fixture of a test run makes one after another
        app = create_app(name)
        assert pq.settings.schema == name
        assert pq.only_app() is app
        another = create_app("another")
        with pytest.raises(pgqueue.ConfigurationError, match="several Flask applications"):
            pq.enqueue("anything")
        del another
        assert pq.only_app() is app
        del app


def test_tasks_schedules_and_middleware_are_defined_before_there_is_an_application(database: str, admin: Admin) -> None:
    pq = PgQueue()
    ran: list[str] = []

    class Watch(pgqueue.Middleware):
        def run(self, job: pgqueue.CurrentJob, proceed: Callable[[], Any]) -> Any:
            ran.append(flask.current_app.name)
            return proceed()

    pq.middleware(Watch())

    @pq.schedule(every=3600, args=[7])
    @pq.task(name="hourly", queue="q")
    def hourly(number: int) -> None: ...

    app = flask.Flask("later")
    app.config["PGQUEUE_DATABASE_URL"] = database
    pq.init_app(app)
    with running(pq) as worker:
        worker.wait_for(pgqueue.EventName.SCHEDULE_DEFINED, names=["hourly"])
        assert pq.run_schedule("hourly")
        wait_for_count(admin, 1, "archive", "state = 'completed' AND args->>0 = '7'")
    assert ran == ["later"]
    pq.close()


def test_a_job_of_a_view_is_committed_or_rolled_back_with_the_rows_of_the_session(database: str, admin: Admin) -> None:
    shop = Shop()

    @shop.pq.task(queue="q")
    def ship(order_id: int) -> None: ...

    @shop.blueprint.post("/orders/<note>")
    def order(note: str) -> str:
        row = shop.Order(note=note)
        shop.db.session.add(row)
        shop.db.session.flush()
        ship.enqueue(row.id, using=shop.db.session)
        if note == "bad":
            raise ValueError(note)
        shop.db.session.commit()
        return str(row.id)

    app = shop.app(database, TESTING=False)
    app.logger.disabled = True
    with closing(app):
        client = app.test_client()
        assert client.post("/orders/bad").status_code == 500
        good = client.post("/orders/good")
        assert (good.status_code, shop.orders(app)) == (200, ["good"])
        assert admin.execute("SELECT args::text FROM pgqueue.job").fetchall() == [(f"[{good.text}]",)]


def test_a_blueprint_with_tasks_serves_every_application_of_a_process_on_its_own_database(
    database: str, empty_database: str, admin: Admin
) -> None:
    migrate.upgrade(empty_database, schema="jobs")
    shop = Shop()

    @shop.pq.task(queue="q")
    def ship(note: str) -> None: ...

    @shop.blueprint.post("/orders/<note>")
    def order(note: str) -> str:
        ship.enqueue(note)
        return flask.current_app.name

    def create_app(name: str, url: str, **config: Any) -> flask.Flask:
        return shop.app(url, name, **config)

    one, two = create_app("one", database), create_app("two", empty_database, PGQUEUE_SCHEMA="jobs")
    with closing(one, two), psycopg.connect(empty_database, autocommit=True) as other:
        for connection in (admin, other):
            connection.execute("LISTEN pgqueue")
            connection.execute("LISTEN jobs")
        for app in (one, two, one, two):
            assert app.test_client().post(f"/orders/{app.name}").text == app.name
        assert admin.execute("SELECT args::text FROM pgqueue.job").fetchall() == [('["one"]',)] * 2
        assert other.execute("SELECT args::text FROM jobs.job").fetchall() == [('["two"]',)] * 2
        channels = [{note.channel for note in some.notifies(timeout=0, stop_after=1)} for some in (admin, other)]
        assert channels == [{"pgqueue"}, {"jobs"}]

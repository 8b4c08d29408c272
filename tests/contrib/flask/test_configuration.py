"""What stands in a configuration: copies of the environment, URL objects, and mistakes, which are one sentence each."""

from __future__ import annotations

import os
from typing import Any

import flask
import pytest
import sqlalchemy

import pgqueue
from pgqueue.config import OTHER_VARIABLES
from pgqueue.contrib.flask import PgQueue

SECRET = "hunter2"


def settings_of(options: dict[str, Any], **config: Any) -> pgqueue.Settings:
    app = flask.Flask("configured")
    app.config.from_mapping(config)
    pq = PgQueue(**options)
    pq.init_app(app)
    return pq.for_app(app).settings


def test_a_copy_of_the_environment_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OTHER_VARIABLES:
        monkeypatch.setenv(name, "5")
    monkeypatch.setenv("PGQUEUE_POOL_SIZE", "3")
    app = flask.Flask("copied")
    app.config.from_mapping(os.environ)
    pq = PgQueue(app)
    assert pq.for_app(app).settings.pool_size == 3
    app = flask.Flask("prefixed")
    app.config.from_prefixed_env("PGQUEUE")  # without the prefix: nothing of ours
    app.config.from_mapping({name: value for name, value in os.environ.items() if name.startswith("PGQUEUE_")})
    pq.init_app(app)


@pytest.mark.parametrize("place", ["configuration", "code"])
def test_a_url_object_of_sqlalchemy_is_read_with_its_password(place: str) -> None:
    url = sqlalchemy.make_url(f"postgresql+psycopg://ada:{SECRET}%40@db:5433/shop?sslmode=require")
    settings = (
        settings_of({}, PGQUEUE_DATABASE_URL=url, PGQUEUE_LISTEN_URL=url)
        if place == "configuration"
        else settings_of({"database_url": url, "listen_url": url})
    )
    text = f"postgresql://ada:{SECRET}%40@db:5433/shop?sslmode=require"
    assert (settings.database_url, settings.listen_url) == (text, text)


@pytest.mark.parametrize("place", ["configuration", "code"])
@pytest.mark.parametrize("value", [5, b"postgresql://", sqlalchemy.make_url(f"mysql+pymysql://ada:{SECRET}@db/shop")])
def test_what_is_no_url_is_refused_in_a_sentence(place: str, value: Any) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="must be a text, not a value of type") as refused:
        if place == "configuration":
            settings_of({}, PGQUEUE_DATABASE_URL=value)
        else:
            settings_of({"database_url": value})
    assert SECRET not in str(refused.value)


def test_what_is_no_application_is_refused_in_a_sentence() -> None:
    wrong: Any = "postgresql://ada:hunter2@db/shop"
    pq = PgQueue()
    said = "needs a Flask application, not a value of type str; a database"
    for use in (PgQueue, pq.init_app, pq.for_app):
        with pytest.raises(pgqueue.ConfigurationError, match=said) as refused:
            use(wrong)
        assert SECRET not in str(refused.value)

"""System checks: what is wrong is said, and what to do about it."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connections
from django.test import modify_settings, override_settings

from pgqueue import migrate
from tests.conftest import execute
from tests.contrib.django.conftest import connected, other_is
from tests.contrib.django.settings import BACKEND


def found(options: Any = None, *, databases: list[str] | None = None, **params: Any) -> dict[str, str]:
    """The messages of pgqueue's checks by their ids, with these OPTIONS."""
    entry = {"BACKEND": BACKEND, **params, **({} if options is None else {"OPTIONS": options})}
    with override_settings(TASKS={"default": entry}):
        return {str(one.id): one.msg for one in run_checks(databases=databases) if str(one.id).startswith("pgqueue.")}


def test_good_settings_are_silent(shop: str) -> None:
    assert found(databases=["default"]) == {}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shema": "jobs"}, "unknown option 'shema': did you mean 'schema'?"),
        ({"DATABASE": "default"}, "unknown option 'DATABASE': did you mean 'database'?"),
        ({"database_url": "postgresql:///x"}, "the database is one of DATABASES, give its alias as 'database'"),
        ({"max_attempts": 3}, "options of tasks stand in 'defaults', such as {'defaults': {'max_attempts': …}}"),
        ({"schema": "Jobs!"}, "schema 'Jobs!': use lower-case letters"),
        ({"archive_days": "7"}, "archive_days must be a number of seconds"),
        ({"defaults": {"max_attempt": 3}}, "OPTIONS['defaults']: unknown task option 'max_attempt'; did you mean"),
        ({"defaults": {"queue": "mail"}}, "Django's task framework calls 'queue' 'queue_name'"),
        ({"defaults": {"queue_name": "mail"}}, "OPTIONS['defaults']: 'queue_name' belongs to each task"),
        ({"defaults": {"priority": 3}}, "OPTIONS['defaults']: 'priority' belongs to each task"),
        ({"defaults": {"run_after": 3}}, "OPTIONS['defaults']: 'run_after' belongs to a call"),
        ({"defaults": 3}, "OPTIONS['defaults'] must be a dict"),
        ({"database": 3}, "OPTIONS['database'] must be an alias of DATABASES"),
        (["schema"], "OPTIONS must be a dict, not a list"),
    ],
)  # fmt: skip
def test_a_broken_setting_is_named_with_a_suggestion(options: Any, sentence: str) -> None:
    [(code, message)] = found(options).items()
    assert code == "pgqueue.E001"
    assert message.startswith("TASKS['default']: ")
    assert sentence in message


def test_an_alias_that_does_not_exist_and_a_database_of_another_kind_are_named() -> None:
    assert found({"database": "defualt"}) == {
        "pgqueue.E003": "TASKS['default']: DATABASES has no 'defualt': did you mean 'default'?"
    }
    with other_is(ENGINE="django.db.backends.sqlite3", NAME=":memory:"):
        message = found({"database": "other"})["pgqueue.E003"]
    assert "database 'other' is SQLite: pgqueue needs PostgreSQL" in message


def test_django_on_another_driver_is_told_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        __name__ = "psycopg2"

    monkeypatch.setattr(type(connections["default"]), "Database", Driver())
    assert found()["pgqueue.E003"] == (
        "TASKS['default']: Django's connections to 'default' are those of psycopg2: "
        "pgqueue needs psycopg 3, run `pip install 'psycopg[binary]'`"
    )


def test_the_application_must_be_installed() -> None:
    with modify_settings(INSTALLED_APPS={"remove": ["pgqueue.contrib.django"]}):
        assert found() == {"pgqueue.E002": "TASKS['default']: 'pgqueue.contrib.django' is not in INSTALLED_APPS."}


@pytest.mark.parametrize(
    ("queues", "sentence"),
    [
        (7, "QUEUES must be a list of names of queues, not 7"),
        ("mail", "QUEUES must be a list of names of queues, not 'mail'"),
        (None, "QUEUES must be a list of names of queues, not None"),
        (["default", 7], "QUEUES: a queue name must be a non-empty string, not 7"),
        (["default", ""], "QUEUES: a queue name must be a non-empty string, not ''"),
        (["default", "a\0b"], "no control characters"),
        ([["default"]], "QUEUES: a queue name must be a non-empty string"),
    ],
)
def test_queues_that_are_no_names_are_said(queues: Any, sentence: str) -> None:
    [(code, message)] = found(QUEUES=queues).items()
    assert code == "pgqueue.E001"
    assert sentence in message


def test_a_schema_that_is_missing_old_or_newer_is_said(empty_database: str) -> None:
    with connected(default=empty_database):
        assert found() == {}, "without leave to look into databases none is looked into"
        assert "holds no queue yet: run `manage.py migrate`." in found(databases=["default"])["pgqueue.W001"]
        migrate.upgrade(empty_database, revision="0003")
        message = found(databases=["default"])["pgqueue.W001"]
        assert "is at revision 0003" in message
        assert "run `manage.py migrate`" in message
        migrate.upgrade(empty_database)
        assert found(databases=["default"]) == {}
        execute(empty_database, "UPDATE pgqueue.schema_version SET version_num = '9999'")
        assert "upgrade the package" in found(databases=["default"])["pgqueue.W001"]
    with connected(default="host=127.0.0.1 port=1 dbname=nowhere"):
        assert "cannot be used" in found(databases=["default"])["pgqueue.W001"]


def test_a_pool_that_is_smaller_than_the_concurrency_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for pool, most in ((True, 4), ({"min_size": 2}, 2), ({"max_size": 9}, 9), ({"max_size": 10}, None), (False, None)):
        monkeypatch.setitem(connections.settings["default"], "OPTIONS", {"pool": pool})
        message = found().get("pgqueue.W003")
        assert (message is None) == (most is None)
        if message is not None:
            assert f"has at most {most} connections, and a worker runs 10 jobs at once" in message


def test_results_that_could_not_be_read_are_said() -> None:
    assert "with archive=False nothing is left" in found({"archive": False})["pgqueue.W002"]
    assert found({"archive": False, "defaults": {"keep_result": False}}) == {}

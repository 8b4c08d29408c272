"""Settings and options: validated once, and what is wrong is said in one sentence."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import pgqueue
from pgqueue.config import OTHER_VARIABLES, Settings, load_settings, validate_name
from pgqueue.drivers.address import unreadable
from pgqueue.drivers.pool import describe
from pgqueue.task import TaskOptions
from pgqueue.worker import WorkerOptions


def test_the_environment_completes_what_is_not_given() -> None:
    environ = {"PGQUEUE_DATABASE_URL": "postgresql:///env", "PGQUEUE_ARCHIVE": "off", "PGQUEUE_POOL_SIZE": "3"}
    settings = load_settings({"database_url": "postgresql:///given"}, environ)
    assert (settings.database_url, settings.archive, settings.pool_size) == ("postgresql:///given", False, 3)
    assert load_settings({"database_url": None}, environ).database_url == "postgresql:///env"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"databse_url": "x"}, "unknown setting 'databse_url'; did you mean 'database_url'?"),
        ({"schema": 'x"; DROP'}, "schema"),
        ({"schema": "Upper"}, "schema"),
        ({"archive": "yes"}, "archive must be True or False"),
        ({"pool_size": 0}, "pool_size must be a whole number"),
        ({"max_payload_bytes": True}, "max_payload_bytes"),
        ({"archive_days": float("nan")}, "archive_days"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match=sentence.replace("?", r"\?")):
        load_settings(options, {})


@pytest.mark.parametrize("text", ["maybe", "2"])
def test_a_wrong_variable_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="PGQUEUE_NOTIFY"):
        load_settings({}, {"PGQUEUE_NOTIFY": text})


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 101}, {"priority": True}, {"priority": 1.5}, {"max_attempts": 0}, {"max_attempts": -1},
        {"max_attempts": None}, {"timeout": 0}, {"delay": -1}, {"delay": float("inf")}, {"delay": "5"},
        {"delay": timedelta(days=-1)}, {"run_at": datetime(2030, 1, 1)}, {"run_at": "tomorrow"},  # noqa: DTZ001
        {"delay": 1, "run_at": datetime.now().astimezone()}, {"queue": ""}, {"queue": "a,b"}, {"queue": "a\nb"},
        {"retry": 5}, {"headers": [1]}, {"prioritty": 1},
    ],
)  # fmt: skip
def test_a_wrong_task_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pgqueue.ConfigurationError):
        TaskOptions().changed(options)


@pytest.mark.parametrize(
    "options",
    [{"heartbeat": 11}, {"lease": 0.5}, {"concurrency": 0}, {"poll": 0}, {"grace": -1}, {"queues": ("a b\n",)}],
)
def test_a_wrong_worker_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pgqueue.ConfigurationError):
        WorkerOptions(**options)


def test_a_round_trip_of_a_control_loop_ends_before_the_lease() -> None:
    for lease in (1.0, 3.0, 30.0, 3600.0):
        options = WorkerOptions(lease=lease)
        assert options.deadline < lease
        assert options.beat_every * 3 <= lease


def test_names_that_cannot_stand_on_one_line_are_refused() -> None:
    assert validate_name("queue", "bilder-größer.x") == "bilder-größer.x"
    for name in ("", " a", "a\x1b[0m", "x" * 201):
        with pytest.raises(pgqueue.ConfigurationError):
            validate_name("queue", name)


def test_a_url_is_described_without_its_password() -> None:
    url = "postgresql://ada:hunter2@db.example:5433/app?sslmode=require"
    assert describe(url) == "the database (host=db.example, port=5433, dbname=app, user=ada)"


def test_two_functions_cannot_take_one_name() -> None:
    pq = pgqueue.PgQueue("postgresql:///nowhere")
    pq.task(name="t")(test_names_that_cannot_stand_on_one_line_are_refused)
    with pytest.raises(pgqueue.DuplicateTask):
        pq.task(name="t")(test_two_functions_cannot_take_one_name)


def test_a_parameter_named_using_is_refused() -> None:
    pq = pgqueue.PgQueue("postgresql:///nowhere")

    def send(using: str) -> None: ...

    with pytest.raises(pgqueue.ConfigurationError, match="using"):
        pq.task(send)


def test_arguments_are_checked_when_the_job_is_enqueued() -> None:
    pq = pgqueue.PgQueue("postgresql:///nowhere")

    @pq.task
    def send(to: str, /, subject: str, *, urgent: bool = False) -> None: ...

    for args, kwargs in (
        ((), {}),
        (("a",), {}),
        (("a", "b", "c"), {}),
        (("a", "b"), {"urgnt": True}),
        ((), {"to": "a"}),
    ):
        with pytest.raises(pgqueue.ArgumentsDoNotBind, match="send"):
            send.enqueue(*args, **kwargs)  # type: ignore[call-overload]


def test_without_a_database_the_sentence_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGQUEUE_DATABASE_URL", raising=False)
    with pytest.raises(pgqueue.ConfigurationError, match="PGQUEUE_DATABASE_URL"):
        pgqueue.PgQueue().status()


def test_every_variable_that_the_package_or_its_documents_name_is_a_setting_or_known_to_be_none() -> None:
    root = Path(__file__).parents[2]
    files = [file for folder in ("pgqueue", "docs", "examples") for file in (root / folder).rglob("*.*")]
    texts = [
        file.read_text(encoding="utf-8")
        for file in (*files, *root.glob("*.md"))
        if file.suffix in (".py", ".md", ".html", ".sql")
    ]
    named = set(re.findall(r"PGQUEUE_[A-Z_]*[A-Z]", "\n".join(texts)))
    settings = {f"PGQUEUE_{name.upper()}" for name in Settings.__dataclass_fields__}
    assert "PGQUEUE_PG_USER" in named
    assert named - settings <= OTHER_VARIABLES, "say in pgqueue.config.OTHER_VARIABLES that these are no settings"
    assert not settings & OTHER_VARIABLES


def test_a_url_that_is_no_text_is_refused_without_showing_it() -> None:
    for name in ("database_url", "listen_url"):
        with pytest.raises(pgqueue.ConfigurationError, match="must be a text, not a value of type bytes") as refused:
            load_settings({name: b"postgresql://ada:hunter2@db/x"}, {})
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "postgresql+psycopg://ada:hunter2@db/x",
            "leave out the name of the driver, so that it begins with postgresql://",
        ),
        ("postgres+asyncpg://ada:hunter2@db/x", "leave out the name of the driver"),
        ("postgresql://ada:hunter2@db/x?sslmod=require", "no parameter 'sslmod'; did you mean sslmode?"),
        ("postgresql://ada:hunter2@db/x?sslmode=require&zebra=1", "no parameter 'zebra'"),
        ("postgresql://db/x?password=hunter1&hunter2=1", "neither a postgresql:// URL with known"),
        ("postgresql://ada:5/a?hunter2=w@db/x", "neither a postgresql:// URL with known"),
        ("postgresql://db/x?hunter2", "neither a postgresql:// URL with known"),
        ("mysql://ada:hunter2@db/x", "neither a postgresql:// URL with known"),
        ("password=a hunter2=c", "nor key=value pairs"),
    ],
)
def test_what_is_wrong_with_a_url_is_said_and_no_secret(url: str, said: str) -> None:
    assert said in unreadable(url)
    assert "hunter2" not in unreadable(url)
    with pytest.raises(pgqueue.ConfigurationError) as refused, pgqueue.PgQueue(url, connect_timeout=1) as pq:
        pq.jobs()
    assert str(refused.value) == unreadable(url)

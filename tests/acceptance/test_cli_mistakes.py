"""Whatever a user can do wrong ends in one sentence: no traceback, no password."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.acceptance.command_line import CommandLine
from tests.conftest import execute

SECRET = "hunter2"


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path, None)


@pytest.fixture
def role(server_url: str) -> Iterator[str]:
    """A role with a password and no rights."""
    name = f"pgqueue_nobody_{uuid.uuid4().hex[:8]}"
    execute(server_url, f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'")
    yield name
    execute(server_url, f"DROP ROLE {name}")


COMMANDS = [("status",), ("enqueue", "t", "--unchecked"), ("worker", "--app", "shop"), ("migrate",)]
URLS = [
    (f"postgresql://me:{SECRET}@127.0.0.1:1/x", "127.0.0.1"),
    (f"postgresql://me:{SECRET}@no-such-host.invalid/x", "no-such-host.invalid"),
    (f"postgresql://me:{SECRET}@/x?nonsense=1", "URL"),
    (f"postgresql://me:{SECRET}@host:port:port/x", "host"),
    (f"mysql://me:{SECRET}@host/x", "URL"),
    (f"{SECRET} is not a url", "URL"),
    (f"host=127.0.0.1 port=1 password={SECRET} dbname=x", "127.0.0.1"),
]


@pytest.mark.parametrize(
    ("words", "url", "expected"),
    [(COMMANDS[0], *case) for case in URLS] + [(words, *case) for words in COMMANDS[1:] for case in URLS[:3:2]],
)
def test_a_url_that_leads_nowhere_is_one_sentence_without_its_password(
    cli: CommandLine, words: tuple[str, ...], url: str, expected: str
) -> None:
    said = cli.sentence(1, *words, PGQUEUE_DATABASE_URL=url)
    assert expected in said
    assert SECRET not in said


@pytest.mark.parametrize("url", [url for url, _ in URLS[:3]])
def test_the_traceback_shows_no_password_either(cli: CommandLine, url: str) -> None:
    status, _, errors = cli.run("status", "--traceback", "--database-url", url)
    assert status == 1
    assert "Traceback" in errors
    assert SECRET not in errors


def test_an_unknown_database_is_named(cli: CommandLine, server_url: str) -> None:
    url = psycopg.conninfo.make_conninfo(server_url, dbname="no_such_database")
    for words in COMMANDS:
        assert "no_such_database" in cli.sentence(1, *words, PGQUEUE_DATABASE_URL=url)


def test_a_role_without_rights_is_told_so(cli: CommandLine, database: str, role: str) -> None:
    url = psycopg.conninfo.make_conninfo(database, options=f"-c role={role}")
    for words in (("status",), ("enqueue", "t", "--unchecked"), ("worker", "--app", "shop")):
        said = cli.sentence(1, *words, PGQUEUE_DATABASE_URL=url)
        assert "no right" in said
        assert "permission denied for schema pgqueue" in said
    status, output, _ = cli.run("doctor", PGQUEUE_DATABASE_URL=url)
    assert status == 1
    assert "FAIL  schema" in output


def test_a_missing_grant_is_named_by_doctor(cli: CommandLine, database: str, role: str) -> None:
    execute(database, f"GRANT USAGE ON SCHEMA pgqueue TO {role}")
    execute(database, f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgqueue TO {role}")
    execute(
        database,
        f"GRANT EXECUTE ON FUNCTION pgqueue.unique_expire, pgqueue.unique_follow, pgqueue.topic_roll TO {role}",
    )
    execute(database, f"GRANT USAGE ON SEQUENCE pgqueue.message_id_seq, pgqueue.topic_number_seq TO {role}")
    url = psycopg.conninfo.make_conninfo(database, options=f"-c role={role}")
    status, output, _ = cli.run("doctor", PGQUEUE_DATABASE_URL=url)
    assert status == 1
    [line] = [line for line in output.splitlines() if line.startswith("FAIL  rights: this role lacks")]
    assert "USAGE on sequence job_id_seq" in line
    assert "EXECUTE on function payload_merge" in line
    execute(database, f"DROP OWNED BY {role}")


def test_row_security_is_reported(cli: CommandLine, database: str, role: str) -> None:
    execute(database, f"GRANT USAGE ON SCHEMA pgqueue TO {role}")
    execute(database, f"GRANT ALL ON ALL TABLES IN SCHEMA pgqueue TO {role}")
    execute(database, "ALTER TABLE pgqueue.job ENABLE ROW LEVEL SECURITY")
    url = psycopg.conninfo.make_conninfo(database, options=f"-c role={role}")
    assert "WARN  row security: active on job" in cli.run("doctor", PGQUEUE_DATABASE_URL=url)[1]
    execute(database, f"DROP OWNED BY {role}")


def test_a_read_only_database_is_named(cli: CommandLine, database: str) -> None:
    execute(
        database,
        f'ALTER DATABASE "{psycopg.conninfo.conninfo_to_dict(database)["dbname"]}" '
        "SET default_transaction_read_only = on",
    )
    for words in (("enqueue", "t", "--unchecked"), ("worker", "--app", "shop"), ("pause", "q", "--force")):
        assert "accepts no writes" in cli.sentence(1, *words, PGQUEUE_DATABASE_URL=database)
    assert "FAIL  writes" in cli.run("doctor", PGQUEUE_DATABASE_URL=database)[1]


def test_a_newer_schema_is_reported_not_repaired(cli: CommandLine, database: str) -> None:
    execute(database, "UPDATE pgqueue.schema_version SET version_num = '9999'")
    said = cli.sentence(1, "worker", "--app", "shop", PGQUEUE_DATABASE_URL=database)
    assert "at revision 9999" in said
    assert "upgrade the package" in cli.sentence(1, "migrate", PGQUEUE_DATABASE_URL=database)
    assert "newer" in cli.run("migrate", "--check", PGQUEUE_DATABASE_URL=database)[1]


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (("frobnicate",), 2, "frobnicate"),
        (("status", "--jsn"), 2, "--jsn"),
        (("cancel",), 2, "give ids"),
        (("cancel", "x"), 2, "integer"),
        (("dead", "show", "0"), 2, "ID"),
        (("jobs", "--state", "sleeping"), 2, "sleeping"),
        (("jobs", "--limit", "0"), 2, "--limit"),
        (("jobs", "--args"), 2, "--args needs --json"),
        (("status", "--schema", 'x"; DROP'), 2, "schema"),
        (("pause", "a\nb"), 2, "control characters"),
        (("worker",), 2, "which application"),
        (("migrate", "--check", "--sql"), 2, "--check alone"),
    ],
)
def test_a_wrong_command_line_is_refused_before_any_connection(
    cli: CommandLine, words: tuple[str, ...], status: int, expected: str
) -> None:
    cli.database = "postgresql://127.0.0.1:1/nothing"
    assert expected in cli.sentence(status, *words)


def test_a_bad_setting_in_the_environment_is_named(cli: CommandLine) -> None:
    assert "PGQUEUE_POOL_SIZE" in cli.sentence(1, "status", PGQUEUE_POOL_SIZE="many")

"""The commands about the database itself: migrate and doctor; and the private PostgreSQL when none is configured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    return CommandLine(tmp_path, database)


def test_migrate_makes_checks_and_removes_the_schema(tmp_path: Path, empty_database: str) -> None:
    cli = CommandLine(tmp_path, empty_database)
    status, output, _ = cli.run("migrate", "--check")
    assert status == 1
    assert "run `pgqueue migrate`" in output
    assert "run `pgqueue migrate`" in cli.sentence(1, "status")
    assert "run `pgqueue migrate`" in cli.sentence(1, "enqueue", "t", "--unchecked")
    assert "no queue → revision" in cli.good("migrate")
    assert "nothing to do" in cli.good("migrate")
    assert "up to date" in cli.good("migrate", "--check")
    assert "add --yes" in cli.sentence(2, "migrate", "--to", "base")
    assert "→ no queue" in cli.good("migrate", "--to", "base", "--yes")
    assert "there is no revision 'nope'" in cli.sentence(1, "migrate", "--to", "nope")


def test_migrate_prints_sql_without_any_database(cli: CommandLine) -> None:
    cli.database = "postgresql://127.0.0.1:1/nothing"
    assert 'CREATE TABLE "other".job' in cli.good("migrate", "--sql", "--schema", "other")


def test_doctor_finds_a_healthy_database_healthy(cli: CommandLine) -> None:
    findings = cli.json("doctor")
    assert {finding["level"] for finding in findings} == {"OK"}, findings
    assert {"server", "writes", "schema", "rights", "notifications", "clock", "workers"} <= {
        f["check"] for f in findings
    }
    assert all(line.startswith("OK ") for line in cli.good("doctor").splitlines())


def test_doctor_names_what_is_wrong(cli: CommandLine, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    pq.enqueue("t", queue="unserved")
    pq.enqueue("t", queue="lost")
    pq.claim("lost")
    admin.execute(b"UPDATE pgqueue.lease SET expires_at = clock_timestamp() - interval '1 minute'")
    admin.execute(
        b"INSERT INTO pgqueue.worker (name, hostname, pid, version, queues, concurrency, lease_seconds, seen_at) "
        b"VALUES ('w', 'h', 1, '0', '{}', 1, 30, clock_timestamp() - interval '10 minutes')"
    )
    levels = {finding["check"]: finding["level"] for finding in cli.json("doctor")}
    assert {name for name, level in levels.items() if level == "WARN"} == {"workers", "queues", "expired leases"}
    output = cli.good("doctor")
    assert "ready jobs, no worker: unserved" in output


def test_doctor_fails_where_nothing_can_work(tmp_path: Path, empty_database: str) -> None:
    cli = CommandLine(tmp_path, empty_database)
    status, output, _ = cli.run("doctor", "--json")
    assert status == 1
    assert [f["check"] for f in json.loads(output) if f["level"] == "FAIL"] == ["schema"]
    status, output, _ = cli.run("doctor", PGQUEUE_DATABASE_URL="postgresql://me:hunter2@127.0.0.1:1/x")
    assert status == 1
    assert output.startswith("FAIL  connection: ")
    assert "hunter2" not in output


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that the account of a private server may enter, also when root runs the tests."""
    with tempfile.TemporaryDirectory(prefix="pgqueue-cli-") as name:
        Path(name).chmod(0o711)
        yield Path(name).resolve()


def test_with_no_database_configured_the_private_one_is_used(open_folder: Path) -> None:
    cli = CommandLine(open_folder, None)
    hidden = {"PATH": "/nowhere"}
    status, output, errors = cli.run("enqueue", "shop.note", "--args", '["hello"]', "--app", "shop", **hidden)
    if "No PostgreSQL was found" in errors:
        pytest.skip("no PostgreSQL to start")
    assert (status, output) == (0, "1\n"), errors
    assert errors.startswith("pgqueue: no database configured; using the private PostgreSQL ")
    assert f"{open_folder}/private (its schema pgqueue was made now)" in errors
    assert len(errors.splitlines()) == 1
    status, _, errors = cli.run("worker", "--app", "shop", "--drain", **hidden)
    assert status == 0
    assert "was made now" not in errors
    assert cli.marks() == ["hello"]
    assert cli.good("--quiet", "jobs", "--json", **hidden) == "[]\n"
    assert not (open_folder / "private" / "data" / "postmaster.pid").exists()


def test_an_application_with_its_own_database_needs_no_private_one(cli: CommandLine) -> None:
    url, cli.database = cli.database, None
    cli.write("own.py", f"import pgqueue\npq = pgqueue.PgQueue({url!r})\n@pq.task\ndef f(): pass\n")
    assert cli.good("enqueue", "own.f", "--app", "own") == "1\n"
    assert not (cli.folder / "private").exists()


def test_a_folder_that_cannot_be_used_is_named(cli: CommandLine) -> None:
    cli.database = None
    said = cli.sentence(1, "status", PGQUEUE_DATA_DIR="/proc/nowhere")
    assert "/proc/nowhere" in said

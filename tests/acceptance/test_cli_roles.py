"""`pgqueue migrate --roles`, and every command as each role runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import pgqueue
from pgqueue import roles
from tests.acceptance.command_line import CommandLine
from tests.conftest import execute
from tests.logins import PASSWORD, login, roles_of_test


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    return CommandLine(tmp_path, None)


@pytest.fixture
def prefix(database: str) -> Iterator[str]:
    with roles_of_test(database) as prefix:
        yield prefix


def test_migrate_makes_schema_and_roles_and_later_only_looks_after_their_grants(
    cli: CommandLine, empty_database: str
) -> None:
    with roles_of_test(empty_database) as prefix:
        cli.database = empty_database
        words = ("migrate", "--roles", "--role-prefix", prefix)
        first = cli.good(*words)
        assert "no queue → revision" in first
        assert f"made {prefix}_worker, {prefix}_producer, {prefix}_reader" in first
        second = cli.good(*words, "--with-payloads")
        assert "nothing to do" in second
        assert "made" not in second
        may = f"SELECT has_column_privilege('{prefix}_reader', 'pgqueue.job', 'args', 'SELECT')"
        assert execute(empty_database, may) == [(True,)]


def test_migrate_prints_the_sql_of_the_roles_and_connects_to_nothing(cli: CommandLine) -> None:
    cli.database = "postgresql://127.0.0.1:1/nothing"
    printed = cli.good("migrate", "--roles", "--sql", "--schema", "shop")
    assert printed == roles.script("shop")
    assert '"shop_producer"' in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--roles", "--check"), "--check alone"),
        (("--roles", "--to", "base"), "leave out --to"),
        (("--with-payloads",), "need --roles"),
        (("--role-prefix", "x"), "need --roles"),
        (("--roles", "--role-prefix", 'x"; DROP'), "prefix"),
    ],
)
def test_options_that_do_not_go_together_are_refused(cli: CommandLine, words: tuple[str, ...], expected: str) -> None:
    cli.database = "postgresql://127.0.0.1:1/nothing"
    assert expected in cli.sentence(2, "migrate", *words)


def test_without_the_right_to_make_roles_nothing_is_made(cli: CommandLine, empty_database: str) -> None:
    with login(empty_database) as owner:
        name = psycopg.conninfo.conninfo_to_dict(owner)["user"]
        database = psycopg.conninfo.conninfo_to_dict(owner)["dbname"]
        execute(empty_database, f'GRANT CREATE ON DATABASE "{database}" TO {name}')
        said = cli.sentence(1, "migrate", "--roles", "--role-prefix", name, PGQUEUE_DATABASE_URL=owner)
        assert "lacks CREATEROLE" in said
        assert PASSWORD not in said
        assert not execute(empty_database, "SELECT FROM pg_namespace WHERE nspname = 'pgqueue'")


def test_a_worker_process_drains_under_its_role(cli: CommandLine, database: str, prefix: str) -> None:
    roles.create(database, prefix=prefix)
    with login(database, f"{prefix}_producer") as producer, login(database, f"{prefix}_worker") as worker:
        cli.database = producer
        for number in range(3):
            cli.good("enqueue", "shop.note", "--args", f'["{number}"]', "--app", "shop")
        cli.database = worker
        status, _, errors = cli.run("worker", "--app", "shop", "--drain")
        assert status == 0, errors
        assert "WARNING" not in errors
        assert sorted(cli.marks()) == ["0", "1", "2"]
        assert "OK    rights" in cli.run("doctor")[1]


def test_a_producer_enqueues_and_is_told_what_it_lacks_for_more(cli: CommandLine, database: str, prefix: str) -> None:
    roles.create(database, prefix=prefix)
    with login(database, f"{prefix}_producer") as url:
        cli.database = url
        job_id = cli.good("enqueue", "t", "--queue", "q", "--delay", "5", "--unchecked").strip()
        for words, right in (
            (("status",), "SELECT on worker"),
            (("jobs",), "SELECT on job"),
            (("workers",), "SELECT on worker"),
            (("dead", "list"), "SELECT on dead_letter"),
            (("cancel", job_id), "SELECT and UPDATE and DELETE on job"),
            (("pause", "q", "--force"), "INSERT and UPDATE on queue"),
            (("worker", "--app", "shop"), "SELECT on schema_version"),
        ):
            said = cli.sentence(1, *words)
            assert right in said
            assert "no right" in said
            assert PASSWORD not in said


def test_a_reader_looks_at_everything_and_changes_nothing(
    cli: CommandLine, database: str, prefix: str, pq: pgqueue.PgQueue
) -> None:
    pq.enqueue("t", ["hunter2"], queue="q")
    pq.fail(pq.claim("q"), pgqueue.DeadLetter("hunter2"))
    dead = str(pq.dead_letters()[0].id)
    job_id = str(pq.enqueue("t", ["hunter2"], queue="q"))
    roles.create(database, prefix=prefix)
    with login(database, f"{prefix}_reader") as url:
        cli.database = url
        assert "q" in cli.good("status")
        assert "(none)" in cli.good("workers")
        assert "is up to date" in cli.good("migrate", "--check")
        lists = (("jobs",), ("jobs", "--json", "--args"), ("dead", "list"), ("dead", "list", "--json"))
        for words in (*lists, ("dead", "show", dead)):
            status, output, errors = cli.run(*words)
            assert status == 0, errors
            assert "--with-payloads" in errors
            assert len(errors.splitlines()) == 1
            assert "hunter2" not in output
        for words, right in (
            (("cancel", job_id), "DELETE on job"),
            (("enqueue", "t", "--queue", "q", "--unchecked"), "INSERT on job"),
            (("pause", "q"), "INSERT and UPDATE on queue"),
            (("resume", "q"), "UPDATE on queue"),
            (("dead", "retry", dead), "UPDATE and DELETE on dead_letter"),
            (("dead", "purge", dead), "UPDATE and DELETE on dead_letter"),
        ):
            said = cli.sentence(1, *words)
            assert "no right" in said
            assert right in said, said
        roles.create(database, prefix=prefix, with_payloads=True)
        assert "hunter2" in cli.good("dead", "show", dead)
        assert "FAIL  rights: this role lacks" in cli.run("doctor")[1]

"""No argument, header, error text or password reaches a log line, an error of ours, a help text or the process list."""

from __future__ import annotations

import os
import signal
import unicodedata
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import PATIENCE, CommandLine
from tests.conftest import execute
from tests.logins import login
from tests.waiting import wait_until
from tests.workers import count

SECRET = "hunter2-9f3a"
APP = """
    import asyncio
    import os
    import signal

    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(name="fail", queue="q", max_attempts=2, retry=pgqueue.Fixed(0.05))
    def fail(secret):
        raise ValueError(secret)


    @pq.task(name="late", queue="q", max_attempts=1)
    async def late(secret):
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError(secret)


    @pq.task(name="kill", queue="q", max_attempts=2)
    def kill(secret):
        if pgqueue.current_job().attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)


    @pq.task(name="refused", queue="q", max_attempts=1)
    def refused(secret):
        pq.enqueue("t", [secret], queue="guarded", headers={"token": secret})


    @pq.task(name="signals", queue="q", max_attempts=3)
    def signals(secret):
        if pgqueue.current_job().attempt == 1:
            raise pgqueue.Retry(delay=0.05, reason=secret)
        raise pgqueue.Discard(secret)


    @pq.task(name="buried", queue="q", max_attempts=1)
    def buried(secret):
        raise pgqueue.DeadLetter(secret)


    @pq.task(name="shout", queue="q", max_attempts=1)
    def shout(text):
        raise type(text, (Exception,), {})(text * 1000)
"""
EVIL = "next\n2026-01-01 00:00:00 ERROR [1] pgqueue: forged\r\x1b[31mred\x9b\u202eback\u2028line\x00\x7f"


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    line = CommandLine(tmp_path, database)
    line.write("shop.py", APP)
    return line


def guard(database: str, table: str, condition: str) -> None:
    execute(database, f"ALTER TABLE pgqueue.{table} ADD CONSTRAINT guarded CHECK ({condition})")


def test_no_argument_and_no_error_text_reaches_the_log_whatever_becomes_of_the_job(
    cli: CommandLine, database: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    guard(database, "job", "queue <> 'guarded'")
    headers = {"authorization": SECRET}
    words = ("worker", "--app", "shop", "--lease", "4", "--log-level", "debug")
    pq.enqueue("kill", [f"password={SECRET}"], queue="q", max_attempts=2, headers=headers)
    status, output, said = cli.run(*words)
    assert status == -signal.SIGKILL
    for task in ("fail", "late", "refused", "signals", "buried", "unknown"):
        pq.enqueue(task, [f"password={SECRET}"], queue="q", max_attempts=2, timeout=0.2, headers=headers)
    pq.enqueue("fail", [SECRET, SECRET], {"surplus": SECRET}, queue="q", max_attempts=1)
    for args in (f'"{SECRET}"', f'["{SECRET}", 1e999]', f'["{SECRET}\\u0000"]'):  # not what enqueue writes
        execute(database, "INSERT INTO pgqueue.job (queue, task, args, max_attempts) VALUES ('q', 'fail', %s, 1)", args)
    status, more, errors = cli.run(*words, "--drain")
    assert status == 0, errors
    assert "rescued jobs of lost workers" in errors
    assert "failed with psycopg.errors.CheckViolation" in errors
    assert "failed with pgqueue.errors.PayloadDecodeError" in errors
    assert count(admin, "dead_letter") >= 6
    assert SECRET not in said + output + errors + more


def test_an_outcome_that_the_database_refuses_is_reported_without_its_row(
    cli: CommandLine, database: str, pq: pgqueue.PgQueue
) -> None:
    guard(database, "dead_letter", "task <> 'buried'")
    pq.enqueue("buried", [SECRET], queue="q", max_attempts=1, headers={"token": SECRET})
    with cli.worker("--lease", "4", "--log-level", "debug") as program:
        program.wait_for("could not store the outcome")
        program.wait_for("maintenance loop failed")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert "CheckViolation" in program.errors
        assert SECRET not in program.errors


@pytest.mark.parametrize("words", [(), ("--traceback",)])
def test_a_refused_enqueue_is_one_sentence_without_its_row(
    cli: CommandLine, database: str, words: tuple[str, ...]
) -> None:
    guard(database, "job", "queue <> 'guarded'")
    status, output, errors = cli.run(
        "enqueue", "t", "--args", f'["{SECRET}"]', "--queue", "guarded", "--unchecked", *words
    )
    assert (status, output) == (1, "")
    assert 'violates check constraint "guarded"' in errors
    assert SECRET not in errors
    assert words or len(errors.splitlines()) == 1


def test_one_event_is_one_printable_bounded_line_whatever_names_and_errors_hold(
    cli: CommandLine, database: str, pq: pgqueue.PgQueue
) -> None:
    storable = EVIL.replace("\0", "")
    for task in (storable, "t" * 1_000_000, f"{storable}{'n' * 1_000_000}"):
        execute(database, "INSERT INTO pgqueue.job (queue, task, max_attempts) VALUES ('q', %s, 1)", task)
    pq.enqueue("shout", [storable], queue="q", max_attempts=1)
    status, _, errors = cli.run("worker", "--app", "shop", "--drain", "--log-level", "debug", "--name", storable)
    assert status == 0, errors[-2000:]
    assert errors.count(": dead letter") == 4
    for line in errors.split("\n")[:-1]:
        assert line[:4].isdigit(), line[:200]
        assert len(line.encode()) < 1200
        assert not [c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")], line[:200]


def test_the_processes_of_a_worker_show_no_url(cli: CommandLine, database: str) -> None:
    url = psycopg.conninfo.make_conninfo(database, password=SECRET)
    cli.database = None
    with cli.started(
        *("worker", "--app", "shop", "--processes", "2", "--name", "seen"), PGQUEUE_DATABASE_URL=url
    ) as program:
        rows = wait_until(
            lambda: (found := execute(database, "SELECT pid FROM pgqueue.worker")) and len(found) == 2 and found,
            PATIENCE,
            "two workers",
        )
        for pid in (program.process.pid, *(row[0] for row in rows)):
            words = Path(f"/proc/{pid}/cmdline").read_text()
            assert "pgqueue" in words
            assert SECRET not in words
            assert "dbname" not in words
        assert SECRET not in program.errors


def test_children_get_the_url_of_the_command_line_in_their_environment(cli: CommandLine, database: str) -> None:
    url = psycopg.conninfo.make_conninfo(database, password=SECRET)
    cli.database = None
    with cli.started("worker", "--app", "shop", "--processes", "2", "--database-url", url):
        rows = wait_until(
            lambda: (found := execute(database, "SELECT pid FROM pgqueue.worker")) and len(found) == 2 and found,
            PATIENCE,
            "two workers",
        )
        for (pid,) in rows:
            assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text()


COMMANDS = [
    *(("migrate",), ("migrate", "--check"), ("migrate", "--roles"), ("migrate", "--to", "base")),
    *(
        ("worker", "--app", "shop"),
        ("enqueue", "t", "--unchecked"),
        ("enqueue", "fail", "--args", "[1]", "--app", "shop"),
    ),
    *(("status",), ("jobs",), ("workers",), ("cancel", "1"), ("pause", "q"), ("resume", "q")),
    *(("dead", "list"), ("dead", "show", "1"), ("dead", "retry", "1"), ("dead", "purge", "1")),
]
URLS = [
    f"postgresql://me:{SECRET}@127.0.0.1:1/x",
    f"postgresql://me:p@{SECRET}@127.0.0.1:1/x",
    f"postgresql://me:p/{SECRET}@127.0.0.1:1/x",
    f"postgresql://me:{SECRET}?x@127.0.0.1:1/x",
    f"host=127.0.0.1 port=1 user=me password='a b {SECRET}'",
    f"host=127.0.0.1 port=1 user=me password=a b {SECRET}",
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_keeps_the_password_of_a_wrong_url_to_itself(cli: CommandLine, words: tuple[str, ...]) -> None:
    cli.database = None
    for url in URLS[:2] if words != ("status",) else URLS:
        assert SECRET not in cli.sentence(1, *words, PGQUEUE_DATABASE_URL=url)


def test_a_wrong_password_is_not_repeated(cli: CommandLine, database: str) -> None:
    with login(database) as url:
        wrong = psycopg.conninfo.make_conninfo(url, password=SECRET)
        for words in (("status",), ("worker", "--app", "shop"), ("migrate",), ("status", "--traceback")):
            status, output, errors = cli.run(*words, PGQUEUE_DATABASE_URL=wrong)
            assert status == 1
            assert "password authentication failed" in errors
            assert SECRET not in output + errors
        output = cli.run("doctor", PGQUEUE_DATABASE_URL=wrong)[1]
        assert "FAIL  connection" in output
        assert SECRET not in output


def test_no_help_repeats_the_environment(cli: CommandLine) -> None:
    settings = {f"PGQUEUE_{name}": SECRET for name in ("DATABASE_URL", "LISTEN_URL", "SCHEMA", "APP", "POOL_SIZE")}
    for words in ((), ("worker",), ("enqueue",), ("migrate",), ("dead", "purge"), ("bench",)):
        status, output, errors = cli.run(*words, "--help", **settings)
        assert status == 0
        assert SECRET not in output + errors


def test_a_wrong_setting_is_named_without_its_value(cli: CommandLine) -> None:
    for name in ("POOL_SIZE", "NOTIFY", "ARCHIVE_DAYS"):
        said = cli.sentence(1, "status", **{f"PGQUEUE_{name}": SECRET})
        assert f"PGQUEUE_{name}" in said
        assert SECRET not in said


def test_a_setting_of_libpq_does_not_leak_either(cli: CommandLine, database: str) -> None:
    cli.database = "postgresql://me@127.0.0.1:1/x"
    assert SECRET not in cli.sentence(1, "status", PGPASSWORD=SECRET)
    assert os.environ.get("PGPASSWORD") != SECRET

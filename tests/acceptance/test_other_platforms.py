"""The real command where names of Unix are missing, as on Windows: it works, or what it cannot do is refused in a sentence.

The names are taken away before anything of pgqueue is imported. What else is different on Windows is not seen here.
"""

from __future__ import annotations

import signal
from pathlib import Path

import psycopg
import pytest

from tests.acceptance.command_line import CommandLine
from tests.waiting import wait_until

POORER = """
    import asyncio
    import os
    import select
    import signal

    GONE = {
        signal: ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGKILL", "SIGSTOP", "SIGCONT", "pthread_sigmask"],
        os: ["fork", "forkpty", "register_at_fork", "killpg", "setsid", "getpgrp", "geteuid", "waitid", "pidfd_open",
             "set_blocking"],
        select: ["poll", "epoll"],
    }
    for module, names in GONE.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


    class ProactorEventLoop(asyncio.SelectorEventLoop):
        def refuse(self, *args):
            raise NotImplementedError

        add_reader = add_writer = add_signal_handler = refuse


    asyncio.ProactorEventLoop = ProactorEventLoop
    asyncio.new_event_loop = ProactorEventLoop
"""
ASYNC_APP = """
    import pgqueue

    pq = pgqueue.AsyncPgQueue()


    @pq.task(queue="images")
    async def parent():
        await child.enqueue()


    @pq.task(queue="images")
    async def child():
        with open("marks", "a") as file:
            file.write("child\\n")
"""
ISOLATED_APP = """
    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.task(queue="images", isolation="process")
    def convert():
        pass
"""


@pytest.fixture
def poor(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """The command on such a platform: Python imports `sitecustomize` before the program."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = CommandLine(tmp_path, database)
    made.write("sitecustomize.py", POORER)
    return made


def test_operators_commands_work(poor: CommandLine) -> None:
    assert "Run the jobs" in poor.good("--help")
    poor.good("enqueue", "reports.nightly", "--queue", "reports", "--unchecked")
    [job] = poor.json("jobs")
    assert job["task"] == "reports.nightly"


def test_a_worker_says_what_is_missing_and_runs_jobs_lost_ones_too_until_it_is_interrupted(
    poor: CommandLine, admin: psycopg.Connection
) -> None:
    poor.good("enqueue", "shop.note", "--app", "shop", "--args", '["plain"]')
    poor.good("enqueue", "shop.note", "--app", "shop", "--args", '["lost"]')
    admin.execute("UPDATE pgqueue.job SET lost = 1 WHERE args ->> 0 = 'lost'")
    with poor.worker() as program:
        program.wait_for("has no child processes")
        assert "os.killpg, os.register_at_fork, signal.pthread_sigmask, signal.SIGKILL, select.poll" in program.errors
        poor.wait_for_mark("plain")
        poor.wait_for_mark("lost")
        program.signal(signal.SIGINT)
        assert program.wait() == 0, program.errors
    assert admin.execute("SELECT state, attempt FROM pgqueue.archive").fetchall() == [("completed", 1)] * 2


def test_a_worker_takes_an_event_loop_in_which_asynchronous_connections_work(
    poor: CommandLine, admin: psycopg.Connection
) -> None:
    poor.write("shop.py", ASYNC_APP)
    poor.good("enqueue", "shop.parent", "--app", "shop")
    with poor.worker() as program:
        wait_until(lambda: poor.marks() == ["child"], 30.0, f"the child has run; {program.errors}")


def test_processes_are_refused(poor: CommandLine) -> None:
    said = poor.sentence(2, "worker", "--app", "shop", "--processes", "2")
    assert said.startswith("--processes needs a Unix system: this one lacks os.killpg, ")


def test_a_task_that_wants_a_process_of_its_own_is_refused(poor: CommandLine) -> None:
    poor.write("shop.py", ISOLATED_APP)
    said = poor.sentence(2, "worker", "--app", "shop")
    assert said.startswith('task shop.convert with isolation="process" needs a Unix system: ')


def test_the_demo_is_refused(poor: CommandLine) -> None:
    assert poor.sentence(1, "demo").startswith("the demo, which kills a worker, needs a Unix system: ")


@pytest.mark.parametrize("words", [("status",), ("worker", "--app", "shop")])
def test_without_a_database_there_is_no_private_one(words: tuple[str, ...], poor: CommandLine) -> None:
    poor.database = None
    said = poor.sentence(1, *words)
    assert said.startswith("pgqueue cannot start a PostgreSQL of its own on Windows: install PostgreSQL and give")

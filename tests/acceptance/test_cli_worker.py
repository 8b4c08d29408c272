"""`pgqueue worker` as deployments meet it: real processes, real signals."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.acceptance.command_line import PATIENCE, CommandLine
from tests.waiting import wait_until

Admin = psycopg.Connection[Any]
PROMPT = 20.0
"""Far less than the grace time of 30 seconds, and generous on a busy machine to what takes a fraction of a second."""


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    return CommandLine(tmp_path, database)


def one(admin: Admin, question: str) -> Any:
    row = admin.execute(question.encode()).fetchone()
    return row and row[0]


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def children(admin: Admin, count: int) -> list[int]:
    """The pids of that many workers that have a row and live."""

    def found() -> list[int]:
        pids = [row[0] for row in admin.execute(b"SELECT pid FROM pgqueue.worker ORDER BY id")]
        living = [pid for pid in pids if lives(pid)]
        return living if len(living) == count else []

    return wait_until(found, PATIENCE, f"{count} workers")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_idle_worker_leaves_promptly_and_cleanly(cli: CommandLine, admin: Admin, number: signal.Signals) -> None:
    with cli.worker() as program:
        began = time.monotonic()
        program.signal(number)
        assert program.wait() == 0
        assert time.monotonic() - began < PROMPT
        assert "Traceback" not in program.errors
    assert one(admin, "SELECT count(*) FROM pgqueue.worker") == 0


def test_a_running_job_is_finished_and_settled_before_the_worker_leaves(cli: CommandLine, admin: Admin) -> None:
    cli.good("enqueue", "shop.linger", "--args", "[4]", "--app", "shop")
    cli.good("enqueue", "shop.note", "--args", '["late"]', "--app", "shop")
    with cli.worker("--concurrency", "1") as program:
        cli.wait_for_mark("begun")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
    assert cli.marks()[-1] == "ended"
    assert one(admin, "SELECT string_agg(task, ',') FROM pgqueue.job") == "shop.note"
    assert one(admin, "SELECT count(*) FROM pgqueue.archive WHERE state = 'completed'") == 1


def test_a_second_signal_gives_the_job_back_at_once_with_no_attempt_burned(cli: CommandLine, admin: Admin) -> None:
    cli.good("enqueue", "shop.linger", "--args", "[600]", "--app", "shop")
    with cli.worker() as program:
        cli.wait_for_mark("begun")
        began = time.monotonic()
        program.signal(signal.SIGTERM)
        program.wait_for("is stopping")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert time.monotonic() - began < PROMPT
    row = admin.execute(b"SELECT attempt, lost, lease_id, position IS NOT NULL FROM pgqueue.job").fetchone()
    assert row == (0, 0, None, True)
    assert one(admin, "SELECT count(*) FROM pgqueue.lease") == 0


def test_the_end_of_the_grace_time_does_the_same(cli: CommandLine, admin: Admin) -> None:
    cli.good("enqueue", "shop.linger", "--args", "[600]", "--app", "shop")
    with cli.worker("--grace", "0.2") as program:
        cli.wait_for_mark("begun")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
    assert admin.execute(b"SELECT attempt, lost, lease_id FROM pgqueue.job").fetchone() == (0, 0, None)


def test_a_drained_worker_leaves_with_zero(cli: CommandLine, admin: Admin) -> None:
    for text in ("a", "b"):
        cli.good("enqueue", "shop.note", "--args", f'["{text}"]', "--app", "shop")
    status, _, errors = cli.run("worker", "--app", "shop", "--drain")
    assert status == 0
    assert "Traceback" not in errors
    assert sorted(cli.marks()) == ["a", "b"]
    assert one(admin, "SELECT count(*) FROM pgqueue.job") == 0


def test_a_stop_while_the_application_is_imported_ends_with_zero(cli: CommandLine) -> None:
    cli.write("slow.py", "import time\nfrom shop import mark\nmark('importing')\ntime.sleep(600)\n")
    with cli.started("worker", "--app", "slow") as program:
        cli.wait_for_mark("importing")
        program.signal(signal.SIGTERM)
        assert program.wait(PROMPT) == 0
        assert program.errors == ""


def test_a_stop_while_the_server_does_not_answer_ends_with_zero(cli: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/none?sslmode=disable"
        with cli.started("worker", "--app", "shop", PGQUEUE_DATABASE_URL=url) as program, silent.accept()[0]:
            program.signal(signal.SIGTERM)
            assert program.wait(PROMPT) == 0


def test_a_thread_that_a_task_left_behind_does_not_keep_the_process(cli: CommandLine) -> None:
    cli.good("enqueue", "shop.leave_a_thread", "--app", "shop")
    with cli.worker() as program:
        cli.wait_for_mark("thread")
        program.signal(signal.SIGTERM)
        assert program.wait(PROMPT) == 0


def test_what_an_application_does_at_exit_is_done(cli: CommandLine) -> None:
    cli.write("polite.py", "import atexit\nfrom shop import mark, pq\natexit.register(mark, 'goodbye')\n")
    assert cli.run("worker", "--app", "polite", "--drain")[0] == 0
    assert cli.marks() == ["goodbye"]


def test_a_process_forked_by_a_task_keeps_its_signals_to_itself(cli: CommandLine) -> None:
    cli.write(
        "forking.py",
        """
        import os, signal, time, warnings
        from shop import mark, pq

        @pq.task(queue="images")
        def fork():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                time.sleep(600)
            os.kill(pid, signal.SIGTERM)
            mark(f"ended by {os.WTERMSIG(os.waitpid(pid, 0)[1])}")
        """,
    )
    cli.good("enqueue", "forking.fork", "--app", "forking")
    with cli.started("worker", "--app", "forking") as program:
        cli.wait_for_mark(f"ended by {signal.SIGTERM:d}")
        assert "asked to stop" not in program.errors
        program.signal(signal.SIGTERM)
        assert program.wait() == 0


def test_the_log_shows_no_argument_and_one_line_per_event(cli: CommandLine) -> None:
    cli.good("enqueue", "shop.fail", "--args", '["password=hunter2\\nforged line"]', "--app", "shop")
    _, _, errors = cli.run("worker", "--app", "shop", "--drain", "--log-level", "debug")
    assert "job 1 (shop.fail) on queue images failed with ValueError" in errors
    assert "hunter2" not in errors
    assert all(line[:4].isdigit() for line in errors.splitlines())


def test_several_processes_work_and_leave_together(cli: CommandLine, admin: Admin) -> None:
    with cli.started("worker", "--app", "shop", "--processes", "2", "--queues", "images") as program:
        pids = children(admin, 2)
        for pid in pids:
            program.wait_for(f"pid {pid}")
        os.kill(pids[0], signal.SIGKILL)
        program.wait_for("ended with SIGKILL")
        wait_until(lambda: set(children(admin, 2)) - set(pids), PATIENCE, "a successor")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0
        assert not any(lives(pid) for pid in pids)


def test_children_leave_when_their_parent_is_killed(cli: CommandLine, admin: Admin) -> None:
    with cli.started("worker", "--app", "shop", "--processes", "2") as program:
        pids = children(admin, 2)
        program.signal(signal.SIGKILL)
        wait_until(lambda: not any(lives(pid) for pid in pids), PATIENCE, "the children have left")
    assert one(admin, "SELECT count(*) FROM pgqueue.worker") == 0


def test_a_supervisor_that_signals_parent_and_children_asks_once(cli: CommandLine, admin: Admin) -> None:
    cli.good("enqueue", "shop.linger", "--args", "[1]", "--app", "shop")
    with cli.started("worker", "--app", "shop", "--processes", "2") as program:
        pids = children(admin, 2)
        cli.wait_for_mark("begun")
        for pid in (program.process.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        assert program.wait() == 0
    assert cli.marks()[-1] == "ended"


def test_a_second_signal_to_the_parent_reaches_the_children(cli: CommandLine, admin: Admin) -> None:
    cli.good("enqueue", "shop.linger", "--args", "[600]", "--app", "shop")
    with cli.started("worker", "--app", "shop", "--processes", "2") as program:
        children(admin, 2)
        cli.wait_for_mark("begun")
        program.signal(signal.SIGINT)
        program.wait_for("is stopping", times=2)
        program.signal(signal.SIGINT)
        assert program.wait() == 0
    assert admin.execute(b"SELECT attempt, lost, lease_id FROM pgqueue.job").fetchone() == (0, 0, None)


def test_the_database_of_the_command_line_is_that_of_all_processes(tmp_path: Path, database: str, admin: Admin) -> None:
    cli = CommandLine(tmp_path, None)
    cli.write(
        "own.py", 'import pgqueue\n\npq = pgqueue.PgQueue("host=/nowhere")\n\n\n@pq.task\ndef work() -> None: ...\n'
    )
    with cli.started("worker", "--app", "own", "--processes", "2", "--database-url", database) as program:
        wait_until(lambda: one(admin, "SELECT count(*) FROM pgqueue.worker") == 2, PATIENCE, "both processes are there")
        program.signal(signal.SIGTERM)
        assert program.wait() == 0, program.errors


def test_several_processes_drain_once(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    for number in range(20):
        pq.enqueue("shop.note", [str(number)], queue="images")
    status, _, errors = cli.run("worker", "--app", "shop", "--processes", "2", "--drain")
    assert status == 0, errors
    assert sorted(cli.marks(), key=int) == [str(number) for number in range(20)]


def test_a_parent_whose_children_cannot_start_gives_up(cli: CommandLine) -> None:
    status, _, errors = cli.run("worker", "--app", "nowhere", "--processes", "2")
    assert status == 1
    assert "giving up" in errors
    assert "there is no module 'nowhere'" in errors


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--lease", "30", "--heartbeat", "11"), "heartbeat 11 s is too slow"),
        (("--lease", "nan"), "lease must be a number of seconds"),
        (("--concurrency", "0"), "concurrency must be a whole number"),
        (("--processes", "0"), "--processes must be between"),
        (("--queues", "a,,b"), "an empty name"),
        (("--queues", "a\nb"), "no control characters"),
        (("--log-level", "loud"), "loud"),
        (("--grace", "soon"), "--grace"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    cli: CommandLine, words: tuple[str, ...], expected: str
) -> None:
    assert expected in cli.sentence(2, "worker", "--app", "shop", *words)


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("missing", None, "there is no module 'missing'"),
        ("broken", "import nothing_like_this", "importing 'broken' failed with ModuleNotFoundError"),
        ("wrong", "def f(:", "importing 'wrong' failed with SyntaxError"),
        ("quits", "raise SystemExit(3)", "importing 'quits' failed with SystemExit"),
        ("leaks", "raise ValueError('postgresql://me:hunter2@host/db')", "failed with ValueError"),
        ("empty", "x = 1", "holds no PgQueue"),
        ("empty:x", "x = 1", "is of type int"),
        ("shop:not", None, "similar: note"),
        ("two", "import pgqueue\na, b = pgqueue.PgQueue(), pgqueue.PgQueue()", "say which: two:a, two:b"),
        ("shop.py", None, "give a module, such as 'shop'"),
        ("idle", "import pgqueue\npq = pgqueue.PgQueue()", "no queues to serve"),
    ],
)
def test_what_is_wrong_with_the_application_is_one_sentence(
    cli: CommandLine, name: str, source: str | None, expected: str
) -> None:
    if source is not None:
        cli.write(f"{name.partition(':')[0]}.py", source)
    said = cli.sentence(2 if name == "idle" else 1, "worker", "--app", name)
    assert expected in said
    assert "hunter2" not in said


def test_an_application_is_found_under_any_name_when_it_is_the_only_one(cli: CommandLine) -> None:
    cli.write("other.py", "import pgqueue\nbroker = pgqueue.AsyncPgQueue()\n@broker.task\nasync def f(): pass\n")
    assert cli.run("worker", "--app", "other", "--drain")[0] == 0
    assert cli.run("worker", "--drain", PGQUEUE_APP="other:broker")[0] == 0


def test_the_database_of_the_command_line_wins_over_the_one_of_the_application(cli: CommandLine) -> None:
    cli.write("own.py", "import pgqueue\npq = pgqueue.PgQueue('postgresql://127.0.0.1:1/x')\n@pq.task\ndef f(): pass\n")
    assert "127.0.0.1" in cli.run("worker", "--app", "own", "--drain")[2]
    assert cli.run("worker", "--app", "own", "--drain", "--database-url", str(cli.database))[0] == 0

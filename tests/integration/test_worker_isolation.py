"""Jobs in child processes: what a handler finds there, what it may do to its process, and what that costs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import ConfigurationError, EventName
from pgqueue.worker import Worker, WorkerOptions, channel, child_process, talk
from tests.integration import isolated
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, running, wait_for_count

LONG = 600.0


@pytest.fixture
def app(database: str, admin: psycopg.Connection[Any]) -> Iterator[pgqueue.PgQueue]:
    """The application of the children, on the database of this test: which they do not know from their environment."""
    admin.execute(isolated.TRACES.encode())
    before = isolated.pq.settings
    point_at(database)
    yield isolated.pq
    isolated.pq.close()
    isolated.pq.settings = isolated.pq._pool.settings = before


def point_at(url: str) -> None:
    settings = dataclasses.replace(isolated.pq.settings, database_url=url)
    isolated.pq.settings = isolated.pq._pool.settings = settings


def traces(admin: psycopg.Connection[Any], what: str) -> list[tuple[int, int, int, str]]:
    """Job, attempt, process and note of the traces of a kind, in their order."""
    return admin.execute("SELECT job_id, attempt, pid, note FROM trace WHERE what = %s ORDER BY at", [what]).fetchall()


def wait_for_traces(admin: psycopg.Connection[Any], number: int, what: str) -> list[tuple[int, int, int, str]]:
    return (
        wait_until(lambda: len(found := traces(admin, what)) == number and found, PATIENCE, f"{number} × {what}") or []
    )


def alive(pid: int) -> bool:
    """Whether the process runs: neither gone nor a zombie that nobody has waited for yet."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    return False


def children_of(watched: Watched) -> list[int]:
    return [seat._child.pid for seat in watched.worker.children._seats if seat._child is not None]


def errors(admin: psycopg.Connection[Any], table: str = "job") -> list[tuple[int, str, str, str]]:
    """Job, type, message and traceback of the last error of each."""
    return admin.execute(
        f"SELECT id, errors->-1->>'type', errors->-1->>'message', errors->-1->>'traceback' FROM pgqueue.{table}"
        " WHERE jsonb_array_length(errors) > 0 ORDER BY id".encode()
    ).fetchall()


# What a handler finds


def test_a_job_of_an_isolated_task_runs_in_a_child_that_is_used_again(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    with running(app, queues=("apart",), concurrency=1) as watched:
        for number in range(3):
            isolated.good.enqueue(f"plain {number}")
            isolated.good_async.enqueue(f"async {number}")
        wait_for_count(admin, 6, "archive", "state = 'completed' AND attempt = 1")
        [child] = {pid for _, _, pid, _ in traces(admin, "end")}
        assert child not in (os.getpid(), 0)
        assert children_of(watched) == [child]
        assert [note for *_, note in traces(admin, "end")] == [f"{c} {n}" for n in range(3) for c in ("plain", "async")]
    wait_until(lambda: not alive(child), PATIENCE, "the child has left with its worker")


def test_there_are_as_many_children_as_jobs_at_once_and_no_more_than_the_concurrency(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    isolated.gated.enqueue_many([()] * 5)
    with running(app, queues=("apart",), concurrency=2) as watched:
        wait_for_traces(admin, 2, "start")
        admin.execute("INSERT INTO gate VALUES ('open')")
        wait_for_count(admin, 5, "archive")
        assert len(children_of(watched)) == 2
    assert {pid for _, _, pid, _ in traces(admin, "start")} == {pid for _, _, pid, _ in traces(admin, "end")}
    assert len({pid for _, _, pid, _ in traces(admin, "start")}) == 2


def test_a_handler_in_a_child_knows_its_own_job_and_enqueues_where_its_worker_works(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    job_id = isolated.about_itself.enqueue(7, note="a note")
    with running(app, queues=("apart",)):
        wait_for_count(admin, 2, "archive", "state = 'completed'")
    [(_, _, _, facts)] = traces(admin, "self")
    found = json.loads(facts)
    token = found.pop(5)
    assert found == [job_id, "apart", "about_itself", 1, 20, {"trace": "é😀"}, False, 7, "a note", True]
    assert token > 0
    assert [note for *_, note in traces(admin, "end")] == ["enqueued in a child"]


def test_what_a_handler_prints_in_a_child_comes_out_of_its_worker(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    isolated.printing.enqueue("from below")
    with running(app, queues=("apart",)):
        wait_for_count(admin, 1, "archive")
    said = capfd.readouterr()
    assert said.out.count("from below") == said.err.count("from below") == 1


@pytest.mark.parametrize("task", [isolated.failing, isolated.failing_async], ids=["plain", "async"])
def test_an_exception_in_a_child_is_one_failed_attempt_with_its_text(
    task: Any, app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    kinds = ("text", "long", "exit", "interrupt")
    ids = {kind: task.enqueue(kind) for kind in kinds}
    snoozed = task.enqueue("snooze")
    with running(app, queues=("apart",), concurrency=1) as watched:
        wait_for_count(admin, 5, "job", "run_at IS NOT NULL")
        [child] = children_of(watched)
        assert alive(child), "an exception has ended the child"
        assert {event.facts["error"] for event in watched.seen(EventName.JOB_FAILED)} >= {"ValueError", "SystemExit"}
    found = {job_id: (kind, message, trace) for job_id, kind, message, trace in errors(admin)}
    assert {found[ids[kind]][0] for kind in kinds} == {"ValueError", "SystemExit", "KeyboardInterrupt"}
    _, message, trace = found[ids["text"]]
    assert message == "a\ufffdb"
    assert "isolated.py" in trace
    assert "raise errors[kind]" in trace
    assert count(admin, "job", "octet_length(errors::text) > 20000") == 0
    assert admin.execute("SELECT attempt, errors FROM pgqueue.job WHERE id = %s", [snoozed]).fetchall() == [(0, None)]


def test_a_cancelled_job_in_a_child_is_told(app: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    jobs = [isolated.listening.enqueue(), isolated.sleeping_async.enqueue(LONG)]
    with running(app, queues=("apart",), lease=10.0):
        wait_for_traces(admin, 2, "start")
        assert app.cancel(jobs) == dict.fromkeys(jobs, "requested")
        wait_for_count(admin, 2, "archive", "state = 'cancelled'")
    assert [job_id for job_id, *_ in traces(admin, "told") + traces(admin, "cleaned up")] == jobs


# What it may do to its process


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "its process was killed by SIGKILL"),
        ("segfault", "its process was killed by SIGSEGV"),
        ("leave", "its process has ended with status 0"),
        ("close", "its process has ended with status 1"),
        ("babble", "its process has written something else into its line to the worker"),
    ],
)
def test_a_job_that_ends_its_process_costs_itself_each_attempt_and_others_nothing(
    how: str, words: str, app: pgqueue.PgQueue, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "EXIT", 20.0)
    with running(app, queues=("apart",), concurrency=3) as watched:
        poison = isolated.dying.enqueue(how)
        isolated.good.enqueue_many([("bystander",)] * 20)
        wait_for_count(admin, 1, "dead_letter")
        wait_for_count(admin, 20, "archive", "state = 'completed' AND attempt = 1 AND lost = 0")
        assert watched.thread.is_alive()
        failed = watched.wait_for_all(2, EventName.JOB_FAILED, id=poison)
        assert [(event.facts["error"], event.facts["outcome"]) for event in failed] == [
            ("WorkerLost", "retry"),
            ("WorkerLost", "dead"),
        ]
    found = admin.execute("SELECT id, reason, attempt, jsonb_array_length(errors) FROM pgqueue.dead_letter").fetchall()
    assert found == [(poison, "worker lost", 2, 2)]
    [(_, kind, message, _)] = errors(admin, "dead_letter")
    assert (kind, message) == ("WorkerLost", f"worker lost: {words}")
    assert [attempt for job_id, attempt, *_ in traces(admin, "start") if job_id == poison] == [1, 2]


def test_nonsense_that_is_read_together_with_the_beginning_of_its_job_ends_the_process_too(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = channel.Channel.receive

    def receive_late(line: channel.Channel) -> list[channel.Message]:
        time.sleep(1.0)
        return receive(line)

    monkeypatch.setattr(channel.Channel, "receive", receive_late)
    poison = isolated.dying.enqueue("babble")
    with running(app, queues=("apart",), concurrency=1):
        wait_for_count(admin, 1, "dead_letter", f"id = {poison} AND reason = 'worker lost' AND attempt = 2")


def test_a_copy_that_a_job_forks_cannot_complete_it(app: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    isolated.forking.enqueue()
    with running(app, queues=("apart",)):
        wait_for_count(admin, 1, "dead_letter", "reason = 'worker lost'")
    assert count(admin, "archive") == 0


def test_a_job_over_its_memory_limit_is_a_failed_attempt_and_the_next_one_is_not(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    greedy, modest = isolated.growing.enqueue(isolated.MIB * 4096), isolated.growing.enqueue(isolated.MIB)
    with running(app, queues=("apart",), concurrency=1):
        wait_for_count(admin, 1, "dead_letter")
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    [(job_id, kind, _, _)] = errors(admin, "dead_letter")
    assert (job_id, kind) == (greedy, "MemoryError")
    assert [(job_id, note) for job_id, _, _, note in traces(admin, "end")] == [(modest, str(isolated.MIB))]
    # A process that has run out of memory once is not used again.
    assert len({pid for _, _, pid, _ in traces(admin, "start")}) == 2


@pytest.mark.parametrize("task", ["sleeping", "sleeping_async"])
def test_a_timeout_in_a_child_is_a_failed_attempt_and_ends_the_process_and_what_it_has_started(
    task: str, app: pgqueue.PgQueue, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "UNWIND", 20.0)
    job_id = app.enqueue(task, [LONG], queue="apart", timeout=4.0, max_attempts=5)
    with running(app, queues=("apart",)) as watched:
        wait_for_count(admin, 1, "job", "attempt = 1 AND run_at IS NOT NULL")
        [(_, kind, message, _)] = errors(admin)
        assert kind == "TimeoutError"
        [(_, _, child, below)] = traces(admin, "start")
        if task == "sleeping":
            assert message == "the job ran for longer than its timeout of 4 s: its process was killed"
            assert not alive(child)
            wait_until(lambda: not alive(int(below)), PATIENCE, "what the job has started is gone")
        else:
            assert [found for found, *_ in traces(admin, "cleaned up")] == [job_id]
        assert watched.wait_for(EventName.JOB_FAILED, id=job_id).facts["error"] == "TimeoutError"
        isolated.good.enqueue("afterwards")
        wait_for_count(admin, 1, "archive")


def test_a_job_whose_worker_was_lost_runs_in_a_child_and_one_that_cannot_be_imported_in_a_thread(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    here: list[int] = []

    @app.task(name="local", queue="shared")
    def local() -> None:
        here.append(os.getpid())

    try:
        jobs = [isolated.shared.enqueue(), local.enqueue()]
        admin.execute("UPDATE pgqueue.job SET lost = 1")
        fresh = isolated.shared.enqueue()
        with running(app, queues=("shared",)):
            wait_for_count(admin, 3, "archive", "state = 'completed'")
        places = {job_id: pid for job_id, _, pid, _ in traces(admin, "end")}
        assert places[fresh] == os.getpid()
        assert places[jobs[0]] != os.getpid()
        assert here == [os.getpid()]
    finally:
        del app.tasks._tasks["local"]


# The end of the worker


def test_a_graceful_stop_lets_a_child_finish_within_the_grace(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    isolated.gated.enqueue()
    with running(app, queues=("apart",), grace=PATIENCE) as watched:
        [(_, _, child, _)] = wait_for_traces(admin, 1, "start")
        watched.worker.stop()
        watched.wait_for(EventName.WORKER_STOPPING)
        admin.execute("INSERT INTO gate VALUES ('open')")
        assert watched.join() == 0
    assert count(admin, "archive", "attempt = 1 AND state = 'completed'") == 1
    wait_until(lambda: not alive(child), PATIENCE, "the child has left with its worker")


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("how", ["the grace is over", "a second stop"])
def test_a_stop_that_cannot_wait_kills_the_child_before_it_gives_the_job_back(
    how: str, app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    isolated.sleeping.enqueue(LONG)
    with running(app, queues=("apart",), grace=0.0 if how == "the grace is over" else LONG) as watched:
        [(_, _, child, below)] = wait_for_traces(admin, 1, "start")
        alive_at_release: list[bool] = []
        app.events.subscribe(
            lambda event: alive_at_release.append(alive(child)), wants=lambda name: name is EventName.JOBS_RELEASED
        )
        watched.worker.stop()
        watched.wait_for(EventName.WORKER_STOPPING)
        if how == "a second stop":
            watched.worker.stop()
        assert watched.join() == 0
    assert alive_at_release == [False]
    assert count(admin, "job", "attempt = 0 AND lease_id IS NULL AND lost = 0") == 1
    wait_until(lambda: not alive(int(below)), PATIENCE, "what the job has started is gone")


def test_a_job_in_a_child_whose_lease_is_lost_is_told_and_then_killed(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    isolated.sleeping.enqueue(LONG)
    with running(app, queues=("apart",), lease=6.0, concurrency=1) as watched:
        [(_, _, child, _)] = wait_for_traces(admin, 1, "start")
        admin.execute("UPDATE pgqueue.lease SET worker_id = NULL, expires_at = 'infinity'")
        watched.wait_for(EventName.LEASE_LOST)
        wait_until(lambda: not alive(child), PATIENCE, "the child is gone")
    assert count(admin, "job", "attempt = 1 AND lease_id IS NOT NULL AND errors IS NULL") == 1


def test_a_child_ends_with_all_it_has_started_once_its_line_to_the_worker_is_cut(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    isolated.sleeping.enqueue(LONG)
    with running(app, queues=("apart",)) as watched:
        [(_, _, child, below)] = wait_for_traces(admin, 1, "start")
        [seat] = watched.worker.children._seats
        assert seat._child is not None
        seat._child._channel._socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: not alive(child) and not alive(int(below)), PATIENCE, "both are gone")
        wait_for_count(admin, 1, "job", "attempt = 1 AND errors->0->>'type' = 'WorkerLost'")


# Who cannot be isolated


def test_a_worker_refuses_an_isolated_task_that_no_other_process_could_import(pq: pgqueue.PgQueue) -> None:
    @pq.task(name="local", queue="q", isolation="process")
    def local() -> None: ...

    with pytest.raises(ConfigurationError, match='task local cannot run with isolation="process"'):
        Worker(pq, WorkerOptions())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"isolation": "fork"}, 'isolation must be "thread" or "process"'),
        ({"isolation": "process", "memory_limit": 0}, "memory_limit"),
        ({"memory_limit": 1000}, 'memory_limit needs isolation="process"'),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], words: str, pq: pgqueue.PgQueue) -> None:
    with pytest.raises(ConfigurationError, match=words):
        pq.task(name="work", **options)(len)


@pytest.mark.parametrize("option", [{"isolation": "process"}, {"memory_limit": 10}])
def test_isolation_belongs_to_the_task_and_not_to_a_call(option: dict[str, Any], app: pgqueue.PgQueue) -> None:
    with pytest.raises(ConfigurationError, match="belongs to the task"):
        isolated.shared.options(**option)
    with pytest.raises(ConfigurationError, match="belongs to the task"):
        app.enqueue("shared", **option)


def test_a_child_survives_the_stop_signals_that_a_supervisor_sends_to_the_whole_service(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    isolated.gated.enqueue()
    with running(app, queues=("apart",)):
        [(_, _, child, _)] = wait_for_traces(admin, 1, "start")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(child, number)
        admin.execute("INSERT INTO gate VALUES ('open')")
        wait_for_count(admin, 1, "archive", "state = 'completed' AND attempt = 1")
    assert [pid for _, _, pid, _ in traces(admin, "end")] == [child]


def test_a_child_that_died_between_two_jobs_costs_neither_of_them(
    app: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    with running(app, queues=("apart",), concurrency=1) as watched:
        isolated.good.enqueue("first")
        wait_for_count(admin, 1, "archive")
        [child] = children_of(watched)
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: not alive(child), PATIENCE, "the idle child is gone")
        isolated.good.enqueue("second")
        wait_for_count(admin, 2, "archive", "state = 'completed' AND attempt = 1")
        assert not watched.seen(EventName.JOB_FAILED)

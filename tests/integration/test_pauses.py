"""Pauses of queues and of tasks: what waits keeps its place, and a pause with an end ends by itself."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]


def enqueue(pq: pgqueue.PgQueue, task: str, **options: Any) -> int:
    return pq.enqueue(task, queue="q", **options)


def claimed(pq: pgqueue.PgQueue) -> list[int]:
    return [job.id for job in pq.claim("q", limit=100)]


def over(admin: Admin, task: str | None) -> None:
    """Let the end of the pause be a second ago."""
    if task is None:
        admin.execute("UPDATE pgqueue.queue SET paused_until = clock_timestamp() - interval '1 s'")
    else:
        admin.execute(
            "UPDATE pgqueue.queue SET paused_tasks = jsonb_set(paused_tasks, ARRAY[%s, 'until'],"
            " to_jsonb(extract(epoch FROM clock_timestamp() - interval '1 s')))",
            [task],
        )


def test_jobs_of_a_paused_task_keep_their_places_and_others_run(pq: pgqueue.PgQueue) -> None:
    first, other, second, late = (enqueue(pq, task) for task in ("mail", "report", "mail", "report"))
    pq.pause("q", task="mail")
    assert claimed(pq) == [other, late]
    third = enqueue(pq, "mail")
    assert claimed(pq) == []
    assert pq.resume("q", task="mail") is True
    assert claimed(pq) == [first, second, third]


@pytest.mark.parametrize("task", [None, "mail"])
def test_a_pause_ends_by_itself_by_the_clock_of_the_database(
    task: str | None, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    job_id = enqueue(pq, "mail")
    pq.pause("q", task=task, seconds=timedelta(hours=1))
    assert claimed(pq) == []
    over(admin, task)
    [status] = pq.status(["q"])
    assert (status.paused_at, status.paused_until, status.paused_tasks) == (None, None, [])
    assert claimed(pq) == [job_id]


@pytest.mark.parametrize("task", [None, "work"])
@pytest.mark.parametrize("when", ["before the worker", "under the worker"])
def test_an_idle_worker_goes_on_within_about_a_second_after_the_end_of_a_pause(
    when: str, task: str | None, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    work = define(pq, "plain", lambda: None)
    if when == "before the worker":
        pq.pause("q", task=task, seconds=2)
        work.enqueue()
    with running(pq, poll=60) as worker:
        if when == "under the worker":
            wait_until(worker.worker._hearing, PATIENCE, "the worker hears")
            pq.pause("q", task=task, seconds=2)
            work.enqueue()
        [status] = pq.status(["q"])
        until = status.paused_until if task is None else status.paused_tasks[0].until
        wait_for_count(admin, 1, "archive", "state = 'completed'")
    [(finished_at,)] = admin.execute("SELECT finished_at FROM pgqueue.archive").fetchall()
    assert until is not None
    # The poll would come after a minute; ten seconds are for a busy machine.
    assert timedelta(0) <= finished_at - until < timedelta(seconds=10)


def test_a_resume_wakes_a_worker_at_once(pq: pgqueue.PgQueue, admin: Admin) -> None:
    work = define(pq, "plain", lambda: None)
    pq.pause("q", task="work")
    with running(pq, poll=60) as worker:
        wait_until(worker.worker._hearing, PATIENCE, "the worker hears")
        work.enqueue()
        pq.resume("q", task="work")
        wait_for_count(admin, 1, "archive", "state = 'completed'")


def test_the_last_pause_decides_about_the_end_and_the_first_about_the_beginning(pq: pgqueue.PgQueue) -> None:
    until = datetime.now(UTC) + timedelta(days=1)
    pq.pause("q", until=until)
    [first] = pq.status(["q"])
    assert first.paused_until == until
    pq.pause("q")
    [second] = pq.status(["q"])
    assert (second.paused_at, second.paused_until) == (first.paused_at, None)
    pq.pause("q", task="mail", until=until)
    pq.pause("q", task="mail", seconds=60)
    [pause] = pq.status(["q"])[0].paused_tasks
    assert pause.until is not None
    assert pause.until < until


def test_tasks_stay_paused_when_their_queue_is_resumed(pq: pgqueue.PgQueue) -> None:
    mail, report = enqueue(pq, "mail"), enqueue(pq, "report")
    pq.pause("q", task="mail")
    pq.pause("q")
    assert claimed(pq) == []
    assert pq.resume("q") is True
    assert pq.resume("q") is False
    assert claimed(pq) == [report]
    assert pq.resume("q", task="report") is False
    assert pq.resume("q", task="mail") is True
    assert pq.resume("q", task="mail") is False
    assert claimed(pq) == [mail]


def test_two_pauses_at_once_are_both_kept(pq: pgqueue.PgQueue, database: str) -> None:
    pq.pause("q", task="zero", seconds=60)
    with psycopg.connect(database) as caller:
        pq.run(pq.pause_op("q", "one", None, None), caller)
        second = threading.Thread(target=pq.pause, args=("q",), kwargs={"task": "two"})
        second.start()
        wait_until(lambda: waiting_for_a_lock(database), PATIENCE, "the second pause waits for the first")
        caller.commit()
        second.join(PATIENCE)
    assert [pause.task for pause in pq.status(["q"])[0].paused_tasks] == ["one", "two", "zero"]


def waiting_for_a_lock(database: str) -> bool:
    with psycopg.connect(database, autocommit=True) as look:
        row = look.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    return row is not None and row[0] > 0


def test_a_worker_that_drains_leaves_the_jobs_of_a_paused_task(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran: list[str] = []
    paused = define(pq, "plain", lambda: ran.append("paused"), name="paused")
    open_ = define(pq, "plain", lambda: ran.append("open"), name="open")
    failing = define(pq, "plain", lambda: 1 / 0, name="failing", retry=pgqueue.Fixed(3600))
    failing.enqueue()
    pq.fail(pq.claim("q"), "not yet")
    pq.pause("q", task="paused")
    pq.pause("q", task="failing")
    paused.enqueue()
    open_.enqueue()
    with running(pq, drain=True) as worker:
        assert worker.join() == 0
    assert ran == ["open"]
    assert count(admin, "job") == 2


@pytest.mark.parametrize(
    "value",
    ["[]", "5", '"mail"', '{"mail": 5}', '{"mail": {"until": "soon"}}', '{"mail": {"at": "x", "until": null}}',
     '{"mail": {"at": 1e400, "until": 1e400}}', '{"mail": {"at": -1e400, "until": -1e400}}'],
)  # fmt: skip
def test_pauses_written_by_hand_neither_fail_claims_nor_lists(value: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    define(pq, "plain", lambda: None)
    other, mail = enqueue(pq, "other"), enqueue(pq, "mail")
    admin.execute("INSERT INTO pgqueue.queue (name, paused_tasks) VALUES ('q', %s)", [value])
    tasks = [pause.task for pause in pq.status(["q"])[0].paused_tasks]
    assert claimed(pq) == ([other] if tasks else [other, mail])
    with running(pq) as worker:
        turn = worker.loops()["maintenance"]
        wait_until(turn.started.is_set, PATIENCE, "maintenance works")
        assert not worker.seen(pgqueue.EventName.LOOP_FAILED)
    pq.pause("q", task="third")
    assert "third" in [pause.task for pause in pq.status(["q"])[0].paused_tasks]
    pq.resume("q", task="third")
    pq.resume("q", task="mail")
    assert pq.status(["q"])[0].paused_tasks == []


@pytest.mark.parametrize(
    "options",
    [{"until": datetime(2030, 1, 1)}, {"until": 5}, {"seconds": -1}, {"seconds": True}, {"task": ""},  # noqa: DTZ001
     {"seconds": 1, "until": datetime.now(UTC)}],
)  # fmt: skip
def test_a_pause_that_makes_no_sense_is_refused_before_anything_is_sent(options: dict[str, Any]) -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    with pytest.raises(pgqueue.ConfigurationError):
        pq.pause("q", **options)


def test_pauses_are_told(pq: pgqueue.PgQueue) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    pq.events.subscribe(lambda event: events.append((event.name.value, dict(event.facts))))
    pq.pause("q", task="mail", seconds=5)
    pq.resume("q", task="mail")
    assert events == [
        ("queue.paused", {"queue": "q", "task": "mail", "seconds": 5}),
        ("queue.resumed", {"queue": "q", "task": "mail"}),
    ]


async def test_the_async_client_pauses_and_resumes(database: str) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        job_id = await pq.enqueue("mail", queue="q")
        await pq.pause("q", task="mail", seconds=60)
        assert await pq.claim("q") == []
        assert [pause.task for pause in (await pq.status(["q"]))[0].paused_tasks] == ["mail"]
        assert await pq.resume("q", task="mail") is True
        assert [job.id for job in await pq.claim("q")] == [job_id]

"""Workers and schedules: written at their start, ticked in time, by whoever is there, and by nobody too often."""

from __future__ import annotations

import itertools
import statistics
import threading
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.events import EventName
from pgqueue.worker import ticker
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, running

Admin = psycopg.Connection[Any]
IN_TIME = 0.2
"""Seconds that the luckiest of many ticks may be late, even on a machine without time to spare."""


def asked(watched: Watched) -> list[str]:
    """The operations that the ticker of a worker begins from now on."""
    [part] = [part for part in watched.worker._helpers if isinstance(part, ticker.Ticker)]
    found: list[str] = []
    ask = part._ask

    def counting(op: Any) -> Any:
        found.append(op.__name__)
        return ask(op)

    part._ask = counting  # type: ignore[method-assign]
    return found


def test_a_worker_writes_the_schedules_of_its_code_and_its_handler_knows_the_tick(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ticks: list[datetime | None] = []

    @pq.schedule("* * * * * *", args=["eu"])
    @pq.task(name="work", queue="q")
    def work(region: str) -> None:
        ticks.append(pgqueue.current_job().scheduled_for)

    with running(pq) as watched:
        watched.wait_for(EventName.SCHEDULE_DEFINED, names=["work"])
        wait_until(lambda: len(ticks) >= 3, PATIENCE, "three ticks")
        event = watched.wait_for(EventName.SCHEDULE_TICKED, schedule="work", task="work")
    assert set(event.facts) == {"schedule", "task", "ids", "tick", "late"}
    known = sorted(tick for tick in ticks if tick is not None)
    steps = {later - earlier for earlier, later in itertools.pairwise(known)}  # a busy machine may miss a tick
    assert all(step >= timedelta(seconds=1) and step % timedelta(seconds=1) == timedelta(0) for step in steps)
    assert not watched.seen(EventName.LOOP_FAILED)


def test_a_tick_makes_its_job_soon_after_its_time(pq: pgqueue.PgQueue, admin: Admin) -> None:
    """As it is by itself, and asking no oftener than it must."""
    pq.add_schedule("s", "work", "* * * * * *", queue="elsewhere")
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq) as watched:
        wait_until(lambda: len(watched.seen(EventName.SCHEDULE_TICKED)) >= 2, PATIENCE, "it ticks")
        looks = asked(watched)
        before = len(watched.seen(EventName.SCHEDULE_TICKED))
        wait_until(lambda: len(watched.seen(EventName.SCHEDULE_TICKED)) >= before + 9, PATIENCE, "more ticks")
        # Two looks a tick: one that finds it due, one that says when the next is. A busy machine may wake it too early.
        number = len(looks)
    statement = (
        "SELECT extract(epoch FROM created_at - (headers->>'scheduled_for')::timestamptz)::float8 FROM pgqueue.job"
    )
    late = [seconds for (seconds,) in admin.execute(statement).fetchall()]
    print(
        f"\nlate by {statistics.median(late) * 1000:.1f} ms, at most {max(late) * 1000:.1f}; {number} looks for 9 ticks"
    )
    assert 0 <= min(late) < IN_TIME
    assert number < 40


def test_with_nothing_to_tick_a_worker_looks_once_in_a_while(pq: pgqueue.PgQueue) -> None:
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq) as watched:
        wait_until(watched.worker._hearing, PATIENCE, "it hears")
        watched.loops()["schedules"].started.wait(PATIENCE)
        watched.loops()["schedules"].poke()
        looks = asked(watched)
        wait_until(lambda: looks, 2 * ticker.QUIET_PERIOD + PATIENCE, "a look")
        assert set(looks) == {"tick"}
        rest = watched.loops()["schedules"]._rest(ticker.ops.Round())
        assert rest >= 0.8 * ticker.QUIET_PERIOD


def test_what_is_added_changed_or_resumed_is_heard_at_once(
    pq: pgqueue.PgQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticker, "QUIET_PERIOD", 3600.0)
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq) as watched:
        wait_until(watched.worker._hearing, PATIENCE, "it hears")
        pq.add_schedule("s", "work", every=1)
        watched.wait_for(EventName.SCHEDULE_TICKED, schedule="s")
        pq.change_schedule("s", every=3600)
        wait_until(lambda: watched.loops()["schedules"]._poked.is_set() is False, PATIENCE, "it has looked")
        pq.pause_schedule("s")
        pq.change_schedule("s", every=1)
        pq.resume_schedule("s")
        before = len(watched.seen(EventName.SCHEDULE_TICKED))
        wait_until(lambda: len(watched.seen(EventName.SCHEDULE_TICKED)) > before, PATIENCE, "it ticks again")


def test_without_notifications_a_worker_finds_new_schedules_by_itself(database: str) -> None:
    with pgqueue.PgQueue(database, notify=False) as pq:
        pq.task(name="work", queue="q")(lambda: None)
        with running(pq) as watched:
            pq.add_schedule("s", "work", every=1)
            watched.wait_for(EventName.SCHEDULE_TICKED, schedule="s")


def test_ticks_come_while_all_slots_are_busy(pq: pgqueue.PgQueue, admin: Admin) -> None:
    begun, let_go = threading.Event(), threading.Event()

    @pq.schedule("* * * * * *")
    @pq.task(name="work", queue="q")
    def work() -> None:
        begun.set()
        assert let_go.wait(PATIENCE)

    with running(pq, concurrency=1) as watched:
        assert begun.wait(PATIENCE)
        before = len(watched.seen(EventName.SCHEDULE_TICKED))
        wait_until(lambda: len(watched.seen(EventName.SCHEDULE_TICKED)) >= before + 5, PATIENCE, "five ticks")
        pq.run(ticker.ops.pause("work"))
        let_go.set()
        wait_until(lambda: count(admin, "job") == 0, PATIENCE, "all are done")
    statement = "SELECT (headers->>'scheduled_for')::timestamptz FROM pgqueue.archive ORDER BY id"
    ticks = [tick for (tick,) in admin.execute(statement).fetchall()]
    assert {later - earlier for earlier, later in itertools.pairwise(ticks)} == {timedelta(seconds=1)}


def test_a_worker_without_schedules_writes_and_ticks_none(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran = threading.Event()
    pq.schedule("* * * * * *")(pq.task(name="work", queue="q")(ran.set))
    pq.add_schedule("s", "work", every=1, queue="q")
    with running(pq, schedules=False) as watched:
        assert "schedules" not in watched.loops()
        pq.enqueue("work", queue="q")
        assert ran.wait(PATIENCE)
        with running(pq) as other:
            other.wait_for(EventName.SCHEDULE_TICKED, schedule="work")
            other.wait_for(EventName.SCHEDULE_TICKED, schedule="s")
    assert not other.seen(EventName.LOOP_FAILED)


def test_ticks_that_make_no_job_are_said(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.add_schedule("missed", "work", every=3600, missed="skip", queue="elsewhere")
    pq.add_schedule("overlapping", "work", every=1, overlap=False, queue="elsewhere")
    pq.add_schedule("broken", "work", every=1)
    admin.execute(
        "UPDATE pgqueue.schedule SET starts_at = now() - interval '10 h', ticked_to = now() - interval '5.5 h'"
    )
    admin.execute("UPDATE pgqueue.schedule SET ticked_to = now() WHERE name = 'overlapping'")
    admin.execute("UPDATE pgqueue.schedule SET tz = 'Mars', cron = '* * * * *', every = NULL WHERE name = 'broken'")
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq) as watched:
        event = watched.wait_for(EventName.SCHEDULE_SKIPPED, schedule="missed", reason="missed")
        assert event.facts["count"] == 5
        watched.wait_for(EventName.SCHEDULE_SKIPPED, schedule="overlapping", reason="overlap", count=1)
        failed = watched.wait_for(EventName.SCHEDULE_FAILED, schedule="broken")
        assert "Mars" in failed.facts["detail"]
        before = len(watched.seen(EventName.SCHEDULE_SKIPPED))
        wait_until(lambda: len(watched.seen(EventName.SCHEDULE_SKIPPED)) > before + 1, PATIENCE, "the others go on")
        assert len(watched.seen(EventName.SCHEDULE_FAILED)) == 1
        assert not watched.seen(EventName.LOOP_FAILED)


def test_a_schedule_that_is_held_by_an_open_transaction_is_not_asked_for_all_the_time(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.add_schedule("s", "work", every=1, queue="elsewhere")
    pq.add_schedule("other", "work", every=1, queue="elsewhere")
    pq.task(name="work", queue="q")(lambda: None)
    with running(pq) as watched:
        watched.wait_for(EventName.SCHEDULE_TICKED, schedule="s")
        with psycopg.connect(str(pq.settings.database_url)) as holder:
            pq.run_schedule("s", using=holder)
            looks = asked(watched)
            before = len(watched.seen(EventName.SCHEDULE_TICKED, schedule="other"))
            wait_until(
                lambda: len(watched.seen(EventName.SCHEDULE_TICKED, schedule="other")) >= before + 4,
                PATIENCE,
                "the other goes on",
            )
            assert len(looks) < 80, "four seconds or more"
            holder.rollback()
        before = len(watched.seen(EventName.SCHEDULE_TICKED, schedule="s"))
        wait_until(lambda: len(watched.seen(EventName.SCHEDULE_TICKED, schedule="s")) > before, PATIENCE, "it goes on")

"""What code, two versions of it, and operators say of schedules; and rows that nobody can read."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.errors import ArgumentsDoNotBind, ConfigurationError, PayloadError, UnknownSchedule
from pgqueue.ops import Op, Rows, Step
from pgqueue.ops import schedule as ops
from tests.schedules import Admin, ago, define, only, silent, tick, version
from tests.workers import PATIENCE, count


@pytest.fixture
def minutely(pq: pgqueue.PgQueue) -> pgqueue.PgQueue:
    pq.add_schedule("minutely", "work", every=60, queue="q", args=[1])
    tick(pq)
    return pq


# Code and run time


def test_what_an_operator_changed_stays_until_the_code_says_something_new(database: str, admin: Admin) -> None:
    with version(database, "0 3 * * *", tz="Europe/Berlin") as old:
        assert define(old) == ["nightly"]
        old.change_schedule("nightly", cron="0 5 * * *")
        old.pause_schedule("nightly")
        assert define(old) == [], "a restart of the same code"
        found = only(old)
        assert (found.cron, found.tz, found.state, found.next_at) == ("0 5 * * *", "Europe/Berlin", "paused", None)
    with version(database, "0 4 * * *", tz="Europe/Berlin") as new:
        assert define(new) == ["nightly"]
        assert (only(new).cron, only(new).state) == ("0 4 * * *", "paused")
        new.resume_schedule("nightly")
        found = only(new)
        assert found.state == "ticking"
        assert found.next_at is not None
        assert found.next_at > datetime.now(UTC)


def test_two_versions_do_not_turn_each_others_definitions_back(database: str, admin: Admin) -> None:
    with version(database, "0 3 * * *") as old, version(database, "0 4 * * *") as new:
        assert define(old) == ["nightly"]
        assert define(new) == ["nightly"]
        for _ in range(3):  # both restart, and affirm
            assert define(old) == define(new) == []
        assert only(old).cron == "0 4 * * *"
        assert only(old).state == "ticking"
        silent(admin)  # a rollback: the last worker of the new version has gone
        assert define(old) == ["nightly"]
        assert define(new) == [], "one that is late, still alive"
        assert only(old).cron == "0 3 * * *"
        with version(database, "0 6 * * *") as newest:
            assert define(newest) == ["nightly"]
            assert define(old) == define(new) == []
            assert only(old).cron == "0 6 * * *"
    [(number,)] = admin.execute("SELECT version FROM pgqueue.schedule").fetchall()
    assert number == 4, "written four times"


def test_a_definition_that_was_affirmed_at_the_last_moment_is_not_turned_back(database: str, admin: Admin) -> None:
    with version(database, "0 3 * * *") as old, version(database, "0 4 * * *") as new:
        define(old)
        define(new)
        silent(admin)
        op = ops.define(old.code_schedules)
        step = next(op)
        assert isinstance(step, Step)
        rows = old.run(_step(step))
        assert rows == [("nightly",)], "nobody has said the newer one for long"
        step = op.send(rows)
        assert isinstance(step, Step)
        define(new)  # but now somebody does
        assert old.run(_step(step)) == []
        assert only(old).cron == "0 4 * * *"


def _step(step: Step) -> Op[Rows]:
    return (yield step)


def test_processes_that_start_together_write_a_definition_once(database: str, admin: Admin) -> None:
    barrier = threading.Barrier(6)
    written: list[list[str]] = []

    def start() -> None:
        with version(database, "0 3 * * *") as pq:
            barrier.wait(PATIENCE)
            written.append(define(pq))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(written) == [[], [], [], [], [], ["nightly"]]
    assert admin.execute("SELECT version FROM pgqueue.schedule").fetchall() == [(1,)]


def test_other_options_with_the_same_timing_do_not_lose_or_move_ticks(database: str, admin: Admin) -> None:
    with version(database, "* * * * *") as old, version(database, "* * * * *", missed="all") as new:
        define(old)
        ago(admin, "nightly", 150)
        define(new)
        [ticked] = tick(new).ticked
        assert len(ticked.ids) >= 2


def test_what_disappears_from_the_code_stops_with_the_last_worker_that_had_it(database: str, admin: Admin) -> None:
    with version(database, "* * * * *") as old, pgqueue.PgQueue(database) as new:
        define(old)
        tick(old)
        ago(admin, "nightly", 61)
        assert tick(new) == ops.Round(), "it is not in this code"
        assert len(tick(old).ticked) == 1
        with pytest.raises(ConfigurationError, match="code of live workers"):
            new.remove_schedule("nightly")
        silent(admin)
        assert only(new).state == "not in code"
        assert only(new).next_at is None
        assert new.run(ops.forget()) == []
        define(old)  # the rollback: it goes on
        assert only(new).state == "ticking"
        silent(admin, 31 * 86400)
        assert new.run(ops.forget()) == ["nightly"]
        define(old)
        silent(admin)
        new.remove_schedule("nightly")
        assert new.schedules() == []


def test_code_takes_over_a_name_that_was_made_at_run_time_and_not_the_other_way_round(
    database: str, admin: Admin
) -> None:
    with version(database, "0 3 * * *") as pq:
        assert pq.add_schedule("nightly", "else", "0 9 * * *")
        assert define(pq) == ["nightly"]
        assert (only(pq).task, only(pq).in_code) == ("work", True)
        with pytest.raises(ConfigurationError, match="comes from code"):
            pq.add_schedule("nightly", "else", "0 9 * * *")


# At run time


def test_a_schedule_made_again_is_left_as_it_is_and_another_one_replaces_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    assert pq.add_schedule("s", "work", every=60, args=[{"a": 1}], queue="q")
    ago(admin, "s", 30)
    before = admin.execute("SELECT * FROM pgqueue.schedule").fetchall()
    assert not pq.add_schedule("s", "work", every=timedelta(minutes=1), args=[{"a": 1}], queue="q")
    assert admin.execute("SELECT * FROM pgqueue.schedule").fetchall() == before
    assert pq.add_schedule("s", "work", every=60, args=[{"a": 2}], queue="q")
    started = "SELECT starts_at < clock_timestamp() - interval '20 s', args::text FROM pgqueue.schedule"
    assert admin.execute(started).fetchall() == [(True, '[{"a":2}]')], "the interval goes on as it was"
    assert pq.add_schedule("s", "work", "0 3 * * *", tz="America/New_York")
    found = only(pq)
    assert (found.every, found.cron, found.tz, found.queue) == (None, "0 3 * * *", "America/New_York", "default")


def test_a_schedule_begins_with_the_callers_commit_and_run_by_hand_too(pq: pgqueue.PgQueue, admin: Admin) -> None:
    database = str(pq.settings.database_url)
    with psycopg.connect(database) as mine:
        pq.add_schedule("s", "work", every=60, using=mine)
        assert pq.run_schedule("s", using=mine)
        assert pq.schedules() == []
        mine.rollback()
        assert pq.schedules() == []
        pq.add_schedule("s", "work", every=60, using=mine)
        with pytest.raises(UnknownSchedule):
            pq.run_schedule("x", using=mine)
        with pytest.raises(ConfigurationError):
            pq.change_schedule("s", every=-1, using=mine)
        job_id = pq.run_schedule("s", using=mine)
        assert count(admin, "job") == 0
        mine.commit()
    assert admin.execute("SELECT id FROM pgqueue.job").fetchall() == [(job_id,)]
    assert only(pq).last_job_id == job_id


def test_ticks_of_a_pause_do_not_come(minutely: pgqueue.PgQueue, admin: Admin) -> None:
    minutely.change_schedule("minutely", missed="all")
    minutely.pause_schedule("minutely")
    minutely.pause_schedule("minutely")
    ago(admin, "minutely", 10 * 60 + 30)
    assert tick(minutely) == ops.Round()
    assert minutely.run_schedule("minutely") is not None, "paused or not"
    minutely.resume_schedule("minutely")
    found = tick(minutely)
    assert [ticked.ids for ticked in found.ticked] == [[]]
    assert count(admin, "job") == 1
    ahead = tick(minutely).next_in
    assert ahead is not None
    assert 0 < ahead <= 31, "in its old rhythm"
    minutely.resume_schedule("minutely")  # nothing is lost where there was no pause
    ago(admin, "minutely", 61)
    minutely.resume_schedule("minutely")
    assert [len(ticked.ids) for ticked in tick(minutely).ticked] == [1]


def test_changes_are_checked_against_what_is_there(pq: pgqueue.PgQueue) -> None:
    pq.add_schedule("s", "work", "0 3 * * *", tz="Europe/Berlin", missed="all", grace=5)
    pq.change_schedule("s", every=90)
    found = only(pq)
    assert (found.cron, found.every, found.tz, found.missed, found.grace) == (None, 90.0, "UTC", "all", 5.0)
    with pytest.raises(ConfigurationError, match="no time zone"):
        pq.change_schedule("s", tz="Europe/Berlin")
    pq.change_schedule("s", cron="0 4 * * *", tz="Europe/Paris", overlap=False)
    pq.change_schedule("s", tz="Asia/Tokyo")
    found = only(pq)
    assert (found.cron, found.every, found.tz, found.overlap) == ("0 4 * * *", None, "Asia/Tokyo", False)
    for changes, said in (
        ({"crno": "* * * * *"}, "did you mean 'cron'"),
        ({}, "change what"),
        ({"missed": "x"}, "missed"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            pq.change_schedule("s", **changes)  # type: ignore[arg-type]


def test_an_unknown_name_is_answered_with_near_ones(minutely: pgqueue.PgQueue) -> None:
    calls = (
        minutely.pause_schedule,
        minutely.resume_schedule,
        minutely.run_schedule,
        minutely.remove_schedule,
        lambda name: minutely.change_schedule(name, every=5),
    )
    for call in calls:
        with pytest.raises(UnknownSchedule, match=r"no schedule 'minutly'; similar: minutely"):
            call("minutly")


def test_what_cannot_be_is_said_where_it_is_defined(pq: pgqueue.PgQueue) -> None:
    @pq.task(name="work", queue="q")
    def work(number: int) -> None: ...

    daily = "0 3 * * *"
    with pytest.raises(ArgumentsDoNotBind):
        pq.schedule(daily)(work)
    with pytest.raises(PayloadError):
        pq.schedule(daily, args=[object()])(work)
    with pytest.raises(ConfigurationError, match=r"above pq\.task"):
        pq.schedule(daily)(lambda: None)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="leave out delay"):
        pq.schedule(daily, args=[1])(work.options(delay=5))
    with pytest.raises(ConfigurationError, match=r"no time zone 'Mars'"):
        pq.schedule(daily, tz="Mars", args=[1])
    with pytest.raises(ConfigurationError, match="schedule name"):
        pq.schedule(daily, name="", args=[1])(work)
    with pytest.raises(ConfigurationError, match="overlap"):
        pq.schedule(daily, overlap=None)  # type: ignore[arg-type]
    pq.schedule(daily, args=[1])(work)
    pq.schedule(daily, args=[1])(work)  # a module that is loaded twice
    with pytest.raises(ConfigurationError, match="two schedules are named 'work'"):
        pq.schedule(daily, args=[2])(work)
    with pytest.raises(ArgumentsDoNotBind):
        pq.add_schedule("s", "work", daily)
    with pytest.raises(ConfigurationError, match=r"did you mean 'priority'"):
        pq.add_schedule("s", "work", daily, args=[1], prioritty=3)


@pytest.mark.parametrize(
    "broken",
    [
        "cron = 'nonsense'",
        "tz = 'Mars'",
        "every = 60",
        "cron = NULL",
        "ticked_to = '-infinity'",
        "missed = 'perhaps'",
        "grace = 'NaN', ticked_to = '2020-01-01'",
        "cron = NULL, every = 'infinity'",
    ],
)
def test_a_row_that_nobody_can_read_harms_no_other(broken: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.add_schedule("bad", "work", "* * * * *")
    pq.add_schedule("good", "work", "* * * * *")
    tick(pq)
    ago(admin, "bad", 61)
    ago(admin, "good", 61)
    admin.execute(f"UPDATE pgqueue.schedule SET {broken} WHERE name = 'bad'".encode())
    found = tick(pq)
    assert list(found.failed) == ["bad"]
    assert "\n" not in found.failed["bad"]
    assert [ticked.name for ticked in found.ticked] == ["good"]
    later = tick(pq, left_out=("bad",))
    assert later.next_in is not None
    assert later.next_in > 0
    assert {schedule.name for schedule in pq.schedules()} == {"bad", "good"}
    pq.change_schedule("bad", cron="* * * * *", every=None, tz="UTC", missed="once", grace=60)
    pq.remove_schedule("bad")


def test_a_row_written_by_hand_ticks(pq: pgqueue.PgQueue, admin: Admin) -> None:
    admin.execute("INSERT INTO pgqueue.schedule (name, task, every) VALUES ('mine', 'work', 60)")
    assert [ticked.ids for ticked in tick(pq).ticked] == [[]]
    ago(admin, "mine", 61)
    assert [len(ticked.ids) for ticked in tick(pq).ticked] == [1]
    assert pq.claim("default")[0].args == []


def test_a_look_without_schedules_is_one_statement_that_reads_nothing(pq: pgqueue.PgQueue, admin: Admin) -> None:
    op = ops.tick(["some", "of the code"])
    step = next(op)
    assert isinstance(step, Step)
    assert step.name == "schedule_next"
    with pytest.raises(StopIteration) as stop:
        op.send([])
    assert stop.value.value == ops.Round()


async def test_the_async_client_does_the_same(database: str, admin: Admin) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:

        @pq.schedule("0 3 * * *", tz="Europe/Berlin")
        @pq.task(name="work", queue="q")
        async def work() -> None: ...

        assert await pq.run(ops.define(pq.code_schedules)) == ["work"]
        assert await pq.add_schedule("s", work, every=60)
        assert not await pq.add_schedule("s", "work", every=60)
        await pq.change_schedule("s", every=120)
        await pq.pause_schedule("s")
        job_id = await pq.run_schedule("s")
        await pq.resume_schedule("s")
        states = {schedule.name: (schedule.state, schedule.in_code) for schedule in await pq.schedules()}
        assert states == {"s": ("ticking", False), "work": ("ticking", True)}
        await pq.remove_schedule("s")
        assert [job.id for job in await pq.claim("q")] == [job_id]


def test_both_clients_have_the_same_schedule_methods() -> None:
    from pgqueue.schedule_methods import AsyncSchedules, SyncSchedules

    sync, asynchronous = (
        {name for name in vars(cls) if not name.startswith("_")} for cls in (SyncSchedules, AsyncSchedules)
    )
    assert sync == asynchronous
    for cls in (SyncSchedules, AsyncSchedules):
        assert all(vars(cls)[name].__doc__ for name in sync)


@pytest.mark.parametrize(
    "keys", [{"ordering_key": "a"}, {"concurrency_key": "a", "concurrency_limit": 1}, {"fairness_key": "a"}], ids=str
)
def test_a_task_with_a_key_is_refused_since_a_tick_makes_jobs_without(
    keys: dict[str, Any], pq: pgqueue.PgQueue
) -> None:
    with pytest.raises(ConfigurationError, match="schedule a task that enqueues it"):
        pq.schedule(every=60)(pq.task(name="work", queue="q", **keys)(lambda: None))
    with pytest.raises(ConfigurationError, match="schedule a task that enqueues it"):
        pq.add_schedule("s", "other", every=60, **keys)
    assert pq.schedules() == []

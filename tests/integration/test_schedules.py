"""Ticks in the database: which jobs they make, who comes first, and what happens when somebody breaks."""

from __future__ import annotations

import itertools
import threading
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.cron import MOST_TICKS
from pgqueue.drivers.execute import run
from pgqueue.ops import Step
from pgqueue.ops import schedule as ops
from tests.schedules import Admin, ago, define, made, only, tick
from tests.waiting import wait_until
from tests.workers import PATIENCE, count


@pytest.fixture
def minutely(pq: pgqueue.PgQueue) -> pgqueue.PgQueue:
    pq.add_schedule("minutely", "work", every=60, queue="q", args=[1])
    tick(pq)
    return pq


# What a tick makes


def test_a_tick_makes_a_job_with_the_options_of_its_task_and_says_which_tick_it_was(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    @pq.schedule(every=3600, name="hourly", args=["eu"], kwargs={"deep": True})
    @pq.task(
        name="work", queue="q", priority=7, max_attempts=3, timeout=9.0, retry=pgqueue.Fixed(4), headers={"trace": "x"}
    )
    def work(region: str, deep: bool) -> None: ...

    assert define(pq) == ["hourly"]
    ago(admin, "hourly", 3601)
    [ticked] = tick(pq).ticked
    assert (ticked.name, ticked.task, ticked.missed, ticked.overlapping) == ("hourly", "work", 0, 0)
    assert 1 <= ticked.late < 60
    by_hand = work.enqueue("eu", deep=True)
    columns = (
        "queue, task, args::text, kwargs::text, priority, max_attempts, timeout, retry::text, position = id, run_at"
    )
    rows = admin.execute(f"SELECT {columns} FROM pgqueue.job ORDER BY id".encode()).fetchall()
    assert rows[0] == rows[1], "as if it had been enqueued by hand"
    jobs = pq.claim("q", limit=2)
    assert [job.id for job in jobs] == [*ticked.ids, by_hand]
    assert ticked.tick is not None
    assert jobs[0].headers == {"trace": "x", "schedule": "hourly", "scheduled_for": ticked.tick.isoformat()}
    assert pgqueue.CurrentJob(jobs[0], lambda *_: None).scheduled_for == ticked.tick
    assert pgqueue.CurrentJob(jobs[1], lambda *_: None).scheduled_for is None


def test_jobs_of_ticks_expire_as_their_task_says_and_so_does_one_that_is_run_by_hand(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    @pq.schedule(every=3600, name="code")
    @pq.task(name="work", queue="q", expires_in=timedelta(minutes=10))
    def work() -> None: ...

    assert define(pq) == ["code"]
    assert pq.add_schedule("added", work, every=3600, expires_in=600)
    assert not pq.add_schedule("added", work, every=3600, expires_in=600), "the same once more"
    assert pq.add_schedule("added", work, every=3600, expires_in=1200)
    pq.add_schedule("lasting", "other", every=3600, queue="q")
    tick(pq)
    for name in ("code", "added", "lasting"):
        ago(admin, name, 3601)
    assert len(tick(pq).ticked) == 3
    pq.run_schedule("code")
    lives = "headers->>'schedule', round(extract(epoch FROM expires_at - created_at))::int"
    rows = admin.execute(f"SELECT {lives} FROM pgqueue.job ORDER BY id".encode()).fetchall()
    assert sorted(rows[:3]) == [("added", 1200), ("code", 600), ("lasting", None)]
    assert rows[3:] == [("code", 600)]


@pytest.mark.parametrize("value", ["infinity", "-infinity", "NaN", "1e300"])
def test_an_expiry_written_by_hand_does_not_stop_the_ticks(value: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.add_schedule("odd", "work", every=60, queue="q")
    admin.execute("UPDATE pgqueue.schedule SET expires_in = %s", [value])
    tick(pq)
    ago(admin, "odd", 61)
    assert len(tick(pq).ticked) == 1
    assert pq.run_schedule("odd")


def test_no_job_is_made_before_its_tick_and_clocks_of_workers_do_not_count(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.add_schedule("soon", "work", every=1)
    pq.add_schedule("later", "work", every=1000)
    early = 0
    while not (found := tick(pq)).ticked or not found.ticked[0].ids:
        early += 1
    assert early > 1
    [(late,)] = admin.execute(
        "SELECT extract(epoch FROM created_at - (headers->>'scheduled_for')::timestamptz) FROM pgqueue.job"
    ).fetchall()
    assert late > 0
    assert found.ticked[0].late > 0
    assert [name for name, _ in made(admin)] == ["soon"]


@pytest.mark.parametrize(
    ("missed", "jobs", "skipped"), [("skip", 2, 8), ("once", 1, 9), ("all", 10, 0)], ids=["skip", "once", "all"]
)
def test_missed_ticks_make_the_jobs_that_their_policy_says(
    missed: str, jobs: int, skipped: int, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.add_schedule("s", "work", every=60, missed=missed, grace=90)
    tick(pq)
    ago(admin, "s", 10 * 60 + 10)
    [ticked] = tick(pq).ticked
    assert (len(ticked.ids), ticked.missed) == (jobs, skipped)
    ticks = [datetime.fromisoformat(text) for _, text in made(admin)]
    assert ticks == sorted(ticks)
    assert only(pq).last_at == ticks[-1]
    found = tick(pq)
    assert found.ticked == []
    assert found.next_in is not None
    assert 0 < found.next_in < 60


def test_a_flood_of_missed_ticks_is_made_in_pieces(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.add_schedule("s", "work", every=1, missed="all")
    tick(pq)
    ago(admin, "s", 2.5 * MOST_TICKS)
    numbers = []
    while sum(numbers) < 2.5 * MOST_TICKS:
        numbers += [len(ticked.ids) for ticked in tick(pq).ticked]
    assert numbers[:2] == [MOST_TICKS, MOST_TICKS]
    ticks = [datetime.fromisoformat(text) for _, text in made(admin)]
    assert {later - earlier for earlier, later in itertools.pairwise(ticks)} == {timedelta(seconds=1)}


def test_without_overlap_no_job_is_made_while_the_last_one_lives(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.add_schedule("s", "work", every=60, overlap=False, queue="q", grace=600)
    tick(pq)
    ago(admin, "s", 190)
    [first] = tick(pq).ticked
    assert (len(first.ids), first.overlapping) == (1, 2), "of three that are due together the latest"
    for _ in range(2):
        ago(admin, "s", 61)
        [ticked] = tick(pq).ticked
        assert (ticked.ids, ticked.overlapping) == ([], 1)
        assert pq.run_schedule("s") is None
        pq.fail(pq.claim("q"), "again", delay=0)  # waits for its retry: it lives
        pq.promote("q")
    pq.complete(pq.claim("q"))
    ago(admin, "s", 61)
    [ticked] = tick(pq).ticked
    assert (len(ticked.ids), ticked.overlapping) == (1, 0)
    pq.fail(pq.claim("q"), pgqueue.DeadLetter("no"))
    assert pq.run_schedule("s") is not None, "a dead letter does not live"


# Races


def test_of_two_that_have_read_the_same_tick_one_makes_its_job(minutely: pgqueue.PgQueue, admin: Admin) -> None:
    ago(admin, "minutely", 61)
    texts = "pgqueue"
    database = str(minutely.settings.database_url)
    with psycopg.connect(database, autocommit=True) as one, psycopg.connect(database, autocommit=True) as other:

        def reading_then(ticking: psycopg.Connection[Any], meanwhile: Any) -> ops.Round:
            op = ops.tick([])
            step = next(op)
            while True:
                assert isinstance(step, Step)
                if step.name == "schedule_tick":
                    meanwhile()
                rows = run(ticking, _step(step), texts)
                try:
                    step = op.send(rows)
                except StopIteration as stop:
                    return stop.value

        first: list[ops.Round] = []
        second = reading_then(one, lambda: first.append(run(other, ops.tick([]), texts)))
        assert [len(ticked.ids) for ticked in first[0].ticked] == [1]
        assert (second.ticked, second.passed) == ([], ["minutely"])
        for change in (
            lambda: minutely.pause_schedule("minutely"),
            lambda: minutely.change_schedule("minutely", every=120),
            lambda: minutely.run_schedule("minutely"),
            lambda: minutely.remove_schedule("minutely"),
        ):
            minutely.resume_schedule("minutely")
            minutely.change_schedule("minutely", every=60)
            ago(admin, "minutely", 61)
            late = reading_then(one, change)
            assert (late.ticked, late.passed) == ([], ["minutely"]), change
    assert count(admin, "job") == 2, "one tick, one by hand"


def _step(step: Step) -> Any:
    return (yield step)


def test_nobody_waits_for_somebody_who_holds_a_schedule(minutely: pgqueue.PgQueue, admin: Admin) -> None:
    minutely.add_schedule("other", "work", every=60)
    tick(minutely)
    for name in ("minutely", "other"):
        ago(admin, name, 61)
    with psycopg.connect(str(minutely.settings.database_url)) as holder:
        minutely.pause_schedule("minutely", using=holder)
        found = tick(minutely)
        assert found.passed == ["minutely"]
        assert [ticked.name for ticked in found.ticked] == ["other"]
        rest = tick(minutely, left_out=("minutely",))
        assert rest.next_in is not None
        assert rest.next_in > 0, "what is held does not hide what comes next"
        holder.rollback()
    assert [ticked.name for ticked in tick(minutely).ticked] == ["minutely"]


def test_a_tick_that_breaks_at_its_last_moment_leaves_neither_job_nor_mark(
    minutely: pgqueue.PgQueue, admin: Admin
) -> None:
    ago(admin, "minutely", 61)
    before = admin.execute("SELECT ticked_to, next_at, last_job_id FROM pgqueue.schedule").fetchall()
    database = str(minutely.settings.database_url)
    # As a server does that dies before the commit.
    broken = psycopg.connect(database)
    assert len(run(broken, ops.tick([]), "pgqueue").ticked) == 1
    gone = "SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = %s)"
    admin.execute("SELECT pg_terminate_backend(%s)", [broken.info.backend_pid])
    wait_until(lambda: admin.execute(gone, [broken.info.backend_pid]).fetchall()[0][0], PATIENCE, "its session is gone")
    with pytest.raises(psycopg.OperationalError):
        broken.commit()
    broken.close()
    assert admin.execute("SELECT ticked_to, next_at, last_job_id FROM pgqueue.schedule").fetchall() == before
    assert count(admin, "job") == 0
    # And one that refuses in the middle.
    admin.execute("ALTER TABLE pgqueue.job ADD CONSTRAINT refused CHECK (task <> 'work')")
    with pytest.raises(psycopg.errors.CheckViolation):
        tick(minutely)
    assert admin.execute("SELECT ticked_to, next_at, last_job_id FROM pgqueue.schedule").fetchall() == before
    admin.execute("ALTER TABLE pgqueue.job DROP CONSTRAINT refused")
    assert [len(ticked.ids) for ticked in tick(minutely).ticked] == [1]


def test_a_crowd_makes_each_tick_once(pq: pgqueue.PgQueue, admin: Admin) -> None:
    names = [f"s{number}" for number in range(5)]
    for name in names:
        pq.add_schedule(name, "work", every=1, missed="all", grace=0)
    tick(pq)
    for name in names:
        ago(admin, name, 100)
    errors: list[BaseException] = []

    def crowd() -> None:
        try:
            with psycopg.connect(str(pq.settings.database_url), autocommit=True) as mine:
                for _ in range(60):
                    run(mine, ops.tick([]), "pgqueue")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=crowd) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 2)
    assert errors == []
    ticks = made(admin)
    assert len(ticks) == len(set(ticks)) >= 500
    for name in names:
        own = [datetime.fromisoformat(at) for made_by, at in ticks if made_by == name]
        assert own == sorted(own)
        assert own[-1] - own[0] == timedelta(seconds=len(own) - 1), "none is left out"


def test_run_by_hand_and_a_tick_at_once_do_not_overlap(pq: pgqueue.PgQueue, admin: Admin) -> None:
    """Whoever waited for the other must see the other's job."""
    pq.add_schedule("s", "work", every=60, overlap=False)
    tick(pq)
    ago(admin, "s", 61)
    database = str(pq.settings.database_url)
    answers: list[int | None] = []
    with psycopg.connect(database) as ticking:
        assert len(run(ticking, ops.tick([]), "pgqueue").ticked[0].ids) == 1
        by_hand = threading.Thread(target=lambda: answers.append(pq.run_schedule("s")))
        by_hand.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_until(lambda: admin.execute(waiting).fetchall(), PATIENCE, "the run by hand waits")
        ticking.commit()
        by_hand.join(PATIENCE)
    assert answers == [None]
    assert count(admin, "job") == 1

"""Unique keys together with lanes, expiry, results, transaction blocks, schedules, pauses and bulk cancellation."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import JobState
from pgqueue.ops import unique as unique_ops
from pgqueue.worker import Worker, WorkerOptions
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, running, wait_for_count

Admin = psycopg.Connection[Any]
LATER = 3600.0
OLD = "UPDATE pgqueue.job SET expires_at = clock_timestamp() - interval '1 second' WHERE id = %s"


def enqueue(pq: pgqueue.PgQueue, *args: Any, **options: Any) -> int:
    return pq.enqueue("work", args, queue="q", **options)


def rows(admin: Admin, what: str) -> list[tuple[Any, ...]]:
    return admin.execute(f"SELECT {what}".encode()).fetchall()


def follow(pq: pgqueue.PgQueue) -> list[int]:
    followed = pq.run(unique_ops.follow("q", archive=True))
    pq.promote("q")
    return followed


def claimed(pq: pgqueue.PgQueue) -> list[int]:
    return [job.id for job in pq.claim("q", limit=100)]


def keep_results(admin: Admin) -> None:
    admin.execute("INSERT INTO pgqueue.kept_task (task, seconds) VALUES ('work', 60)")


def end(how: str, pq: pgqueue.PgQueue, admin: Admin, job: pgqueue.Job, database: str) -> None:
    if how == "complete":
        pq.complete(job)
    elif how == "complete in a caller's transaction":
        with psycopg.connect(database) as caller:
            pq.complete(job, using=caller)
            assert follow(pq) == []
            caller.commit()
    elif how == "dead":
        pq.fail(job, pgqueue.DeadLetter("hopeless"))
    elif how == "discard":
        pq.fail(job, pgqueue.Discard("no more"))
    elif how == "expire":
        pq.fail(job, "not yet", delay=LATER)
        admin.execute(OLD, [job.id])
        assert pq.expire("q") == [job.id]
    elif how == "cancel":
        pq.cancel(job.id)
        pq.fail(job, "stopped")
    elif how == "cancel while it waits":
        pq.fail(job, "not yet", delay=LATER)
        pq.cancel(job.id)
    elif how == "lost":
        admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
        pq.rescue("q")
    elif how == "snooze":
        pq.snooze(job, LATER)
    elif how == "release":
        pq.release(job)
    else:
        assert how == "retry"
        pq.fail(job, "not yet", delay=LATER)


# Lanes


@pytest.mark.parametrize(
    "how",
    ["complete", "complete in a caller's transaction", "dead", "discard", "expire", "cancel", "cancel while it waits",
     "lost"],
)  # fmt: skip
def test_whatever_ends_a_job_what_waits_behind_it_follows(
    how: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """In its lane, before what was enqueued after it; and the lane goes on."""
    keyed: dict[str, Any] = {"ordering_key": "lane", "unique_key": "k", "on_conflict": "merge"}
    enqueue(pq, [1], **keyed, max_attempts=1 if how == "lost" else 5, expires_in=LATER)
    [job] = pq.claim("q")
    second = enqueue(pq, [2], **keyed)
    third = enqueue(pq, ordering_key="lane")
    assert follow(pq) == []
    assert claimed(pq) == []
    end(how, pq, admin, job, database)
    assert follow(pq) == [second]
    [after] = pq.claim("q", limit=10)
    assert (after.id, after.args) == (second, [[2]])
    pq.complete(after)
    assert claimed(pq) == [third]


@pytest.mark.parametrize("how", ["retry", "snooze", "release", "dead", "discard", "lost", "while waiting"])
def test_a_superseded_job_frees_its_lane_and_its_result_says_how_it_ended(
    how: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    keep_results(admin)
    keyed: dict[str, Any] = {"unique_key": "k", "on_conflict": "supersede"}
    lane: dict[str, Any] = {"ordering_key": "lane", "on_dead": "park"}
    first = enqueue(pq, 1, **keyed, **lane, max_attempts=1 if how in ("dead", "lost") else 5)
    other = enqueue(pq, **lane)
    [job] = pq.claim("q")
    if how == "while waiting":
        with psycopg.connect(database) as worker:
            worker.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            worker.execute("SELECT 1 FROM pgqueue.job")
            second = enqueue(pq, 2, **keyed)
            pq.fail(job, "not yet", delay=LATER, using=worker)
            worker.commit()
    else:
        second = enqueue(pq, 2, **keyed)
        end(how, pq, admin, job, database)
    assert follow(pq) == [second]
    lost = ", worker lost" if how == "lost" else ""
    why = "superseded while waiting" if how == "while waiting" else f"superseded while running{lost}"
    reason = "no more" if how == "discard" else why
    assert rows(admin, "id, state, reason FROM pgqueue.archive") == [(first, "superseded", reason)]
    assert rows(admin, "id, state, error, value FROM pgqueue.result") == [(first, "superseded", why, None)]
    assert rows(admin, "count(*) FROM pgqueue.lane WHERE parked_at IS NOT NULL") == [(0,)]
    assert sorted(claimed(pq)) == [other, second]


def test_a_replaced_job_keeps_its_place_in_its_line_and_its_slot(pq: pgqueue.PgQueue) -> None:
    keyed: dict[str, Any] = {"ordering_key": "lane", "unique_key": "k", "on_conflict": "replace"}
    first, other = enqueue(pq, 1, **keyed), enqueue(pq, ordering_key="lane")
    assert enqueue(pq, 2, **keyed) == first, "while it is blocked"
    [job] = pq.claim("q")
    pq.release(job)
    assert enqueue(pq, 3, **keyed) == first, "while it stands in line"
    [job] = pq.claim("q", limit=10)
    assert (job.id, job.args) == (first, [3])
    pq.fail(job, "not yet", delay=LATER)
    assert enqueue(pq, 4, **{**keyed, "on_conflict": "merge"}) == first, "while it waits for its retry"
    assert claimed(pq) == [], "a merge does not shorten the pause, and nothing overtakes it"
    assert enqueue(pq, 5, **keyed) == first
    assert pq.promote("q") == [first]
    [job] = pq.claim("q", limit=10)
    assert (job.id, job.args) == (first, [5])
    pq.complete(job)
    assert claimed(pq) == [other]


@pytest.mark.parametrize("change", [{"delay": LATER}, {"ordering_key": "elsewhere"}, {"ordering_key": None}])
def test_a_replaced_job_that_leaves_its_line_lets_the_next_follow(change: Any, pq: pgqueue.PgQueue) -> None:
    keyed: dict[str, Any] = {"ordering_key": "lane", "unique_key": "k", "on_conflict": "replace"}
    first, other = enqueue(pq, 1, **keyed), enqueue(pq, ordering_key="lane")
    [job] = pq.claim("q", limit=10)
    pq.release(job)
    assert enqueue(pq, 2, **{**keyed, **change}) == first
    pq.promote("q")
    assert sorted(claimed(pq)) == ([other] if "delay" in change else [first, other])


def test_what_waits_behind_takes_no_slot_of_a_concurrency_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    keyed: dict[str, Any] = {"concurrency_key": "c", "concurrency_limit": 2, "on_conflict": "supersede"}
    first = enqueue(pq, 1, unique_key="k", **keyed)
    [job] = pq.claim("q", limit=10)
    second = enqueue(pq, 2, unique_key="k", **keyed)
    other, last = (enqueue(pq, 3, unique_key=key, **keyed) for key in "ab")
    assert claimed(pq) == [other]
    pq.complete(job)
    assert job.id == first
    assert follow(pq) == [second]
    assert claimed(pq) == [second], "its higher place counts"
    assert count(admin, "job", f"id = {last} AND position IS NULL") == 1


@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_a_unique_job_of_a_lane_wakes_those_who_admit(mode: str, pq: pgqueue.PgQueue, database: str) -> None:
    with psycopg.connect(database, autocommit=True) as ears:
        ears.execute("LISTEN pgqueue")
        enqueue(pq, ordering_key="lane", unique_key="k", on_conflict=mode)
        assert "key q" in {one.payload for one in ears.notifies(timeout=PATIENCE, stop_after=1)}


# Expiry


@pytest.mark.parametrize("mode", ["skip", "raise", "replace", "merge"])
def test_a_job_that_has_expired_keeps_no_newer_one_away(mode: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    """Nobody has swept it. Modes that may change it do so."""
    keep_results(admin)
    keyed: dict[str, Any] = {"unique_key": "k", "on_conflict": mode, "expires_in": LATER, "ordering_key": "lane"}
    first = enqueue(pq, [1], **keyed)
    admin.execute(OLD, [first])
    second = enqueue(pq, [2], **keyed)
    assert (second == first) is (mode in ("replace", "merge"))
    swept = [(first, "expired", "expired before it ran")] if second != first else []
    assert rows(admin, "id, state, reason FROM pgqueue.archive") == swept
    assert rows(admin, "id, state, error FROM pgqueue.result") == swept
    assert rows(admin, "id, expires_at > now() + interval '59 min' FROM pgqueue.job") == [(second, True)]
    assert claimed(pq) == [second]


def test_in_a_bulk_only_those_whose_job_has_expired_are_enqueued_anew(pq: pgqueue.PgQueue, admin: Admin) -> None:
    work = pq.task(name="work", queue="q", unique_key=lambda number: f"n:{number}", expires_in=LATER)(
        lambda number: None
    )
    ids = work.enqueue_many([(number,) for number in range(6)])
    for late in ids[1::2]:
        admin.execute(OLD, [late])
    again = work.enqueue_many([(number,) for number in range(7)])
    assert again[0:6:2] == ids[::2]
    assert min(again[1], again[3], again[5], again[6]) > ids[-1]
    assert count(admin, "archive", "state = 'expired'") == 3


def test_a_running_job_that_is_past_its_expiry_has_its_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    keyed: dict[str, Any] = {"unique_key": "k", "expires_in": LATER}
    first = enqueue(pq, **keyed)
    pq.claim("q")
    second = enqueue(pq, **keyed, on_conflict="replace")
    for late in (first, second):
        admin.execute(OLD, [late])
    assert enqueue(pq, **keyed) == first
    assert rows(admin, "id, state FROM pgqueue.archive") == [(second, "expired")]
    with pytest.raises(pgqueue.DuplicateJob) as caught:
        enqueue(pq, **keyed, on_conflict="raise")
    assert caught.value.job_id == first


@pytest.mark.parametrize(
    ("first", "second", "minutes"), [(LATER, 60, 60), (60, LATER, 60), (LATER, None, None), (None, 60, None)]
)
def test_a_merged_job_expires_with_the_last_of_its_calls(
    first: float | None, second: float | None, minutes: int | None, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    for seconds in (first, second):
        enqueue(pq, [1], unique_key="k", on_conflict="merge", expires_in=seconds)
    found = "round(extract(epoch FROM expires_at - created_at) / 60)::int FROM pgqueue.job"
    assert rows(admin, found) == [(minutes,)]


def test_what_waits_behind_expires_from_when_it_could_run_at_the_earliest(pq: pgqueue.PgQueue, admin: Admin) -> None:
    keyed: dict[str, Any] = {"unique_key": "k", "on_conflict": "supersede"}
    enqueue(pq, **keyed)
    [job] = pq.claim("q")
    second = enqueue(pq, **keyed, delay=LATER, expires_in=60)
    lives = f"round(extract(epoch FROM expires_at - next_at))::int FROM pgqueue.job WHERE id = {second}"
    assert rows(admin, lives) == [(60,)]
    admin.execute(OLD, [second])
    assert pq.expire("q") == [second]
    pq.fail(job, "once more", delay=0)
    assert claimed(pq) == [job.id], "nothing has superseded it after all"


# Results and transaction blocks


@pytest.mark.parametrize("how", ["returns", "in a block"])
def test_the_result_of_a_superseded_job_says_so_and_holds_no_value(
    how: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    begun = threading.Event()

    @pq.task(name="work", queue="q", unique_key="k", on_conflict="supersede", keep_result=60)
    def work(number: int) -> str:
        job = pgqueue.current_job()
        begun.set()
        if number == 1:
            wait_until(lambda: job.superseded, PATIENCE, "it is told")
        if how == "in a block":
            with psycopg.connect(database) as connection:
                with job.transaction(using=connection):
                    job.set_result(f"value {number}")
                connection.commit()
        return f"value {number}"

    first = work.enqueue(1)
    with running(pq, concurrency=2, lease=PATIENCE * 6):
        assert begun.wait(PATIENCE)
        second = work.enqueue(2)
        ends = pq.wait([first, second], timeout=PATIENCE)
    assert (ends[first].state, ends[second].state) == (JobState.SUPERSEDED, JobState.COMPLETED)
    assert ends[second].value == "value 2"
    with pytest.raises(pgqueue.ResultMissing, match="superseded while running"):
        assert ends[first].value
    assert rows(admin, "id, state FROM pgqueue.archive ORDER BY id") == [(first, "superseded"), (second, "completed")]


def test_a_job_of_its_own_key_that_a_handler_enqueues_in_its_block_follows_its_commit(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    ran: list[int] = []

    @pq.task(name="work", queue="q", unique_key="k", on_conflict="replace", retry=pgqueue.Fixed(0))
    def work(number: int) -> None:
        job = pgqueue.current_job()
        ran.append(number)
        with psycopg.connect(database) as connection:
            with job.transaction(using=connection):
                if number < 2:
                    assert work.options(on_conflict="skip").enqueue(number + 1, using=connection) == job.id
                    assert work.enqueue(number + 1, using=connection) != job.id
            if number == 1 and job.attempt == 1:
                connection.rollback()
                raise ValueError("what it enqueued never existed")
            connection.commit()

    work.enqueue(0)
    with running(pq):
        wait_for_count(admin, 3, "archive")
    assert ran == [0, 1, 1, 2]
    assert rows(admin, "DISTINCT state FROM pgqueue.archive") == [("completed",)]


# Schedules, pauses, operators


def test_a_schedule_of_a_task_with_a_unique_key_is_refused_in_a_sentence(pq: pgqueue.PgQueue) -> None:
    refused = "has a key, and a tick makes jobs without keys"
    with pytest.raises(pgqueue.ConfigurationError, match=refused):
        pq.schedule(every=60)(pq.task(name="work", queue="q", unique_key="k")(lambda: None))
    with pytest.raises(pgqueue.ConfigurationError, match=refused):
        pq.add_schedule("added", "other", every=60, unique_key="k")
    assert pq.schedules() == []


def test_a_draining_worker_leaves_what_waits_behind_a_job_of_a_paused_task(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran: list[str] = []
    pq.task(name="work", queue="q")(lambda items: ran.append("work"))
    pq.task(name="other", queue="q")(lambda items: ran.append("other"))
    keyed: dict[str, Any] = {"queue": "q", "unique_key": "k", "on_conflict": "merge"}
    first = pq.enqueue("work", [[1]], **keyed)
    [job] = pq.claim("q")
    second = pq.enqueue("other", [[2]], **keyed)
    pq.release(job)
    pq.pause("q", task="work")
    assert Worker(pq, WorkerOptions(drain=True)).run() == 0
    assert (ran, count(admin, "job")) == ([], 2)
    pq.resume("q", task="work")
    assert Worker(pq, WorkerOptions(drain=True)).run() == 0
    assert (ran, [row[0] for row in rows(admin, "id FROM pgqueue.archive ORDER BY id")]) == (
        ["work", "other"], [first, second])  # fmt: skip


def test_bulk_cancellation_by_unique_key_concerns_the_running_job_and_what_waits_behind_it(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    keyed: dict[str, Any] = {"unique_key": "k", "on_conflict": "supersede"}
    first = enqueue(pq, **keyed)
    [job] = pq.claim("q")
    second = enqueue(pq, **keyed)
    other = enqueue(pq, unique_key="other")
    assert pq.count_live(unique_key="k") == (1, 1)
    assert pq.cancel_all(unique_key="k") == (1, 1)
    pq.fail(job, "stopped")
    assert rows(admin, "id, state FROM pgqueue.archive ORDER BY id") == [(first, "cancelled"), (second, "cancelled")]
    assert claimed(pq) == [other]


def test_a_redrive_of_a_parked_lane_whose_unique_key_is_taken_waits_and_then_resumes_it(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    keyed: dict[str, Any] = {"unique_key": "k", "max_attempts": 1}
    dead = enqueue(pq, **keyed, ordering_key="lane", on_dead="park")
    other = enqueue(pq, ordering_key="lane", on_dead="park")
    free = enqueue(pq, unique_key="free", max_attempts=1)
    pq.fail(pq.claim("q", limit=10), "no")
    taken = enqueue(pq, **keyed)
    back = pq.redrive()
    assert (list(back), back.skipped) == ([free], [dead])
    pq.complete(pq.claim("q", limit=10))
    assert count(admin, "archive", f"id IN ({free}, {taken})") == 2
    assert claimed(pq) == [], "the lane is parked still"
    assert list(pq.redrive()) == [dead]
    [job] = pq.claim("q", limit=10)
    assert job.id == dead
    pq.complete(job)
    assert claimed(pq) == [other]

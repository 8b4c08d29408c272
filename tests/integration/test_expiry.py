"""Jobs that are too old: not run, archived as expired, no attempt burned; whoever meets them, and whenever."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import Step
from pgqueue.ops import expiry as expiry_ops
from pgqueue.ops import rescue as rescue_ops
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
OLD = "UPDATE pgqueue.job SET expires_at = clock_timestamp() - interval '1 second'"


def enqueue(pq: pgqueue.PgQueue, **options: Any) -> int:
    return pq.enqueue("work", queue="q", **{"expires_in": 60, **options})


def archived(admin: Admin) -> list[tuple[Any, ...]]:
    return admin.execute("SELECT id, state, attempt, reason FROM pgqueue.archive ORDER BY id").fetchall()


@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_job_that_has_expired_is_not_run_and_burns_no_attempt(colour: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran: list[int] = []
    work = define(pq, colour, ran.append, expires_in=timedelta(seconds=60))
    old = work.enqueue_many([(1,), (2,)])
    admin.execute(OLD)
    young = work.enqueue(3)
    with running(pq) as worker:
        worker.wait_for(pgqueue.EventName.JOBS_EXPIRED, queue="q", ids=old, count=2)
        wait_for_count(admin, 3, "archive")
    assert ran == [3]
    assert archived(admin) == [
        (old[0], "expired", 0, "expired before it ran"),
        (old[1], "expired", 0, "expired before it ran"),
        (young, "completed", 1, None),
    ]


def test_the_end_is_counted_from_the_enqueue_and_for_later_jobs_from_the_due_time(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    enqueue(pq, expires_in=10)
    enqueue(pq, expires_in=10, delay=3600)
    enqueue(pq, expires_in=10, run_at=datetime.now(UTC) + timedelta(hours=1))
    enqueue(pq, expires_in=10, run_at=datetime.now(UTC) - timedelta(hours=1))
    rows = admin.execute(
        "SELECT extract(epoch FROM expires_at - coalesce(run_at, created_at))::float8 FROM pgqueue.job ORDER BY id"
    ).fetchall()
    assert rows == [(10.0,)] * 4


def test_a_claim_passes_over_what_has_expired_before_any_sweep(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    old = enqueue(pq)
    admin.execute(OLD)
    young = enqueue(pq)
    with psycopg.connect(database, autocommit=True) as caller:
        [job] = pq.claim("q", limit=10, using=caller)
    assert job.id == young
    assert job.expires_in is not None
    assert 0 < job.expires_in <= 60
    assert count(admin, "job") == 2
    assert pq.expire("q") == [old]
    assert pq.expire("q") == []


def test_a_claim_without_a_worker_sweeps_too(pq: pgqueue.PgQueue, admin: Admin) -> None:
    old = enqueue(pq)
    admin.execute(OLD)
    assert pq.claim("q") == []
    assert archived(admin) == [(old, "expired", 0, "expired before it ran")]


def test_a_scheduled_job_expires_too_and_nothing_is_kept_without_an_archive(database: str, admin: Admin) -> None:
    with pgqueue.PgQueue(database, archive=False) as pq:
        job_id = enqueue(pq, delay=3600)
        admin.execute(OLD)
        assert pq.expire("q") == [job_id]
    assert (count(admin, "job"), count(admin, "archive")) == (0, 0)


def test_a_job_whose_retry_comes_too_late_ends_as_expired_with_its_errors(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def fail() -> None:
        admin.execute(OLD)
        raise ValueError("no")

    define(pq, "plain", fail, retry=pgqueue.Fixed(0), expires_in=60).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'expired'")
    [(attempt, reason, errors)] = admin.execute("SELECT attempt, reason, errors FROM pgqueue.archive").fetchall()
    assert (attempt, reason) == (1, "expired before its next attempt")
    assert [error["type"] for error in errors] == ["ValueError"]


def test_a_job_that_expires_while_it_runs_is_completed(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def work() -> None:
        admin.execute(OLD)
        assert pq.expire("q") == []

    define(pq, "plain", work, expires_in=60).enqueue()
    with running(pq):
        wait_for_count(admin, 1, "archive", "state = 'completed'")


def test_redrive_drops_the_expiry(pq: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = enqueue(pq, max_attempts=1)
    pq.fail(pq.claim("q"), "no")
    assert pq.redrive(ids=job_id) == [job_id]
    assert count(admin, "job", "expires_at IS NULL") == 1


def test_of_a_claim_and_a_sweep_at_the_same_moment_one_has_the_job(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    first, second = enqueue(pq, expires_in=3600), enqueue(pq, expires_in=3600)
    with psycopg.connect(database) as caller:
        [job] = pq.claim("q", using=caller)
        admin.execute(OLD + f" WHERE id = {second}")
        assert pq.expire("q") == [second]  # the first one is in the claim's hands, and nobody waits for it
        caller.commit()
    admin.execute(OLD)
    assert pq.expire("q") == []
    pq.complete(job)
    third = enqueue(pq, expires_in=3600)
    admin.execute(OLD + f" WHERE id = {third}")
    with psycopg.connect(database) as caller:
        assert pq.run(pq.expire_op("q"), caller) == [third]
        assert pq.claim("q") == []
        caller.rollback()
    assert pq.expire("q") == [third]
    assert [(row[0], row[1]) for row in archived(admin)] == [
        (first, "completed"), (second, "expired"), (third, "expired"),
    ]  # fmt: skip


def test_every_expiring_job_ends_exactly_once_whoever_comes_first(database: str, admin: Admin) -> None:
    jobs, done = 400, []
    with pgqueue.PgQueue(database) as pq:
        task = pq.task(name="work", queue="q", expires_in=0.5)(lambda number: None)
        ids = task.enqueue_many([(number,) for number in range(jobs)])

        def sweep() -> None:
            while count_live(database):
                pq.expire("q")

        def claim() -> None:
            while count_live(database):
                for job in pq.claim("q", limit=3):
                    done.append(job.id)
                    pq.complete(job)

        threads = [threading.Thread(target=target) for target in (sweep, claim, claim, sweep)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE * 2)
    rows = archived(admin)
    assert [row[0] for row in rows] == ids
    assert sorted(row[0] for row in rows if row[1] == "completed") == sorted(done)
    assert {row[1:3] for row in rows} <= {("completed", 1), ("expired", 0)}


def count_live(database: str) -> int:
    with psycopg.connect(database, autocommit=True) as look:
        return count(look, "job")


def test_the_sweep_works_in_pieces(pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_ops, "SWEEP", 7)
    pq.task(name="work", queue="q", expires_in=60)(lambda number: None).enqueue_many([(n,) for n in range(30)])
    admin.execute(OLD)
    op = expiry_ops.expire("q", archive=True, channel=None)
    step, pieces = next(op), []
    with pytest.raises(StopIteration) as stop:
        while True:
            assert isinstance(step, Step)
            rows = pq.run(one(step))
            pieces.append(len(rows[0][0] or ()))
            step = op.send(rows)
    assert pieces == [7, 7, 7, 7, 2]
    assert len(stop.value.value) == 30


def one(step: Step) -> Any:
    return (yield step)


def test_an_enqueue_with_an_expiry_belongs_to_the_callers_transaction(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = pq.task(name="work", queue="q")(lambda number: None)
    with psycopg.connect(database) as caller:
        task.options(expires_in=5).enqueue_many([(1,), (2,)], using=caller)
        caller.rollback()
        kept = task.options(expires_in=5).enqueue(3, using=caller)
        caller.commit()
    assert admin.execute("SELECT id FROM pgqueue.job").fetchall() == [(kept,)]


def test_an_expired_job_leaves_its_slot_to_the_next_of_its_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = pq.task(name="work", queue="q", ordering_key="k")(lambda: None)
    task.options(expires_in=60).enqueue()
    admin.execute("DELETE FROM pgqueue.admission")
    admin.execute(OLD)
    assert len(pq.expire("q")) == 1
    assert admin.execute("SELECT queue, lane FROM pgqueue.admission").fetchall() == [("q", "ok")]


def test_maintenance_knows_when_the_next_job_expires(pq: pgqueue.PgQueue, admin: Admin) -> None:
    assert pq.run(rescue_ops.agenda("q")).late_in is None
    enqueue(pq, expires_in=100)
    late_in = pq.run(rescue_ops.agenda("q")).late_in
    assert late_in is not None
    assert 50 < late_in <= 100
    for value in ("infinity", "-infinity"):
        admin.execute("UPDATE pgqueue.job SET expires_at = %s", [value])
        late_in = pq.run(rescue_ops.agenda("q")).late_in
        assert late_in is None if value == "infinity" else late_in is not None and late_in < 0
    assert len(pq.expire("q")) == 1


@pytest.mark.parametrize("value", [0, -1, True, "5", float("nan"), float("inf"), timedelta(0)])
def test_an_expiry_that_makes_no_sense_is_refused(value: Any) -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    with pytest.raises(pgqueue.ConfigurationError, match="expires_in"):
        pq.enqueue("work", expires_in=value)


def test_a_worker_that_drains_waits_until_what_has_expired_is_swept(pq: pgqueue.PgQueue, admin: Admin) -> None:
    define(pq, "plain", lambda: None, expires_in=60).enqueue()
    admin.execute(OLD)
    with running(pq, drain=True) as worker:
        assert worker.join() == 0
    assert (count(admin, "job"), count(admin, "archive", "state = 'expired'")) == (0, 1)


def test_what_expires_in_the_buffer_of_a_worker_is_not_started(pq: pgqueue.PgQueue, admin: Admin) -> None:
    blocked, free = threading.Event(), threading.Event()
    ran: list[int] = []

    def body(number: int) -> None:
        if number == 0:
            blocked.set()
            assert free.wait(PATIENCE)
        ran.append(number)

    work = define(pq, "plain", body)
    late = work.options(expires_in=3600)
    with running(pq, concurrency=1) as worker:
        with psycopg.connect(pq.settings.database_url or "") as caller:
            work.enqueue(0, using=caller)
            late.enqueue(1, using=caller)
            worker.worker.claimer._ahead = lambda: 5  # type: ignore[method-assign] # as if jobs had been quick so far
            caller.commit()
        assert blocked.wait(PATIENCE)
        ledger = worker.worker.ledger
        [held] = wait_until(lambda: [one for one in ledger._all() if one.job.expires_in], PATIENCE, "it is held")
        held.lease.sent -= 7200
        admin.execute(OLD + " WHERE expires_at IS NOT NULL")
        free.set()
        wait_for_count(admin, 2, "archive")
    assert ran == [0]
    assert [row[1:3] for row in archived(admin)] == [("completed", 1), ("expired", 0)]

"""Rates of keys: how many jobs of a key are admitted in a time, whoever admits them."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops.admission import AdmissionMark
from pgqueue.worker import maintenance
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]


def enqueue(pq: pgqueue.PgQueue, number: int, **key: Any) -> list[int]:
    return [pq.enqueue("work", [n], queue="q", **key) for n in range(number)]


def wide(pq: pgqueue.PgQueue, number: int, key: str = "a") -> list[int]:
    return enqueue(pq, number, concurrency_key=key, concurrency_limit=100)


def claimed(pq: pgqueue.PgQueue) -> list[int]:
    return [job.id for job in pq.claim("q", limit=100)]


def rest(admin: Admin, seconds: float) -> None:
    """So many seconds have passed since the buckets were looked at, and what was due by then is due."""
    shift = f"- interval '{seconds} seconds'"
    admin.execute(f"UPDATE pgqueue.lane SET refilled_at = refilled_at {shift}, wakes_at = wakes_at {shift}".encode())
    admin.execute(f"UPDATE pgqueue.admission SET due_at = due_at {shift}".encode())


def impatient(database: str) -> str:
    """Its sessions wait for no lock for long."""
    return psycopg.conninfo.make_conninfo(database, options="-c lock_timeout=2s")


def pending(admin: Admin) -> list[float]:
    """In how many seconds lanes are to be looked at again."""
    rows = admin.execute(
        "SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM pgqueue.admission ORDER BY 1"
    )
    return [seconds for (seconds,) in rows.fetchall()]


def test_a_key_gets_its_burst_and_then_what_time_brings(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = wide(pq, 20)
    others = wide(pq, 3, "b")
    pq.limit_key("q", "a", rate=1, per=3600, burst=4)
    assert sorted(claimed(pq)) == [*ids[:4], *others]
    assert claimed(pq) == []
    [due] = pending(admin)
    assert 3500 < due <= 3600
    rest(admin, 2 * 3600)
    assert claimed(pq) == ids[4:6]
    rest(admin, 100 * 3600)
    assert claimed(pq) == ids[6:10]
    pq.limit_key("q", "a")
    assert claimed(pq) == ids[10:]


def test_width_and_rate_hold_both(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = wide(pq, 10)
    pq.limit_key("q", "a", 2, rate=1, per=3600, burst=3)
    jobs = pq.claim("q", limit=10)
    assert [job.id for job in jobs] == ids[:2]
    pq.complete(jobs)
    assert claimed(pq) == ids[2:3]
    assert len(pending(admin)) == 1
    rest(admin, 10 * 3600)
    assert claimed(pq) == ids[3:4]


def test_however_many_jobs_come_one_row_waits_for_the_next_token(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.limit_key("q", "a", rate=1, per=3600)
    ids = wide(pq, 1)
    assert claimed(pq) == ids
    for _ in range(5):
        wide(pq, 3)
        assert claimed(pq) == []
    assert len(pending(admin)) == 1
    pq.limit_key("q", "a", rate=1, per=60)
    assert claimed(pq) == []
    assert pending(admin)[0] < 61, "a faster rate is not waited for as long"


def test_only_a_retry_that_gives_up_its_place_takes_another_token(pq: pgqueue.PgQueue, admin: Admin) -> None:
    [ordered, behind] = enqueue(pq, 2, ordering_key="a")
    [wider] = wide(pq, 1)
    pq.limit_key("q", ordering_key="a", rate=1, per=3600, burst=2)
    pq.limit_key("q", "a", rate=1, per=3600, burst=2)
    for attempt in range(4):
        jobs = {job.id: job for job in pq.claim("q", limit=10)}
        assert list(jobs) == [ordered, wider][: 2 if attempt < 2 else 1]
        pq.fail(jobs.values(), "again", delay=60)
        admin.execute("UPDATE pgqueue.job SET run_at = now() WHERE run_at IS NOT NULL")
        pq.promote("q")
    [job] = pq.claim("q", limit=10)
    pq.complete(job)
    assert claimed(pq) == [behind]


def test_a_clock_that_steps_back_does_not_stop_a_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.limit_key("q", "a", rate=1, per=60)
    wide(pq, 3)
    assert len(claimed(pq)) == 1
    rest(admin, -86400)
    wide(pq, 1)
    assert claimed(pq) == []
    assert pending(admin)[0] <= 61
    rest(admin, 60)
    assert len(claimed(pq)) == 1


def test_an_operators_open_transaction_holds_back_its_key_alone(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    pq.limit_key("q", "a", rate=1000)
    with psycopg.connect(database) as operator, pgqueue.PgQueue(impatient(database)) as other_one:
        pq.limit_key("q", "a", rate=2000, using=operator)
        held, other = wide(pq, 1), wide(pq, 1, "b")
        assert claimed(other_one) == other, "nobody waits"
        operator.rollback()
    rest(admin, 2)
    assert claimed(pq) == held


def test_jobs_of_a_key_that_nobody_may_start_yet_hide_no_others_from_maintenance(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    admin.execute(
        "INSERT INTO pgqueue.admission (queue, lane, due_at) "
        "SELECT 'q', 'c' || n, now() + interval '1 hour' FROM generate_series(1, 500) AS n"
    )
    agenda = pq.run(rescue_ops.agenda("q"))
    assert agenda.admission_in is not None
    assert 3000 < agenda.admission_in <= 3600
    wide(pq, 1)
    assert pq.run(rescue_ops.agenda("q")).admission_in == 0


def test_what_waits_for_a_token_is_not_repaired(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.limit_key("q", "a", rate=1, per=3600)
    wide(pq, 2)
    [job] = pq.claim("q", limit=5)
    pq.complete(job)
    assert claimed(pq) == []
    assert pq.run(admission_ops.repair("q")) == 0
    admin.execute("DELETE FROM pgqueue.admission")
    admin.execute("UPDATE pgqueue.lane SET wakes_at = now() - interval '1 s'")
    assert pq.run(admission_ops.repair("q")) == 1, "a row that somebody deleted"


@pytest.mark.parametrize(
    "value",
    ["rate = 'nan'", "rate = 1e308", "rate = -1", "burst = NULL", "tokens = '-infinity'", "refilled_at = 'infinity'",
     "wakes_at = 'infinity'"],
)  # fmt: skip
def test_a_rate_written_by_hand_stops_no_other_key(value: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.limit_key("q", "a", rate=1)
    wide(pq, 1)
    claimed(pq)
    admin.execute(f"UPDATE pgqueue.lane SET {value}".encode())
    wide(pq, 2)
    others = wide(pq, 2, "b")
    assert set(others) <= set(claimed(pq))
    assert [lane.key for lane in pq.lanes("q")] == ["a"]


WITNESS = """
CREATE TABLE admitted (xid xid8);
CREATE TABLE spent (xid xid8, at timestamptz);
CREATE FUNCTION admitted() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO admitted VALUES (pg_current_xact_id()); RETURN NEW; END $$;
CREATE FUNCTION spent() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO spent VALUES (pg_current_xact_id(), NEW.refilled_at); RETURN NEW; END $$;
CREATE TRIGGER admitted AFTER UPDATE ON pgqueue.job FOR EACH ROW
    WHEN (NEW.admitted AND OLD.admitted IS NULL) EXECUTE FUNCTION admitted();
CREATE TRIGGER spent AFTER UPDATE ON pgqueue.lane FOR EACH ROW EXECUTE FUNCTION spent();
"""


def test_in_any_time_no_more_jobs_of_a_key_are_admitted_than_its_burst_and_rate_allow(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    admin.execute(WITNESS.encode())
    pq.limit_key("q", "a", rate=50, burst=5)
    ran: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        with lock:
            ran.append(number)

    with ExitStack() as stack:
        others = [stack.enter_context(pgqueue.PgQueue(database)) for _ in range(2)]
        for one in (pq, *others):
            define(one, "plain", work)
            stack.enter_context(running(one, concurrency=4))
        wide(pq, 60)
        wait_for_count(admin, 60, "archive")
    assert sorted(ran) == list(range(60))
    starts = admin.execute(
        "SELECT at, (SELECT count(*) FROM admitted AS a WHERE a.xid = s.xid) FROM spent AS s ORDER BY at"
    ).fetchall()
    sums = [0, *itertools.accumulate(jobs for _, jobs in starts)]
    assert sums[-1] == 60
    for first, (began, _) in enumerate(starts):
        for last in range(first, len(starts)):
            seconds = (starts[last][0] - began).total_seconds()
            assert sums[last + 1] - sums[first] <= 5 + 50 * seconds + 1e-6


def test_an_idle_worker_goes_on_when_the_next_token_is_there(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "QUIET_PERIOD", 600.0)  # which would find it some seconds later
    define(pq, "plain", lambda number: None)
    pq.limit_key("q", fairness_key="tenant", rate=2, burst=1)
    with running(pq, poll=600, lease=6000) as watched:
        wait_until(watched.worker._hearing, PATIENCE, "the worker hears")
        enqueue(pq, 3, fairness_key="tenant")
        wait_for_count(admin, 3, "archive")
    assert count(admin, "job") == 0


def test_one_of_many_marks_admits_within_the_rate_too(pq: pgqueue.PgQueue) -> None:
    """Admissions one after the other, each of a claimer that knows nothing of the others."""
    pq.limit_key("q", "a", rate=1, per=3600, burst=3)
    wide(pq, 10)
    made = [pq.run(admission_ops.admit("q", AdmissionMark(), room=10, channel=None)).jobs for _ in range(4)]
    assert sum(made) == 3

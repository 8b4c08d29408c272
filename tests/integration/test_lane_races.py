"""Lanes under races: two connections in a fixed order, and many producers and workers in none."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import admission as admission_ops
from pgqueue.ops.admission import AdmissionMark
from pgqueue.sql import statements
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
KEYED: dict[str, Any] = {"queue": "q", "ordering_key": "a"}
A_MOMENT = 1000
"""Numbers of the sequence that pass, at most, between the snapshot of an admission and the places that it gives."""
TAKE = statements("pgqueue")["admission_take"]


def enqueue(pq: pgqueue.PgQueue, number: int = 1, using: Any = None, **options: Any) -> list[int]:
    return [pq.enqueue("work", [n], using=using, **{**KEYED, **options}) for n in range(number)]


def claimed(pq: pgqueue.PgQueue) -> list[int]:
    return [job.id for job in pq.claim("q", limit=10)]


@contextmanager
def beside(work: Any) -> Iterator[threading.Thread]:
    """`work` in a thread that has ended after the block."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("level", list(psycopg.IsolationLevel)[1:])
def test_a_callers_long_transaction_blocks_no_worker_and_its_job_runs_once_it_commits(
    level: psycopg.IsolationLevel, pq: pgqueue.PgQueue, database: str
) -> None:
    with psycopg.connect(database) as caller:
        caller.isolation_level = level
        caller.execute("SELECT count(*) FROM pgqueue.job")  # its snapshot is older than what follows
        [first] = enqueue(pq)
        [late] = enqueue(pq, using=caller)
        [job] = pq.claim("q", limit=10)
        assert job.id == first
        pq.complete(job)
        [third] = enqueue(pq)
        [job] = pq.claim("q", limit=10)
        assert job.id == third, "what is not committed is not waited for"
        caller.commit()
        assert claimed(pq) == []
        pq.complete(job)
        assert claimed(pq) == [late]


def test_an_enqueue_that_rolls_back_leaves_nothing_behind(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    with psycopg.connect(database) as caller:
        enqueue(pq, 3, using=caller)
        caller.rollback()
    assert (count(admin, "admission"), claimed(pq)) == (0, [])
    [after] = enqueue(pq)
    assert claimed(pq) == [after]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_next_of_a_key_is_not_admitted_before_the_settle_of_the_one_before_it_commits(
    ending: str, pq: pgqueue.PgQueue, database: str
) -> None:
    ids = enqueue(pq, 2)
    [job] = pq.claim("q", limit=10)
    with psycopg.connect(database) as caller:
        pq.complete(job, using=caller)
        assert claimed(pq) == []
        getattr(caller, ending)()
    assert claimed(pq) == (ids[1:] if ending == "commit" else [])


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_nothing_overtakes_a_job_whose_cancellation_is_under_way(
    ending: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    ids = enqueue(pq, 2)
    with psycopg.connect(database) as operator:
        assert pq.cancel(ids[0], using=operator) == {ids[0]: "cancelled"}
        assert claimed(pq) == [], "neither waited for nor overtaken"
        [(lane, due)] = admin.execute("SELECT lane, due_at > now() FROM pgqueue.admission").fetchall()
        assert (lane, due) == ("oa", True)
        getattr(operator, ending)()
    admin.execute("UPDATE pgqueue.admission SET due_at = now()")
    pq._marks.clear()  # the second that a full pass may take to come is not waited for
    assert claimed(pq) == (ids[1:] if ending == "commit" else ids[:1])


def test_an_admission_leaves_a_lane_to_the_other_one_and_sees_afterwards_what_that_did(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    def admit() -> int:
        return pq.run(admission_ops.admit("q", AdmissionMark(), room=10, channel=None)).jobs

    [first_id] = enqueue(pq)
    with psycopg.connect(database) as first:
        assert first.execute(TAKE, {"queue": "q", "after": 0, "limit": 10}).fetchall()[0][0] == ["oa"]
        enqueue(pq)
        [other] = enqueue(pq, ordering_key="b")
        assert admit() == 1
        assert count(admin, "job", f"admitted AND id = {other}") == 1
        assert count(admin, "admission", "lane = 'oa'") == 2, "left where it is, for later"
        first.execute("UPDATE pgqueue.job SET admitted = true, position = 1 WHERE id = %s", [first_id])
        first.commit()
    assert admit() == 0, "the slot is taken"
    assert count(admin, "admission") == 0


def test_two_admissions_with_lanes_in_common_do_not_wait_for_each_other_in_a_circle(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    keys = [f"key {number}" for number in range(40)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def hammer(seed: int) -> None:
        shuffled = random.Random(seed)
        try:
            while not stop.is_set():
                some = shuffled.sample(keys, 10)
                admin_rows = [("q", f"o{key}") for key in some]
                with pq._pool.connection() as connection:
                    connection.cursor().executemany(
                        "INSERT INTO pgqueue.admission (queue, lane) VALUES (%s, %s)", admin_rows
                    )
                pq.run(admission_ops.admit("q", AdmissionMark(), room=10, channel=None))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    stop.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []


def test_an_admission_that_is_cut_off_is_done_again(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    ids = enqueue(pq)
    first = psycopg.connect(database)
    first.execute(TAKE, {"queue": "q", "after": 0, "limit": 10})
    assert claimed(pq) == [], "another one has taken its row"
    admin.execute("SELECT pg_terminate_backend(%s)", [first.info.backend_pid])
    wait_until(lambda: claimed(pq) == ids, PATIENCE, "the row is there again")
    first.close()


def test_a_lane_whose_job_was_deleted_by_hand_is_repaired(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = enqueue(pq, 2)
    assert claimed(pq) == ids[:1]
    admin.execute("DELETE FROM pgqueue.job WHERE id = %s", [ids[0]])
    assert claimed(pq) == []
    assert pq.run(admission_ops.repair("q")) == 1
    assert claimed(pq) == ids[1:]
    assert pq.run(admission_ops.repair("q")) == 0


def test_the_repair_walks_through_any_number_of_lanes(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_ops, "LANES_PER_REPAIR", 7)
    task = define(pq, "plain", lambda key: None, ordering_key=lambda key: str(key))
    task.enqueue_many((number,) for number in range(40))
    admin.execute("TRUNCATE pgqueue.admission")
    assert pq.run(admission_ops.repair("q")) == 40
    assert len(pq.claim("q", limit=100)) == 40


def test_two_admitted_jobs_of_one_ordering_key_are_impossible(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 2)
    with pytest.raises(psycopg.errors.UniqueViolation):
        admin.execute("UPDATE pgqueue.job SET admitted = true")


def test_a_worker_hears_of_a_key_that_others_have_freed(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    define(pq, "plain", lambda number: None)
    [first, second] = enqueue(pq, 2)
    with pgqueue.PgQueue(database) as other:
        [job] = other.claim("q")
        assert job.id == first
        with running(pq, poll=60.0) as watched:
            wait_until(lambda: watched.worker._listener.hearing, PATIENCE, "it hears")  # type: ignore[union-attr]
            other.complete(job)
            wait_until(lambda: count(admin, "archive", f"id = {second}") == 1, 3.0, "the next one runs")


def test_with_slow_and_rolled_back_producers_no_key_stalls_overlaps_or_runs_out_of_order(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """Order: a place in line and the moment of a commit are numbers of one sequence. Who got a place before an older job of
    its key had it before that one was committed, or in the moment when it was."""
    first_place: dict[int, tuple[str, int]] = {}
    inside: dict[str, int] = {}
    overlaps: list[str] = []
    lock = threading.Lock()

    def work(key: str) -> None:
        job = pgqueue.current_job().job
        with lock:
            first_place.setdefault(job.id, (key, job.position))
            if inside.get(key):
                overlaps.append(key)
            inside[key] = inside.get(key, 0) + 1
        time.sleep(random.uniform(0, 0.003))
        with lock:
            inside[key] -= 1
        if random.random() < 0.1 and job.attempt == 1:
            raise ValueError("again")

    options: dict[str, Any] = {"ordering_key": lambda key: key, "retry": pgqueue.Fixed(0.02)}
    task = define(pq, "plain", work, **options)
    committed: dict[int, int] = {}
    until = time.monotonic() + 6.0

    def produce(seed: int) -> None:
        rng = random.Random(seed)
        with psycopg.connect(database) as caller:
            while time.monotonic() < until:
                ids = [task.enqueue(f"key {rng.randrange(12)}", using=caller) for _ in range(rng.randrange(1, 6))]
                time.sleep(rng.choice([0, 0, 0.002, 0.05]))
                if rng.random() < 0.25:
                    caller.rollback()
                else:
                    caller.commit()
                    stamp = caller.execute("SELECT nextval('pgqueue.job_id_seq')").fetchall()[0][0]
                    caller.rollback()
                    with lock:
                        committed.update(dict.fromkeys(ids, stamp))

    with pgqueue.PgQueue(database) as second, pgqueue.PgQueue(database) as third:
        for app in (second, third):
            define(app, "plain", work)
        producers = [threading.Thread(target=produce, args=(seed,), daemon=True) for seed in range(4)]
        with running(pq, concurrency=3), running(second, concurrency=3), running(third, concurrency=3):
            for producer in producers:
                producer.start()
            for producer in producers:
                producer.join(PATIENCE)
            wait_for_count(admin, len(committed), "archive", seconds=PATIENCE * 2)
    assert overlaps == []
    assert count(admin, "job") == 0
    by_key: dict[str, list[tuple[int, int]]] = {}
    for job_id, (key, place) in first_place.items():
        by_key.setdefault(key, []).append((place, job_id))
    for places in by_key.values():
        places.sort()
        for number, (place, job_id) in enumerate(places):
            for _, older in places[number + 1 :]:
                assert older > job_id or committed[older] > place - A_MOMENT, (older, job_id, "was overtaken")

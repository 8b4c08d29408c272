"""Lanes: ordering, concurrency and fairness keys, from the enqueue to the last job of a key."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])


class Diary:
    """What ran when: begin and end of every run, per key, as the handlers saw it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: dict[str, list[int]] = {}

    def enter(self, key: str, number: int) -> None:
        with self.lock:
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])
            self.order.setdefault(key, []).append(number)

    def leave(self, key: str) -> None:
        with self.lock:
            self.running[key] -= 1

    def note(self, key: str, number: int) -> None:
        self.enter(key, number)
        time.sleep(0.002)
        self.leave(key)


def states(pq: pgqueue.PgQueue) -> list[str]:
    return [job.state for job in pq.jobs(limit=1000)]


@COLOURS
def test_jobs_of_one_ordering_key_run_in_order_and_never_two_at_once(
    colour: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    diary = Diary()
    task = define(pq, colour, diary.note, ordering_key=lambda key, number: key)
    with pgqueue.PgQueue(database) as other:
        define(other, colour, diary.note)
        task.enqueue_many((f"key {number % 7}", number) for number in range(350))
        with running(pq, concurrency=4), running(other, concurrency=4):
            task.enqueue_many((f"key {number % 7}", number) for number in range(350, 700))
            wait_for_count(admin, 700, "archive")
            wait_for_count(admin, 0, "admission")
    assert set(diary.most.values()) == {1}
    assert len(diary.order) == 7
    for numbers in diary.order.values():
        assert numbers == sorted(numbers)


@COLOURS
def test_no_more_jobs_of_a_concurrency_key_are_in_work_than_its_limit_and_the_slots_are_used(
    colour: str, pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    gate = threading.Barrier(3, timeout=PATIENCE)
    diary = Diary()

    def work(key: str, number: int) -> None:
        diary.enter(key, number)
        if number < 3:
            gate.wait()  # all three slots are in use at once, or this breaks
        time.sleep(0.001)
        diary.leave(key)

    options = {"concurrency_key": lambda key, number: key, "concurrency_limit": 3}
    task = pq.task(name="work", queue="q", **options)(work)
    with pgqueue.PgQueue(database) as other:
        other.task(name="work", queue="q")(work)
        task.enqueue_many(("tenant", number) for number in range(200))
        with running(pq, concurrency=8), running(other, concurrency=8):
            wait_for_count(admin, 200, "archive")
    assert diary.most["tenant"] == 3
    assert sorted(diary.order["tenant"]) == list(range(200))


def test_a_job_waits_for_its_key_is_called_blocked_and_is_claimed_in_its_turn(pq: pgqueue.PgQueue) -> None:
    ids = [pq.enqueue("work", [number], queue="q", ordering_key="a") for number in range(3)]
    other = pq.enqueue("work", [9], queue="q", ordering_key="b")
    assert states(pq) == ["blocked"] * 4
    first = pq.claim("q", limit=10)
    assert [job.id for job in first] == [ids[0], other]
    assert states(pq) == ["running", "blocked", "blocked", "running"]
    assert pq.claim("q", limit=10) == []
    [row] = pq.status()
    assert (row.ready, row.blocked, row.running) == (0, 2, 2)
    pq.complete(first[0])
    [second] = pq.claim("q", limit=10)
    assert second.id == ids[1]
    pq.complete(first[1])
    pq.complete(second)
    [third] = pq.claim("q", limit=10)
    assert third.id == ids[2]


def test_a_retry_keeps_its_place_in_an_ordering_key_and_nothing_overtakes_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen: list[tuple[int, int]] = []

    @pq.task(name="work", queue="q", ordering_key="a", retry=pgqueue.Fixed(0.1))
    def work(number: int) -> None:
        attempt = pgqueue.current_job().job.attempt
        seen.append((number, attempt))
        if number == 1 and attempt < 3:
            raise ValueError("not yet")
        if number == 3 and attempt == 1 and (3, 1) not in seen[:-1]:
            raise pgqueue.Snooze(0.1)

    work.enqueue_many((number,) for number in range(6))
    with running(pq, concurrency=4):
        wait_for_count(admin, 6, "archive")
    assert seen == [(0, 1), (1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (3, 1), (4, 1), (5, 1)]


def test_a_retry_gives_up_its_slot_of_a_concurrency_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    [failing, *others] = [
        pq.enqueue("work", [number], queue="q", concurrency_key="a", concurrency_limit=1) for number in range(3)
    ]
    [job] = pq.claim("q")
    assert job.id == failing
    pq.fail(job, "broken", delay=3600)
    [job] = pq.claim("q")
    assert job.id == others[0]
    pq.complete(job)
    admin.execute("UPDATE pgqueue.job SET run_at = now() WHERE id = %s", [failing])
    assert pq.promote("q") == [failing]
    [job] = pq.claim("q", limit=5)
    assert job.id == failing, "due again, it is first in its line"


def test_a_job_for_later_joins_its_line_when_it_is_due(pq: pgqueue.PgQueue, admin: Admin) -> None:
    later = pq.enqueue("work", queue="q", ordering_key="a", delay=3600)
    now = pq.enqueue("work", queue="q", ordering_key="a")
    assert count(admin, "admission") == 1
    [job] = pq.claim("q", limit=5)
    assert job.id == now
    admin.execute("UPDATE pgqueue.job SET run_at = now() WHERE id = %s", [later])
    pq.promote("q")
    assert pq.claim("q", limit=5) == []
    pq.complete(job)
    assert [one.id for one in pq.claim("q", limit=5)] == [later]


@pytest.mark.parametrize(
    "ending", ["dead", "discarded", "cancelled while waiting", "cancelled while running", "lost for good"]
)
def test_whatever_ends_a_job_the_next_of_its_key_follows(ending: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    first = pq.enqueue("work", queue="q", ordering_key="a", max_attempts=1)
    second = pq.enqueue("work", queue="q", ordering_key="a")
    if ending == "cancelled while waiting":
        assert pq.cancel(first) == {first: "cancelled"}
    else:
        [job] = pq.claim("q", limit=5)
        assert job.id == first
        if ending == "dead":
            pq.fail(job, "broken")
        elif ending == "discarded":
            pq.run(pq.settle_op(job, lambda _: pgqueue.outcome.Outcome(pgqueue.outcome.OutcomeKind.DISCARD)))
        elif ending == "cancelled while running":
            assert pq.cancel(first) == {first: "requested"}
            pq.release(job)
        else:
            admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
            assert pq.rescue("q").dead == [first]
    assert [one.id for one in pq.claim("q", limit=5)] == [second]


def test_a_lost_job_stays_the_first_of_its_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ids = [pq.enqueue("work", queue="q", ordering_key="a") for _ in range(2)]
    assert [job.id for job in pq.claim("q", limit=5)] == ids[:1]
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    assert pq.rescue("q").returned == ids[:1]
    assert [job.id for job in pq.claim("q", limit=5)] == ids[:1]


def test_a_key_that_parks_stops_at_a_dead_letter_until_it_is_redriven_or_unparked(pq: pgqueue.PgQueue) -> None:
    def enqueue() -> int:
        return pq.enqueue("work", queue="q", ordering_key="a", on_dead="park", max_attempts=1)

    ids = [enqueue() for _ in range(3)]
    [job] = pq.claim("q")
    pq.fail(job, "broken")
    assert pq.claim("q", limit=5) == []
    [lane] = pq.lanes("q")
    assert (lane.kind, lane.key, lane.parked_by, lane.admitted, lane.blocked) == ("ordering", "a", ids[0], 0, 2)
    assert lane.parked_at is not None
    assert pq.redrive(ids=ids[0]) == ids[:1]
    [job] = pq.claim("q", limit=5)
    assert job.id == ids[0], "redriven, it goes before those that came after it"
    pq.fail(job, "broken again")
    assert pq.claim("q", limit=5) == []
    assert pq.unpark("q", "a")
    assert not pq.unpark("q", "a")
    assert [one.id for one in pq.claim("q", limit=5)] == [ids[1]]


def test_the_limit_of_a_key_is_changed_at_run_time(pq: pgqueue.PgQueue) -> None:
    for _ in range(10):
        pq.enqueue("work", queue="q", concurrency_key="a", concurrency_limit=2)
    assert len(pq.claim("q", limit=10)) == 2
    pq.limit_key("q", "a", 5)
    held = pq.claim("q", limit=10)
    assert len(held) == 3
    pq.limit_key("q", "a", 1)
    pq.complete(held)
    assert pq.claim("q", limit=10) == []
    pq.limit_key("q", "a", None)
    assert pq.claim("q", limit=10) == []  # two are in work, which is what the jobs themselves say
    [lane] = pq.lanes("q")
    assert (lane.kind, lane.key, lane.width, lane.admitted, lane.blocked) == ("concurrency", "a", None, 2, 5)


def test_one_tenant_with_many_jobs_does_not_starve_another_with_few(pq: pgqueue.PgQueue, admin: Admin) -> None:
    done: list[str] = []
    task = pq.task(name="work", queue="q", fairness_key=lambda tenant: tenant)(done.append)
    task.enqueue_many(("large",) for _ in range(5000))
    with running(pq, concurrency=1):
        wait_until(lambda: len(done) > 200, PATIENCE, "the large one is under way")
        task.enqueue_many(("small",) for _ in range(10))
        wait_for_count(admin, 5010, "archive")
    last = max(index for index, tenant in enumerate(done) if tenant == "small")
    assert done.count("small") == 10
    assert last < 4000, "ten jobs do not wait for the five thousand that came before them"


def test_keys_of_one_call_are_made_from_its_arguments_and_none_means_no_key(pq: pgqueue.PgQueue, admin: Admin) -> None:
    @pq.task(queue="q", ordering_key=lambda user, **_: None if user == 0 else f"user {user}")
    def work(user: int, note: str = "") -> None: ...

    work.enqueue(0)
    work.enqueue(1, note="x")
    work.enqueue_many([(0,), {"user": 2, "note": "y"}])
    rows = admin.execute("SELECT lane, position IS NULL FROM pgqueue.job ORDER BY id").fetchall()
    assert rows == [(None, False), ("ouser 1", True), (None, False), ("ouser 2", True)]


def test_drain_ends_only_when_all_that_waits_for_its_key_is_done(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, "plain", lambda number: None, ordering_key="a")
    task.enqueue_many((number,) for number in range(50))
    with running(pq, drain=True) as watched:
        assert watched.join() == 0
    assert count(admin, "archive") == 50


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ordering_key": ""}, "ordering_key must not be empty"),
        ({"ordering_key": 7}, "ordering_key must be text, not int"),
        ({"ordering_key": "x" * 501}, "ordering_key must not be longer than 500 bytes"),
        ({"ordering_key": "a\x00"}, "U\\+0000"),
        ({"ordering_key": "a", "concurrency_key": "b", "concurrency_limit": 1}, "not ordering_key and concurrency_key"),
        ({"concurrency_key": "a"}, "concurrency_key and concurrency_limit belong together"),
        ({"concurrency_limit": 3}, "concurrency_key and concurrency_limit belong together"),
        ({"concurrency_key": "a", "concurrency_limit": 0}, "concurrency_limit must be"),
        ({"on_dead": "park"}, "it needs an ordering_key"),
        ({"on_dead": "stop"}, 'on_dead must be "continue" or "park"'),
        ({"ordering_key": lambda: 1 / 0}, "could not be made from the arguments: ZeroDivisionError"),
        ({"ordering_key": lambda: 5}, "ordering_key must be text, not int"),
    ],
)
def test_bad_keys_are_refused_with_a_sentence(options: dict[str, Any], sentence: str, pq: pgqueue.PgQueue) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match=sentence):
        pq.enqueue("work", queue="q", **options)
    assert pq.jobs() == []

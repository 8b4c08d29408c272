"""Expiry, cancellation in bulk, pauses of tasks and ageing, where jobs have keys: no lane stands, and its order stays."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import ageing as ageing_ops
from pgqueue.ops import status as status_ops
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
OLD = "UPDATE pgqueue.job SET expires_at = clock_timestamp() - interval '1 second' WHERE id = %s"
KEYS: list[dict[str, Any]] = [{"ordering_key": "k"}, {"concurrency_key": "k", "concurrency_limit": 1}]


def enqueue(pq: pgqueue.PgQueue, task: str, **options: Any) -> int:
    return pq.enqueue(task, queue="q", **options)


def claimed(pq: pgqueue.PgQueue) -> list[int]:
    return [job.id for job in pq.claim("q", limit=100)]


# Expiry


@pytest.mark.parametrize("where", ["in line", "between two attempts", "among the blocked"])
def test_an_expired_job_of_an_ordering_key_lets_the_next_follow(where: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    first, second, third = (enqueue(pq, "work", ordering_key="k", expires_in=3600) for _ in range(3))
    [job] = pq.claim("q", limit=10)
    assert job.id == first
    if where == "in line":
        pq.release(job)
    elif where == "between two attempts":
        pq.fail(job, "not yet", delay=3600)
    late = second if where == "among the blocked" else first
    admin.execute(OLD, [late])
    assert pq.expire("q") == [late]
    assert admin.execute("SELECT state FROM pgqueue.archive WHERE id = %s", [late]).fetchall() == [("expired",)]
    if where == "among the blocked":
        assert claimed(pq) == [], "the first one still runs"
        pq.complete(job)
        assert claimed(pq) == [third]
    else:
        assert claimed(pq) == [second], "no repair has looked at the lane"


def test_workers_that_hear_are_told_of_the_slot_that_an_expired_job_leaves(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    keyed, plain = enqueue(pq, "work", ordering_key="k", expires_in=3600), enqueue(pq, "work", expires_in=3600)
    with psycopg.connect(database, autocommit=True) as ears:
        ears.execute("LISTEN pgqueue")
        admin.execute(OLD, [plain])
        assert pq.expire("q") == [plain]
        admin.execute(OLD, [keyed])
        assert pq.expire("q") == [keyed]
        [notice] = ears.notifies(timeout=PATIENCE, stop_after=1)
        assert notice.payload == "key q"
        assert not list(ears.notifies(timeout=0))


def test_a_worker_runs_the_next_of_a_key_after_one_that_expired_under_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran: list[int] = []

    def body(number: int) -> None:
        ran.append(number)
        if number == 0:
            raise ValueError("not yet")

    work = define(pq, "plain", body, ordering_key="k", retry=pgqueue.Fixed(3600))
    with running(pq, poll=600) as worker:
        first = work.options(expires_in=3600).enqueue(0)
        later = work.enqueue_many([(1,), (2,)])
        wait_for_count(admin, 1, "job", "run_at IS NOT NULL")
        assert ran == [0]
        admin.execute(OLD, [first])
        worker.wait_for(pgqueue.EventName.JOBS_EXPIRED, queue="q", ids=[first], count=1)
        wait_for_count(admin, 2, "archive", "state = 'completed'")
        wait_for_count(
            admin, 0, "admission"
        )  # what the last end has left: a worker that stops leaves it to the next one
    assert ran == [0, 1, 2]
    ended = admin.execute("SELECT id, state FROM pgqueue.archive ORDER BY finished_at, id").fetchall()
    assert ended == [(first, "expired"), *((job_id, "completed") for job_id in later)]
    assert count(admin, "admission") == 0


def test_of_an_ordering_key_with_old_and_young_jobs_the_young_ones_run_in_order(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    ran: list[int] = []
    work = define(pq, "plain", ran.append, ordering_key=lambda number: f"key {number % 5}")
    with pgqueue.PgQueue(database) as other:
        define(other, "plain", ran.append)
        young = work.enqueue_many((number,) for number in range(100))
        old = work.options(expires_in=0.001).enqueue_many((number,) for number in range(100, 200))
        young += work.enqueue_many((number,) for number in range(200, 300))
        with running(pq, concurrency=4), running(other, concurrency=4):
            wait_for_count(admin, 300, "archive")
    assert not set(ran) & set(range(100, 200))
    for key in range(5):
        numbers = [number for number in ran if number % 5 == key]
        assert numbers == sorted(numbers)
    assert len(ran) == len(young)
    assert count(admin, "archive", "state = 'expired' AND attempt = 0") == len(old)
    assert count(admin, "job") == 0


# Cancellation in bulk


@pytest.mark.parametrize("keys", KEYS)
def test_what_a_cancellation_in_bulk_takes_out_of_a_lane_lets_the_next_follow(
    keys: dict[str, Any], pq: pgqueue.PgQueue, admin: Admin
) -> None:
    for _ in range(3):
        enqueue(pq, "unwanted", **keys)
    wanted = [enqueue(pq, "wanted", **keys) for _ in range(2)]
    [job] = pq.claim("q", limit=10)
    pq.release(job)  # it stands in line, and holds the slot
    assert count(admin, "admission") == 0
    assert pq.count_live(queue="q", task="unwanted") == (3, 0)
    assert pq.cancel_all(queue="q", task="unwanted") == (3, 0)
    assert claimed(pq) == wanted[:1]
    assert pq.cancel_all(**{name: value for name, value in keys.items() if name != "concurrency_limit"}) == (1, 1)
    assert count(admin, "job") == 1


# Pauses of tasks


@pytest.mark.parametrize("keys", KEYS)
def test_a_job_of_a_paused_task_holds_the_slot_of_its_key_and_the_order_stays(
    keys: dict[str, Any], pq: pgqueue.PgQueue
) -> None:
    mail, report = enqueue(pq, "mail", **keys), enqueue(pq, "report", **keys)
    other = enqueue(pq, "report", ordering_key="other")
    pq.pause("q", task="mail")
    assert claimed(pq) == [other]
    [status] = pq.status(["q"])
    assert (status.ready, status.blocked) == (1, 1)
    pq.resume("q", task="mail")
    [job] = pq.claim("q", limit=10)
    assert job.id == mail
    pq.complete(job)
    assert claimed(pq) == [report]


def test_a_worker_that_drains_leaves_what_stands_behind_a_paused_task_in_its_lane(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ran: list[str] = []
    paused = define(pq, "plain", lambda: ran.append("paused"), name="paused")
    open_ = define(pq, "plain", ran.append, name="open")
    pq.pause("q", task="paused")
    for key in ("a", "b"):
        paused.options(ordering_key=key).enqueue()
        open_.options(ordering_key=key).enqueue("behind")
    open_.options(ordering_key="c").enqueue_many([("first",), ("second",)])
    paused.options(ordering_key="c").enqueue()
    shared = {"concurrency_key": "k", "concurrency_limit": 2}
    paused.options(**shared).enqueue()  # it holds one of two slots
    open_.options(**shared).enqueue_many([("one",), ("two",), ("three",)])
    with running(pq, drain=True) as worker:
        assert worker.join() == 0
    assert sorted(ran) == ["first", "one", "second", "three", "two"]
    assert count(admin, "job", "task = 'paused'") == 4
    assert count(admin, "job", "task = 'open'") == 2


def test_a_queue_is_not_drained_while_a_lane_behind_a_paused_task_is_unsettled_or_runs(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    def drained() -> bool:
        return pq.run(status_ops.drained("q"))

    enqueue(pq, "paused", ordering_key="k"), enqueue(pq, "open", ordering_key="k")
    assert not drained()
    pq.pause("q", task="paused")
    assert not drained(), "nobody has admitted anything yet"
    assert claimed(pq) == []
    assert drained()
    admin.execute("INSERT INTO pgqueue.admission (queue, lane) VALUES ('q', 'ok')")
    assert not drained(), "its slot may be free"
    assert claimed(pq) == []
    assert drained()
    pq.resume("q", task="paused")
    [job] = pq.claim("q")
    pq.pause("q", task="paused")
    assert not drained(), "it runs, and lets the next follow"
    pq.fail(job, "not yet", delay=3600)
    assert drained()


def test_a_pause_that_ends_lets_a_worker_go_on_with_the_lane(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ran: list[str] = []
    first = define(pq, "plain", ran.append, name="first", ordering_key="k")
    second = define(pq, "plain", ran.append, name="second", ordering_key="k")
    with running(pq, poll=600) as worker:
        wait_until(worker.worker._hearing, PATIENCE, "the worker hears")
        pq.pause("q", task="first", seconds=2)
        first.enqueue("first"), second.enqueue("second")
        wait_for_count(admin, 2, "archive", "state = 'completed'")
    assert ran == ["first", "second"]


# Ageing


def test_a_blocked_job_begins_to_age_when_it_is_admitted(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def tick() -> int:
        admin.execute("UPDATE pgqueue.queue SET aged_at = aged_at - interval '1 hour'")
        return pq.run(ageing_ops.age("q"))

    pq.set_queue("q", ageing=3600)
    limited = {"concurrency_key": "k", "concurrency_limit": 1}
    low = [enqueue(pq, "work", priority=-9, **limited) for _ in range(2)]
    [job] = pq.claim("q", limit=10)
    pq.release(job)
    top = enqueue(pq, "work")
    assert (tick(), tick(), tick()) == (0, 1, 1)
    priorities = dict(admin.execute("SELECT id, priority FROM pgqueue.job").fetchall())
    assert priorities == {low[0]: -7, low[1]: -9, top: 0}
    pq.complete(pq.claim("q", limit=10))
    [job] = pq.claim("q", limit=10)
    assert (job.id, job.priority) == (low[1], -9)
    pq.release(job)
    enqueue(pq, "work")
    assert (tick(), tick()) == (0, 1)
    assert admin.execute("SELECT priority FROM pgqueue.job WHERE id = %s", [low[1]]).fetchall() == [(-8,)]


# Middleware


def test_middleware_is_asked_about_jobs_with_keys_and_their_headers_travel(pq: pgqueue.PgQueue, admin: Admin) -> None:
    seen: list[Any] = []

    class Signed(pgqueue.Middleware):
        def enqueue(self, call: pgqueue.EnqueueCall) -> None:
            call.headers["by"] = "shop"

        def run(self, job: pgqueue.CurrentJob, proceed: Any) -> Any:
            seen.append((threading.current_thread().name, job.headers))
            return proceed()

    pq.middleware(Signed())
    work = define(pq, "plain", lambda number: None, ordering_key="k")
    work.enqueue(1)
    work.enqueue_many([(2,), (3,)])
    enqueue(pq, "elsewhere", ordering_key="k", delay=3600)
    assert admin.execute("SELECT headers->>'by', lane FROM pgqueue.job").fetchall() == [("shop", "ok")] * 4
    with running(pq):
        wait_for_count(admin, 3, "archive", "state = 'completed'")
    assert [headers for _, headers in seen] == [{"by": "shop"}] * 3

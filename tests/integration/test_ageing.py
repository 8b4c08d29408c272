"""Priority ageing: nobody waits for ever, nothing is moved twice in a tick, and nothing for no reason."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import Step
from pgqueue.ops import ageing as ageing_ops
from pgqueue.ops import rescue as rescue_ops
from tests.waiting import wait_until
from tests.workers import PATIENCE, define, running, wait_for_count

Admin = psycopg.Connection[Any]


def enqueue(pq: pgqueue.PgQueue, number: int, priority: int) -> list[int]:
    task = pq.task(name="work", queue="q")(work)
    return task.options(priority=priority).enqueue_many([(n,) for n in range(number)])


def work(number: int) -> None: ...


def tick(pq: pgqueue.PgQueue, admin: Admin) -> int:
    """The time between two ticks has passed, and maintenance looks; how many jobs moved up."""
    admin.execute("UPDATE pgqueue.queue SET aged_at = aged_at - interval '1 hour'")
    return pq.run(ageing_ops.age("q"))


def priorities(admin: Admin) -> dict[int, int]:
    return dict(admin.execute("SELECT id, priority FROM pgqueue.job ORDER BY id").fetchall())


def test_with_ageing_a_low_job_is_run_although_high_ones_never_stop(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.set_queue("q", ageing=3600)
    [low] = enqueue(pq, 1, 0)
    tick(pq, admin)
    ticks = 0
    while low in priorities(admin):
        enqueue(pq, 4, 5)  # more than are claimed
        tick(pq, admin)
        ticks += 1
        pq._low_water.clear()  # a full pass, as at least once a second
        jobs = pq.claim("q", limit=3)
        # A step of priority each; then it is the first in its line.
        assert (low in [job.id for job in jobs]) == (ticks == 5)
        pq.complete(jobs)
    assert ticks == 5


def test_only_what_has_waited_since_the_last_tick_moves_and_never_beyond_the_highest_in_line(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.set_queue("q", ageing=3600)
    [top] = enqueue(pq, 1, 2)
    low = enqueue(pq, 2, 0)
    assert tick(pq, admin) == 0  # nobody knows yet how long they have waited
    late = enqueue(pq, 1, 0)
    assert tick(pq, admin) == 2
    assert priorities(admin) == {top: 2, low[0]: 1, low[1]: 1, late[0]: 0}
    assert tick(pq, admin) == 3
    assert tick(pq, admin) == 1
    assert tick(pq, admin) == 0
    assert set(priorities(admin).values()) == {2}
    assert [job.id for job in pq.claim("q", limit=10)] == [top, *low, *late]


def test_a_running_job_counts_as_in_line_and_is_not_moved(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.set_queue("q", ageing=3600)
    [high] = enqueue(pq, 1, 1)
    [middle] = enqueue(pq, 1, 0)
    pq.claim("q", limit=1)
    assert pq.claim("q", limit=1)[0].id == middle
    [low] = enqueue(pq, 1, -5)
    tick(pq, admin)
    assert tick(pq, admin) == 1
    assert priorities(admin) == {high: 1, middle: 0, low: -4}


def test_jobs_of_one_priority_are_never_rewritten(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.set_queue("q", ageing=3600)
    enqueue(pq, 50, 0)
    before = admin.execute("SELECT id, xmin::text, ctid::text FROM pgqueue.job ORDER BY id").fetchall()
    assert [tick(pq, admin) for _ in range(5)] == [0] * 5
    assert admin.execute("SELECT id, xmin::text, ctid::text FROM pgqueue.job ORDER BY id").fetchall() == before


def test_without_the_setting_nothing_ages_and_maintenance_does_not_look(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 1, 5)
    enqueue(pq, 1, 0)
    pq.pause("q", seconds=1)  # a queue with a row, and without the setting
    assert pq.run(rescue_ops.agenda("q")).age_in is None
    assert [tick(pq, admin) for _ in range(3)] == [0] * 3
    pq.set_queue("q", ageing=60)
    assert pq.run(rescue_ops.agenda("q")).age_in == 0
    assert pq.status(["q"])[0].ageing == 60
    tick(pq, admin)
    pq.set_queue("q", ageing=None)
    assert tick(pq, admin) == 0
    assert pq.status(["q"])[0].ageing is None


def test_the_next_tick_comes_after_the_time_that_was_set(pq: pgqueue.PgQueue) -> None:
    pq.set_queue("q", ageing=3600)
    enqueue(pq, 1, 5)
    enqueue(pq, 1, 0)
    assert [pq.run(ageing_ops.age("q")) for _ in range(3)] == [0] * 3
    age_in = pq.run(rescue_ops.agenda("q")).age_in
    assert age_in is not None
    assert 3000 < age_in <= 3600


def batch(pq: pgqueue.PgQueue, limit: int, using: Any = None) -> tuple[Any, ...]:
    def op() -> Any:
        return (yield Step("job_age", {"queue": "q", "limit": limit}))

    return pq.run(op(), using)[0]  # type: ignore[no-any-return]


def begun(pq: pgqueue.PgQueue, admin: Admin) -> dict[int, int]:
    """A tick that has begun: three levels, the highest in line at 9. What each job shall be in the end."""
    pq.set_queue("q", ageing=3600)
    wanted = dict.fromkeys(enqueue(pq, 3, 9), 9)
    for level in (8, 7, 0):
        wanted |= dict.fromkeys(enqueue(pq, 10, level), level + 1)
    pq.run(ageing_ops.age("q"))
    admin.execute("UPDATE pgqueue.queue SET aged_at = aged_at - interval '1 hour'")

    def op() -> Any:
        return (yield Step("ageing_tick", {"queue": "q"}))

    assert pq.run(op()) == [(8,)]
    return wanted


def test_a_tick_that_was_cut_off_goes_on_where_it_was_and_moves_each_job_once(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    wanted = begun(pq, admin)
    moved = 0
    for _ in range(20):  # each as if by another worker, after the last one has died
        ids, level = batch(pq, 3)
        moved += len(ids or ())
        if level is None:
            break
    assert moved == 30
    assert priorities(admin) == wanted


def test_two_workers_never_move_a_job_twice_in_one_tick(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    wanted = begun(pq, admin)
    with psycopg.connect(database) as caller:
        ids, level = batch(pq, 3, caller)
        assert (len(ids), level) == (3, 8)
        assert batch(pq, 3) == (None, None)  # it is not this one's turn, and it does not wait for it
        caller.rollback()
    results: list[int] = []

    def age() -> None:
        while wanted != priorities_of(database):
            results.append(pq.run(ageing_ops.age("q")))

    threads = [threading.Thread(target=age) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert priorities(admin) == wanted
    assert sum(results) == 30


def priorities_of(database: str) -> dict[int, int]:
    with psycopg.connect(database, autocommit=True) as look:
        return priorities(look)


def test_a_job_that_is_claimed_while_its_line_ages_is_left_alone(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    wanted = begun(pq, admin)
    with psycopg.connect(database) as caller:
        claimed = {job.id: job.priority for job in pq.claim("q", limit=5, using=caller)}
        while batch(pq, 100)[1] is not None:
            pass
        caller.commit()
    assert sorted(claimed.values()) == [8, 8, 9, 9, 9]
    assert priorities(admin) == wanted | claimed


def test_a_worker_lets_priorities_age_by_itself(pq: pgqueue.PgQueue, admin: Admin) -> None:
    begun_, free = threading.Event(), threading.Event()

    def block() -> None:
        begun_.set()
        assert free.wait(PATIENCE)

    define(pq, "plain", block, name="block", priority=3).enqueue()
    low = define(pq, "plain", lambda: None, name="low", priority=0)
    pq.set_queue("q", ageing=0.2)
    with running(pq, concurrency=1) as worker:
        assert begun_.wait(PATIENCE)
        low.enqueue()
        wait_for_count(admin, 1, "job", "task = 'low' AND priority = 3")
        steps = sum(event.facts["count"] for event in worker.seen(pgqueue.EventName.JOBS_AGED))
        wait_until(lambda: worker.seen(pgqueue.EventName.JOBS_AGED), PATIENCE, "it is told")
        assert steps <= 3
        free.set()
        wait_for_count(admin, 2, "archive")


@pytest.mark.parametrize("value", [0, -1, True, "5", float("nan"), 0.01])
def test_an_ageing_that_makes_no_sense_is_refused(value: Any) -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    with pytest.raises(pgqueue.ConfigurationError, match="ageing"):
        pq.set_queue("q", ageing=value)


@pytest.mark.parametrize("moment", ["infinity", "-infinity"])
@pytest.mark.parametrize("ageing", ["60", "infinity", "nan", "1e300"])
def test_a_setting_written_by_hand_does_not_stop_maintenance(
    ageing: str, moment: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.set_queue("q", ageing=60)
    admin.execute("UPDATE pgqueue.queue SET aged_at = %s, ageing = %s", [moment, ageing])
    assert pq.run(rescue_ops.agenda("q")).age_in == 0
    for _ in range(2):
        pq.run(ageing_ops.age("q"))
    age_in = pq.run(rescue_ops.agenda("q")).age_in
    assert age_in is not None
    assert 0 < age_in <= (60 if ageing == "60" else 1e9)

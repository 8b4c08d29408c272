"""Races and traps that were found once: two connections, in a fixed order."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import worker as worker_ops
from pgqueue.worker import Worker, WorkerOptions
from tests.waiting import wait_until
from tests.workers import running


def expire(admin: psycopg.Connection[Any]) -> None:
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")


def enqueue(pq: pgqueue.PgQueue, number: int, **options: Any) -> list[int]:
    return [pq.enqueue("anything", [n], queue="q", **options) for n in range(number)]


def test_an_open_settle_does_not_stop_the_rescue_of_the_others(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    ids = enqueue(pq, 4)
    jobs = [pq.claim("q", limit=2), pq.claim("q", limit=2)]
    expire(admin)
    with psycopg.connect(database) as caller:
        pq.complete(jobs[0][0], using=caller)
        assert sorted(pq.rescue("q").returned) == ids[1:]
        caller.rollback()
    assert pq.rescue("q").returned == [ids[0]]
    assert admin.execute("SELECT count(*) FROM pgqueue.lease").fetchone() == (0,)


def test_a_settle_that_commits_after_a_rescue_passed_by_is_accepted(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    enqueue(pq, 1)
    [job] = pq.claim("q")
    expire(admin)
    with psycopg.connect(database) as caller:
        pq.complete(job, using=caller)
        assert not any(pq.rescue("q"))
        caller.commit()
    assert not any(pq.rescue("q"))
    assert admin.execute(
        "SELECT (SELECT count(*) FROM pgqueue.lease), (SELECT count(*) FROM pgqueue.job)"
    ).fetchone() == (0, 0)


def test_many_expired_leases_are_all_looked_at_in_one_rescue(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    ids = enqueue(pq, 65)
    while pq.claim("q", limit=1):
        pass
    expire(admin)
    assert sorted(pq.rescue("q").returned) == ids


@pytest.mark.parametrize("method", ["release", "snooze", "fail", "fail for the last time"])
def test_a_cancellation_that_commits_while_a_settle_waits_for_the_row_is_honoured(
    method: str, pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    [job_id] = enqueue(pq, 1, max_attempts=1 if "last" in method else 5)
    [job] = pq.claim("q")
    errors: list[BaseException] = []

    def settle() -> None:
        try:
            extra = {"snooze": (5,), "release": ()}.get(method, ("broken",))
            getattr(pq, method.split()[0])(job, *extra)
        except BaseException as error:
            errors.append(error)

    with psycopg.connect(database) as operator:
        assert pq.cancel(job_id, using=operator) == {job_id: "requested"}
        thread = threading.Thread(target=settle)
        thread.start()
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        end = time.monotonic() + 30
        while admin.execute(waiting).fetchone() == (0,):
            assert time.monotonic() < end
        operator.commit()
        thread.join(30)
    assert errors == []
    assert admin.execute("SELECT id, state FROM pgqueue.archive").fetchall() == [(job_id, "cancelled")]
    assert admin.execute("SELECT count(*) FROM pgqueue.job").fetchone() == (0,)


def test_a_heartbeat_extends_the_leases_that_nobody_locks(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    identity = worker_ops.Identity(name="w", hostname="h", pid=1, version="0", queues=["q"], concurrency=1, lease=30)
    worker_id = pq.run(worker_ops.register(identity))
    enqueue(pq, 2)
    locked, free = (pq.claim("q")[0].token for _ in range(2))
    admin.execute("UPDATE pgqueue.lease SET worker_id = %s", [worker_id])
    with psycopg.connect(database) as caller:
        caller.execute("SELECT 1 FROM pgqueue.lease WHERE id = %s FOR UPDATE", [locked])
        answer = pq.run(worker_ops.beat_leases(worker_id, "q", [locked, free, 12345], lease=30))
    assert answer == {locked: (False, [], []), free: (True, [], [])}
    assert pq.run(worker_ops.beat_leases(worker_id + 1, "q", [locked, free], lease=30)) == {}


def test_a_row_with_a_place_and_a_time_waits_for_its_time(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    admin.execute("INSERT INTO pgqueue.job (queue, task, run_at) VALUES ('q', 't', now() + interval '1 hour')")
    assert pq.claim("q") == []
    admin.execute("UPDATE pgqueue.job SET run_at = now()")
    assert len(pq.promote("q")) == 1
    assert len(pq.claim("q")) == 1


@pytest.mark.parametrize("column", ["errors = '{}'", "errors = '5'", "attempt = 2147483647", "priority = -32768"])
def test_a_row_written_by_hand_does_not_stop_its_queue(
    column: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    odd = enqueue(pq, 1)
    ids = enqueue(pq, 3)
    admin.execute(f"UPDATE pgqueue.job SET {column} WHERE id = {odd[0]}".encode())
    taken = [job for _ in range(4) for job in pq.claim("q", limit=1)]
    assert {job.id for job in taken} == {*odd, *ids}
    expire(admin)
    rescued = pq.rescue("q")
    assert sorted(rescued.returned + rescued.dead) == sorted(odd + ids)
    if rescued.dead:
        assert rescued.dead == odd
        return
    pq.fail(pq.claim("q", limit=4), "x", delay=0)
    pq.release(pq.claim("q", limit=4))


def test_a_bulk_on_a_connection_in_autocommit_is_all_or_nothing(pq: pgqueue.PgQueue, database: str) -> None:
    task = pq.task(name="work", queue="q")(lambda number: None)
    with psycopg.connect(database, autocommit=True) as connection:
        with pytest.raises(pgqueue.PayloadError):
            task.enqueue_many([(float("nan") if n == 6000 else n,) for n in range(6001)], using=connection)
        assert pq.status() == []
        assert len(task.enqueue_many([(n,) for n in range(6000)], using=connection)) == 6000
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    assert pq.status()[0].ready == 6000


def test_a_settle_that_names_a_job_twice_settles_it_once(pq: pgqueue.PgQueue) -> None:
    enqueue(pq, 1)
    [job] = pq.claim("q")
    pq.complete([job, job])
    with pytest.raises(pgqueue.LeaseLost):
        pq.complete(job)


@pytest.mark.parametrize("ids", ["0123", b"12", [1, "2"], [True], [2**63], 1.5])
def test_ids_that_are_no_numbers_are_refused(ids: Any, pq: pgqueue.PgQueue) -> None:
    enqueue(pq, 3)
    for call in (
        pq.cancel,
        lambda ids: pq.redrive(ids=ids),
        lambda ids: pq.purge(ids=ids),
        lambda ids: pq.jobs(ids=ids),
    ):
        with pytest.raises((pgqueue.ConfigurationError, TypeError)):
            call(ids)
    assert pq.status()[0].ready == 3


def test_a_connection_to_a_read_only_server_is_given_up(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    row = admin.execute("SELECT current_database()").fetchone()
    assert row is not None
    enqueue(pq, 1)
    admin.execute(f'ALTER DATABASE "{row[0]}" SET default_transaction_read_only = on'.encode())
    admin.execute(
        "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'pgqueue'"
    )
    with pytest.raises(pgqueue.DatabaseUnavailable):
        enqueue(pq, 1)
    with psycopg.connect(pq.settings.database_url or "", autocommit=True) as session:
        session.execute("SET default_transaction_read_only = off")
        session.execute(f'ALTER DATABASE "{row[0]}" RESET default_transaction_read_only'.encode())
    # Connections that the pool opened meanwhile began read-only, and each is given up in its turn.
    for _ in range(pq.settings.pool_size + 1):
        try:
            enqueue(pq, 1)
            break
        except pgqueue.DatabaseUnavailable:
            continue
    assert pq.status()[0].ready == 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_fork_while_another_thread_opens_the_pool_does_not_hang_the_child(pq: pgqueue.PgQueue) -> None:
    with pq._pool._lock:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                enqueue(pq, 1)
                status = 0
            finally:
                os._exit(status)
    end = time.monotonic() + 30
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert done[1] == 0


def test_a_blocked_event_loop_does_not_swallow_the_queue(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    blocked, go = threading.Event(), threading.Event()

    @pq.task(name="block", queue="q")
    async def block() -> None:
        blocked.set()
        go.wait(30)

    block.enqueue_many([()] * 500)
    with running(pq, concurrency=2, grace=0.0):
        assert blocked.wait(30)
        for _ in range(3):
            held = admin.execute("SELECT count(*) FROM pgqueue.job WHERE lease_id IS NOT NULL").fetchone()
            assert held is not None
            assert held[0] <= 10
            time.sleep(0.2)
        go.set()


def test_jobs_that_wait_behind_slow_ones_are_given_to_somebody_else(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    go = threading.Event()

    @pq.task(name="quick", queue="q")
    def quick() -> None: ...

    @pq.task(name="slow", queue="q")
    def slow() -> None:
        go.wait(60)

    quick.enqueue_many([()] * 2000)
    slow.enqueue_many([()] * 4)
    quick.enqueue_many([()] * 300)
    with running(pq, concurrency=2, grace=0.0):
        ready = "SELECT count(*) FROM pgqueue.job WHERE lease_id IS NULL"
        wait_until(
            lambda: admin.execute(ready).fetchone() == (302,), 30, "the jobs behind the slow ones are given back"
        )
        go.set()


@pytest.mark.parametrize("event", list(pgqueue.EventName))
def test_a_subscriber_that_exits_ends_no_part_of_a_worker(event: pgqueue.EventName, pq: pgqueue.PgQueue) -> None:
    def exits(emitted: pgqueue.Event) -> None:
        if emitted.name is event:
            raise SystemExit(3)

    @pq.task(name="work", queue="q", max_attempts=1)
    def work(number: int) -> None:
        if number == 0:
            raise ValueError("one fails")

    pq.events.subscribe(exits)
    work.enqueue_many([(number,) for number in range(10)])
    assert Worker(pq, WorkerOptions(concurrency=2, drain=True)).run() == 0
    assert (pq.status()[0].ready, pq.status()[0].running, pq.status()[0].dead) == (0, 0, 1)


def test_a_plain_function_that_returns_a_coroutine_has_not_run(pq: pgqueue.PgQueue) -> None:
    async def real() -> None: ...

    pq.task(name="wrapped", queue="q", max_attempts=1)(lambda: real())
    pq.enqueue("wrapped")
    assert Worker(pq, WorkerOptions(drain=True)).run() == 0
    [dead] = pq.dead_letters()
    assert "async def" in dead.reason

    def generator() -> Any:
        yield 1

    with pytest.raises(pgqueue.ConfigurationError, match="generator"):
        pq.task(name="generator")(generator)

"""Waiting for the end of jobs: woken by notifications, sure by looking."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import result as result_ops
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running

Admin = psycopg.Connection[Any]
State = pgqueue.JobState


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks passes more time than a test may take: only a notification can end a wait."""
    monkeypatch.setattr(result_ops, "FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(result_ops, "LONGEST_PAUSE", 1000.0)


def listening(admin: Admin, number: int = 1) -> None:
    """Wait until so many sessions listen for ends, or for none of them."""

    def sessions() -> bool:
        row = admin.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN \"pgqueue.done\"' AND datname = current_database()"
        ).fetchone()
        return row is not None and row[0] == number

    wait_until(sessions, PATIENCE, f"{number} sessions listen")


class Waiting:
    """A wait in a thread of its own."""

    def __init__(self, pq: pgqueue.PgQueue, ids: Any, timeout: float | None = None) -> None:
        self.answer: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(pq, ids, timeout), daemon=True)
        self._thread.start()

    def _run(self, pq: pgqueue.PgQueue, ids: Any, timeout: float | None) -> None:
        try:
            self.answer = pq.wait(ids, timeout)
        except BaseException as error:
            self.error = error

    def join(self) -> Any:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the wait does not end"
        assert self.error is None, repr(self.error)
        return self.answer


def test_a_wait_is_woken_by_the_end_of_a_job_whose_result_is_kept(
    no_polls: None, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    ends = {"discards": pgqueue.Discard("x"), "dies": pgqueue.DeadLetter("x")}

    def body(how: str) -> str:
        if how in ends:
            raise ends[how]
        return how

    task = define(pq, "plain", body, keep_result=60)
    ids = task.enqueue_many([("returns",), ("discards",), ("dies",)])
    waits = [Waiting(pq, job_id) for job_id in ids]
    listening(admin)  # one session for all who wait in this process
    time.sleep(0.2)  # every wait has looked once more, which no condition shows
    with running(pq):
        assert [wait.join().state for wait in waits] == [State.COMPLETED, State.DISCARDED, State.DEAD]


def test_a_wait_is_woken_when_a_job_expires(no_polls: None, pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = define(pq, "plain", lambda: None, keep_result=60, expires_in=0.3)
    with running(pq, queues=["other"]):
        pass  # says that results of this task are kept
    ids = task.enqueue_many([()] * 400)
    wait = Waiting(pq, ids)
    listening(admin)
    time.sleep(0.5)  # every wait has looked once more, and the jobs are too old
    with running(pq):
        ended = wait.join()
    assert {end.state for end in ended.values()} == {State.EXPIRED}
    assert {end.error for end in ended.values()} == {"expired before it ran"}


def test_a_wait_hears_of_many_ends_at_once(no_polls: None, pq: pgqueue.PgQueue, admin: Admin) -> None:
    """More than a notification has room for."""
    task = define(pq, "plain", lambda number: number, keep_result=60)
    ids = task.enqueue_many([(number,) for number in range(2000)])
    wait = Waiting(pq, ids)
    listening(admin)
    with running(pq):
        ended = wait.join()
    assert [ended[job_id].value for job_id in ids] == list(range(2000))


async def test_a_wait_in_asyncio_is_woken_and_blocks_nothing(
    no_polls: None, database: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = define(pq, "plain", lambda: "done", keep_result=60)
    job_id = task.enqueue()
    async with pgqueue.AsyncPgQueue(database) as waiter:
        wait = asyncio.create_task(waiter.wait(job_id))
        await asyncio.to_thread(listening, admin)
        await asyncio.sleep(0.2)
        assert not wait.done()
        with running(pq):
            assert (await asyncio.wait_for(wait, PATIENCE)).value == "done"
        with pytest.raises(pgqueue.WaitTimeout):
            await waiter.wait(pq.enqueue("nobody", queue="nobody"), 0.05)


@pytest.mark.parametrize("notify", [True, False])
def test_jobs_without_results_are_waited_for_as_well(notify: bool, database: str, admin: Admin) -> None:
    with pgqueue.PgQueue(database, notify=notify) as pq:

        def body(how: str) -> None:
            if how != "returns":
                raise {"discards": pgqueue.Discard("x"), "dies": pgqueue.DeadLetter("x")}[how]

        task = define(pq, "plain", body)
        ids = task.enqueue_many([("returns",), ("discards",), ("dies",)])
        cancelled = task.options(delay=3600).enqueue("returns")
        with running(pq):
            ended = pq.wait(ids, PATIENCE)
            pq.cancel(cancelled)
            assert pq.wait(cancelled, PATIENCE).state is State.CANCELLED
        assert [ended[job_id].state for job_id in ids] == [State.COMPLETED, State.DISCARDED, State.DEAD]
    assert count(admin, "result") == 0


def test_without_an_archive_a_job_that_is_gone_has_ended_and_nobody_knows_how(database: str) -> None:
    with pgqueue.PgQueue(database, archive=False) as pq:
        job_id = define(pq, "plain", lambda: None).enqueue()
        with running(pq):
            ended = pq.wait(job_id, PATIENCE)
        assert ended.state is None
        with pytest.raises(pgqueue.ResultMissing, match="nothing says how it ended"):
            _ = ended.value
        assert pq.result(job_id) is None
        assert pq.wait(10**15).state is None


def test_a_timeout_names_the_jobs_that_are_open(pq: pgqueue.PgQueue) -> None:
    first, second, third = (pq.enqueue("t", queue="q") for _ in range(3))
    pq.complete(pq.claim("q"))
    with pytest.raises(TimeoutError, match=f"2 job.s. have not ended within 0.1 s: {second}, {third}") as caught:
        pq.wait([third, first, second], 0.1)
    assert isinstance(caught.value, pgqueue.WaitTimeout)
    assert isinstance(caught.value, pgqueue.PgQueueError)
    assert caught.value.ids == (second, third)
    assert caught.value.ended[first].state is State.COMPLETED
    with pytest.raises(pgqueue.ConfigurationError):
        pq.wait([first], -1)
    assert pq.wait([]) == {}


def test_a_retry_is_not_an_end(pq: pgqueue.PgQueue) -> None:
    def body() -> str:
        if pgqueue.current_job().attempt < 3:
            raise ValueError
        return "third"

    job_id = define(pq, "plain", body, keep_result=60, retry=pgqueue.Fixed(0)).enqueue()
    with running(pq):
        assert pq.wait(job_id, PATIENCE).value == "third"


def test_an_end_in_an_open_transaction_is_none_until_it_commits(pq: pgqueue.PgQueue, database: str) -> None:
    job_id = pq.enqueue("t", queue="q")
    [job] = pq.claim("q")
    with psycopg.connect(database) as caller:
        pq.complete(job, using=caller)
        with pytest.raises(pgqueue.WaitTimeout):
            pq.wait(job_id, 0.2)
        caller.commit()
    assert pq.wait(job_id, PATIENCE).state is State.COMPLETED


def test_a_job_that_moves_while_somebody_looks_is_seen_in_one_place(pq: pgqueue.PgQueue, database: str) -> None:
    """Dead-lettered and redriven, again and again: no look ever finds it ended without a state."""
    job_id = pq.enqueue("t", queue="q")
    stop = threading.Event()
    failures: list[BaseException] = []

    def move() -> None:
        try:
            while not stop.is_set():
                pq.fail(pq.claim("q"), pgqueue.DeadLetter("x"))
                pq.redrive(ids=job_id)
        except BaseException as error:
            failures.append(error)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        seen = set()
        end = time.monotonic() + PATIENCE
        with pgqueue.PgQueue(database) as other:
            while len(seen) < 2 or time.monotonic() < end - PATIENCE + 2:
                assert time.monotonic() < end
                found = other.run(result_ops.ends([job_id], (True, True))).get(job_id)
                seen.add(None if found is None else found.state)
                assert found is None or found.state is State.DEAD
    finally:
        stop.set()
        mover.join(PATIENCE)
    assert failures == []


def test_the_session_that_listens_is_opened_anew_when_it_breaks(
    no_polls: None, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = define(pq, "plain", lambda: 1, keep_result=60)
    wait = Waiting(pq, task.enqueue())
    listening(admin)
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'LISTEN \"pgqueue.done\"'")
    with running(pq):
        assert wait.join().value == 1


def test_nobody_listens_where_nobody_waits(pq: pgqueue.PgQueue, admin: Admin) -> None:
    ended = pq.enqueue("t", queue="q")
    pq.complete(pq.claim("q"))
    pq.wait(ended, 1)
    assert pq._hearing is None
    wait = Waiting(pq, pq.enqueue("t", queue="q"))
    listening(admin)
    pq.complete(pq.claim("q"))
    wait.join()
    pq.close()
    listening(admin, 0)


def test_ends_of_jobs_without_results_are_not_announced(pq: pgqueue.PgQueue, admin: Admin) -> None:
    """A NOTIFY takes a lock on the whole server at commit: only who keeps results pays for it."""
    admin.execute('LISTEN "pgqueue.done"')
    plain = define(pq, "plain", lambda: 1, name="plain")
    kept = define(pq, "plain", lambda: 1, name="kept", keep_result=60)
    with running(pq):
        pq.wait(plain.enqueue_many([() for _ in range(20)]), PATIENCE)
        job_id = kept.enqueue()
        pq.wait(job_id, PATIENCE)
        [first] = list(admin.notifies(timeout=PATIENCE, stop_after=1))
    assert (first.channel, first.payload) == ("pgqueue.done", str(job_id))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_waits_with_a_session_of_its_own(pq: pgqueue.PgQueue, admin: Admin) -> None:
    wait = Waiting(pq, first := pq.enqueue("t", queue="q"))
    listening(admin)
    second = pq.enqueue("t", queue="q")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons advise against a fork with threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if pq.wait(second, PATIENCE).state is State.COMPLETED else 2
        finally:
            os._exit(status)
    listening(admin, 2)
    pq.complete(pq.claim("q", limit=2))
    assert os.waitpid(pid, 0)[1] == 0
    assert wait.join().id == first


def test_pauses_grow_to_a_second_and_further_where_looking_is_slow() -> None:
    now = [0.0]
    watch = result_ops.Watch([1], None, clock=lambda: now[0])

    def look(seconds: float) -> None:
        op = watch.look()
        step = next(op)
        if step.name == "end_rights":  # type: ignore[union-attr]
            op.send([(True, True)])
        now[0] += seconds
        with pytest.raises(StopIteration) as stop:
            op.send([])
        assert stop.value.value is False

    pauses = []
    for _ in range(20):
        look(0.0)
        pauses.append(watch.pause())
    assert pauses[0] <= 0.05
    assert 0.8 <= pauses[-1] <= 1.0
    look(2.0)
    assert watch.pause() == pytest.approx(20.0)

"""A worker whose tasks all fail: it holds the queue back, says so, goes on by itself, and leaves if only it is broken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.worker import fitness as fitness_module
from tests.waiting import wait_until
from tests.workers import PATIENCE, Watched, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]
NEVER = pgqueue.Fixed(3600)
COLOURS = pytest.mark.parametrize("colour", ["plain", "async"])
SLOW = 10
"""More probes on a busy machine: one that has not been answered after its pause is followed by another."""
OPENED, CLOSED = EventName.TASK_CIRCUIT_OPENED, EventName.TASK_CIRCUIT_CLOSED


class Dependency:
    """Something that tasks need; `failures` counts the attempts that found it down."""

    def __init__(self, *, up: bool = False) -> None:
        self.up = up
        self.failures = 0
        self._lock = threading.Lock()

    def use(self, *_: Any) -> None:
        if not self.up:
            with self._lock:
                self.failures += 1
            raise ConnectionError("nobody listens")


def probed(watched: Watched, times: int) -> None:
    """Wait until so many probes have failed."""
    wait_until(lambda: len(watched.seen(OPENED)) > times, PATIENCE, f"{times} probes have failed")


def held_back(pq: pgqueue.PgQueue) -> list[tuple[str, str, str]]:
    """Which task of which queue is held back, and why, as `pgqueue status` tells it."""
    return [(row.queue, held.task, held.reason) for row in pq.status() for held in row.held_back]


@COLOURS
def test_a_dependency_that_is_down_burns_few_attempts_and_all_is_done_when_it_is_back(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    dependency = Dependency()
    task = define(pq, colour, dependency.use, retry=pgqueue.Fixed(0.05), max_attempts=20)
    task.enqueue_many((number,) for number in range(200))
    with running(pq, concurrency=4) as watched:
        probed(watched, 2)
        assert watched.seen(OPENED)[0].facts["reason"] == "ConnectionError"
        assert watched.seen(OPENED)[0].facts["failures"] == 20
        # Twenty, what ran beside the last of them, and one per probe; without the breaker it would be hundreds a second.
        assert dependency.failures <= 20 + 3 + len(watched.seen(OPENED)) + SLOW
        dependency.up = True
        watched.wait_for(CLOSED, queue="q")
        wait_for_count(admin, 200, "archive", "state = 'completed'")
        [(attempts, lost)] = admin.execute("SELECT sum(attempt), sum(lost) FROM pgqueue.archive").fetchall()
        assert (attempts, lost) == (200 + dependency.failures, 0), "what was given back has burned no attempt"


def test_what_waits_in_the_worker_when_the_circuit_opens_is_released_and_burns_no_attempt(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    dependency = Dependency()
    good = 2000

    @pq.task(name="work", queue="q", retry=NEVER)
    def work(number: int) -> None:
        if number >= good:
            dependency.use()

    work.enqueue_many((number,) for number in range(good + 1000))
    with running(pq, concurrency=1) as watched:
        watched.wait_for(OPENED, queue="q")
        watched.wait_for(EventName.JOBS_RELEASED, queue="q")
        probed(watched, 1)

        def adds_up() -> bool:
            failed = dependency.failures
            found = admin.execute(
                "SELECT attempt, count(*) FROM pgqueue.job WHERE lease_id IS NULL GROUP BY 1 ORDER BY 1"
            )
            return found.fetchall() == [(0, 1000 - failed), (1, failed)]

        wait_until(adds_up, PATIENCE, "an attempt is burned by each failure, and by nothing else")
        assert dependency.failures <= 20 + len(watched.seen(OPENED)) + SLOW


def test_another_queue_of_the_same_worker_is_not_held_back(pq: pgqueue.PgQueue, admin: Admin) -> None:
    dependency = Dependency()
    down = pq.task(name="down", queue="down", retry=pgqueue.Fixed(0.05))(dependency.use)
    fine = pq.task(name="fine", queue="fine")(lambda number: None)
    down.enqueue_many((number,) for number in range(100))
    with running(pq, queues=("down", "fine"), concurrency=2) as watched:
        watched.wait_for(OPENED, queue="down")
        fine.enqueue_many((number,) for number in range(500))
        wait_for_count(admin, 500, "archive", "queue = 'fine'")
        assert watched.seen(OPENED, queue="fine") == []
        assert dependency.failures <= 20 + 1 + len(watched.seen(OPENED)) + SLOW


@COLOURS
def test_a_task_that_fails_does_not_hold_up_the_others_of_its_queue(
    colour: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    dependency = Dependency()
    down = define(pq, colour, dependency.use, name="down", retry=pgqueue.Fixed(0.05), max_attempts=1000)
    fine = define(pq, colour, lambda number: None, name="fine")
    down.enqueue_many((number,) for number in range(3000))
    fine.enqueue_many((number,) for number in range(3000))
    with running(pq, concurrency=2) as watched:
        wait_for_count(admin, 3000, "archive", "task = 'fine'")
        assert dependency.failures <= 20 + 1 + len(watched.seen(OPENED)) + SLOW
        assert watched.seen(OPENED, task="fine") == []
        fine.enqueue_many((number,) for number in range(2000))
        wait_for_count(admin, 5000, "archive", "task = 'fine'")
        dependency.up = True
        watched.wait_for(CLOSED, task="down")
        wait_for_count(admin, 3000, "archive", "task = 'down'")
        [(attempts, lost)] = admin.execute(
            "SELECT sum(attempt), sum(lost) FROM pgqueue.archive WHERE task = 'down'"
        ).fetchall()
        assert (attempts, lost) == (3000 + dependency.failures, 0), (
            "what was passed over or given back burned no attempt"
        )


def test_a_mixture_of_failures_and_successes_never_opens_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    dependency = Dependency()

    @pq.task(name="work", queue="q", retry=NEVER)
    def work(number: int) -> None:
        if number % 15:
            dependency.use()

    work.enqueue_many((number,) for number in range(600))
    with running(pq, concurrency=1) as watched:
        wait_for_count(admin, 40, "archive")
        wait_for_count(admin, 560, "job", "attempt = 1 AND run_at IS NOT NULL")
        assert watched.seen(OPENED) == []


def test_signals_of_handlers_do_not_open_it(pq: pgqueue.PgQueue, admin: Admin) -> None:
    @pq.task(name="work", queue="q")
    def work(number: int) -> None:
        raise [pgqueue.Snooze(3600), pgqueue.Discard(), pgqueue.Retry(delay=3600)][number % 3]

    work.enqueue_many((number,) for number in range(120))
    with running(pq, concurrency=2) as watched:
        wait_for_count(admin, 40, "archive", "state = 'discarded'")
        wait_for_count(admin, 80, "job", "run_at IS NOT NULL")
        assert watched.seen(OPENED) == []


def test_a_breaker_of_no_failures_is_off(pq: pgqueue.PgQueue, admin: Admin) -> None:
    dependency = Dependency()
    pq.task(name="work", queue="q", max_attempts=1)(dependency.use).enqueue_many((n,) for n in range(300))
    with running(pq, breaker_failures=0) as watched:
        wait_for_count(admin, 300, "dead_letter")
        assert watched.seen(OPENED) == []


def test_a_probe_whose_lease_is_lost_is_followed_by_another(pq: pgqueue.PgQueue, admin: Admin) -> None:
    dependency, began, let_go = Dependency(), threading.Event(), threading.Event()

    # Three failures open it, and one more may run beside the third: the fifth was a probe, and so is what comes after it.
    @pq.task(name="work", queue="q", retry=pgqueue.Fixed(0))
    def work(number: int) -> None:
        if dependency.failures >= 5 and not began.is_set():
            began.set()
            let_go.wait(PATIENCE)
        dependency.use()

    work.enqueue_many((number,) for number in range(10))
    try:
        with running(pq, concurrency=2, breaker_failures=3, lease=2.0) as watched:
            assert began.wait(PATIENCE)
            admin.execute("DELETE FROM pgqueue.lease")
            watched.wait_for(EventName.LEASE_LOST)
            dependency.up = True
            watched.wait_for(CLOSED)
            # The job whose lease was deleted runs under none, and is rescued in its own time.
            wait_until(lambda: count(admin, "archive") >= 9, PATIENCE, "all others are completed")
            let_go.set()
    finally:
        let_go.set()


def test_status_names_the_queue_that_is_held_back_while_it_is_and_no_longer(pq: pgqueue.PgQueue, admin: Admin) -> None:
    dependency = Dependency()
    task = define(pq, "plain", dependency.use, retry=pgqueue.Fixed(0.05))
    task.enqueue_many((number,) for number in range(30))
    with running(pq, name="mill", lease=600.0) as watched:  # the next beat is minutes away: it is brought forward
        probed(watched, 1)
        wait_until(lambda: held_back(pq) == [("q", "work", "ConnectionError")], PATIENCE, "the status names the queue")
        [row] = pq.status()
        [held] = row.held_back
        assert (held.worker_id, held.worker) == (watched.worker.worker_id, "mill")
        assert held.failures >= 20
        assert 0 < held.pause <= 60
        dependency.up = True
        watched.wait_for(CLOSED)
        wait_until(lambda: held_back(pq) == [], PATIENCE, "the status names it no longer")
        assert admin.execute("SELECT circuits FROM pgqueue.worker").fetchall() == [(None,)]


def test_a_worker_that_is_silent_holds_nothing_back(pq: pgqueue.PgQueue, admin: Admin) -> None:
    row = """INSERT INTO pgqueue.worker (name, hostname, pid, version, queues, concurrency, lease_seconds, circuits, seen_at)
             VALUES ('old', 'h', 1, '1', '{q}', 1, %s, %s, clock_timestamp() - %s * interval '1 second')"""
    said = '[{"queue": "q", "task": "work", "reason": "ValueError", "failures": 20, "seconds": 3.0, "pause": 1.0}]'
    admin.execute(row, [5, said, 6])
    assert pq.status() == []
    admin.execute(row, [600, said, 2])
    assert held_back(pq) == [("q", "work", "ValueError")]
    assert 5.0 <= pq.status()[0].held_back[0].seconds < 60.0
    admin.execute(row, [600, '{"not": "a list"}', 0])
    assert held_back(pq) == [("q", "work", "ValueError")]


OFTEN: dict[str, Any] = {"lease": 15.0, "heartbeat": 0.4}


@contextmanager
def broken(database: str, **options: Any) -> Iterator[Watched]:
    """A worker on which everything fails, every time for another reason, so that no circuit opens."""
    with pgqueue.PgQueue(database) as pq:
        numbers = iter(range(10**9))

        def work(_: int) -> None:
            raise type(f"Error{next(numbers) % 7}", (Exception,), {})

        define(pq, "plain", work)
        with running(pq, unfit_failures=20, **OFTEN, **options) as watched:
            yield watched


looks: list[Any] = []


def suspicious(watched: Watched) -> None:
    """Wait until everything has failed for long enough, and the worker has looked at its peers since."""
    wait_until(watched.worker.breaker.fitness.suspect, PATIENCE, "everything has failed for long enough")
    before = len(looks)
    wait_until(lambda: len(looks) > before + 2, PATIENCE, "it has looked at its peers")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of failures is enough; `looks` counts the questions about peers."""
    looks.clear()
    monkeypatch.setattr(fitness_module, "UNFIT_SECONDS", 0.5)
    judge = fitness_module.Fitness.judge

    def counted(self: fitness_module.Fitness, *args: Any) -> Any:
        looks.append(args)
        return judge(self, *args)

    monkeypatch.setattr(fitness_module.Fitness, "judge", counted)


@pytest.mark.usefixtures("hasty")
def test_a_worker_on_which_everything_fails_leaves_only_once_others_do_better(
    database: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = define(pq, "plain", lambda number: None, retry=pgqueue.Fixed(0.1), max_attempts=10_000)
    ids = task.enqueue_many((number,) for number in range(50))
    with broken(database) as sick:
        suspicious(sick)
        assert sick.thread.is_alive()
        assert sick.seen(EventName.WORKER_UNFIT) == [], "alone it goes on"
        with running(pq, **OFTEN) as sound:
            ids += task.enqueue_many((number,) for number in range(50))
            assert sick.join() == 70
            [event] = sick.seen(EventName.WORKER_UNFIT)
            assert event.facts["worker"] == sick.worker.worker_id
            assert event.facts["queues"] == ["q"]
            assert event.facts["failures"] >= 20
            wait_for_count(admin, len(ids), "archive", "state = 'completed' AND lost = 0")
            assert sound.thread.is_alive()
    assert sound.status == 0


@pytest.mark.usefixtures("hasty")
def test_peers_that_complete_jobs_of_other_queues_prove_nothing(
    database: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    define(pq, "plain", lambda number: None, retry=pgqueue.Fixed(0.1), max_attempts=10_000).enqueue_many(
        (number,) for number in range(50)
    )
    elsewhere = pq.task(name="elsewhere", queue="other")(lambda number: None)
    with broken(database) as sick, running(pq, queues=("other",), **OFTEN):
        for number in range(3):
            suspicious(sick)
            elsewhere.enqueue(number)
            wait_for_count(admin, number + 1, "archive")
        suspicious(sick)
        assert sick.seen(EventName.WORKER_UNFIT) == []
        assert sick.thread.is_alive()


def test_a_worker_reports_how_many_attempts_it_has_completed(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.task(name="first", queue="a")(lambda number: None).enqueue_many((number,) for number in range(70))
    pq.task(name="second", queue="b")(lambda number: None).enqueue_many((number,) for number in range(30))
    with running(pq, **OFTEN):
        told = """completed = '{"a": 70, "b": 30}'"""
        wait_for_count(admin, 1, "worker", told)

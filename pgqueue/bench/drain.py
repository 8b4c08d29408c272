"""A worker drains jobs that were enqueued before: the whole product, in processes of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import psycopg

from pgqueue import PgQueue
from pgqueue.bench import programs
from pgqueue.bench.app import FLAKY, PLAIN, message
from pgqueue.bench.counters import statements
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage, execute
from pgqueue.bench.tally import EVERY
from pgqueue.bench.values import Metrics

PATIENCE = 60.0


def timed(
    words: Sequence[str], environment: Mapping[str, str], number: int, empty: Callable[[], bool]
) -> tuple[float, list[float]]:
    """Jobs per second from the start of the first job until the last is settled (`empty`), and the rate of each tenth.

    Used for pgqueue and for the peers. Exactly `number` jobs must have started, also a moment after the end.
    """
    with programs.running(words, environment) as program:
        program.tally.wait(number, program, PATIENCE)
        limit = time.monotonic() + PATIENCE
        while not empty():
            if time.monotonic() > limit:
                raise Miscount(f"jobs are left that nobody settles: {program.last_words()}")
            time.sleep(EVERY)
        end = time.monotonic()
        time.sleep(3 * EVERY)
        program.tally.check(number)
        first, tenths = program.tally.first(), program.tally.tenths()
    each = number / 10
    return number / (end - first), [each / max(1e-9, b - a) for a, b in itertools.pairwise(tenths)]


def preload(url: str, task: str, number: int, *, queue: str = "bench") -> None:
    """Enqueue `number` no-op jobs."""
    with PgQueue(url) as pq:
        pq.task(name=task, queue=queue)(_nothing).enqueue_many((message(n),) for n in range(number))


def drain(
    stage: Stage,
    task: str = PLAIN,
    *,
    processes: int = 1,
    archive: bool = True,
    number: int = 100_000,
    limited: bool = False,
) -> Metrics:
    """The rate of one worker, or of several under one parent. `limited`: by limits of the queue that do not bind."""
    number = stage.jobs(number)
    with stage.database() as url:
        preload(url, task, number)
        if limited:
            with PgQueue(url) as pq:
                pq.limit_queue("bench", running=100_000, rate=10_000_000)
        stage.settle()
        words = programs.worker_words("--processes", str(processes))
        rate, _ = timed(words, programs.worker_environment(url, archive=archive), number, emptied(url))
        check_archive(url, number if archive else 0)
    return {"jobs/s": rate}


def drain_counting_statements(stage: Stage) -> Metrics:
    """Statements that a worker needs for a thousand jobs, its start and end included."""
    number = stage.jobs(50_000, least=2000)
    with stage.database() as url, statements(url) as counted:
        preload(url, PLAIN, number)
        words = programs.worker_words("--drain")
        with programs.running(words, programs.worker_environment(url)) as program:
            program.tally.wait(number, program, PATIENCE)
            program.process.wait(PATIENCE)
            program.tally.check(number)
    return {"statements/1000 jobs": counted[0] * 1000 / number}


def retries(stage: Stage) -> Metrics:
    """One job in ten fails once, one in a hundred for good: runs per second, and every job accounted for."""
    number = stage.jobs(30_000, least=1000, unit=100)
    runs = number + number // 10 + number // 100
    with stage.database() as url:
        with PgQueue(url) as pq:
            import pgqueue

            task = pq.task(name=FLAKY, queue="bench", max_attempts=2, retry=pgqueue.Fixed(0))(_nothing)
            task.enqueue_many((message(n),) for n in range(number))
        stage.settle()
        quiet = programs.worker_words("--log-level", "error")
        rate, _ = timed(quiet, programs.worker_environment(url), runs, emptied(url))
        dead = execute(url, "SELECT count(*) FROM pgqueue.dead_letter")[0][0]
        if dead != number // 100:
            raise Miscount(f"{number // 100} jobs should be dead letters, and {dead} are")
        check_archive(url, number - dead)
    return {"runs/s": rate}


@contextmanager
def old_snapshot(url: str) -> Iterator[None]:
    """A transaction that has read something and does not end: the server keeps every row version from now on."""
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT count(*) FROM pg_class")
        yield
        connection.rollback()


def drain_under_snapshot(stage: Stage, *, held: bool = True) -> Metrics:
    """A worker drains while an old snapshot is held from before its start: the last tenth's rate against the first's."""
    number = stage.jobs(300_000)
    with stage.database() as url:
        preload(url, PLAIN, number)
        stage.settle()
        with old_snapshot(url) if held else nullcontext():
            words, environment = programs.worker_words(), programs.worker_environment(url)
            rate, tenths = timed(words, environment, number, emptied(url))
        check_archive(url, number)
    return {"jobs/s": rate, "last / first tenth": tenths[-1] / tenths[0]}


def emptied(url: str) -> Callable[[], bool]:
    """A question to the job table: is nothing left? On one connection, so that asking costs little."""
    connection = psycopg.connect(url, autocommit=True)

    def empty() -> bool:
        found = connection.execute("SELECT NOT EXISTS (SELECT 1 FROM pgqueue.job)").fetchone()
        if found is not None and found[0]:
            connection.close()
            return True
        return False

    return empty


def check_archive(url: str, number: int) -> None:
    """Miscount unless so many jobs are archived."""
    found = execute(url, "SELECT count(*) FROM pgqueue.archive")[0][0]
    if found != number:
        raise Miscount(f"{number} jobs should be in the archive, and {found} are")


def _nothing(message: dict[str, object]) -> None: ...

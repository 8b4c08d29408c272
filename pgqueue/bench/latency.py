"""From the return of the enqueue call to the start of the handler, in another process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

from pgqueue import PgQueue
from pgqueue.bench import programs
from pgqueue.bench.app import STAMPED, message
from pgqueue.bench.counters import statements
from pgqueue.bench.drain import emptied
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage, execute
from pgqueue.bench.values import Metrics

WARM_UP = 1.0
PATIENCE = 60.0
IDLE_SECONDS = 10.0
STEADY_RATE, STEADY_BATCH = 2000, 20


def measured(
    words: Sequence[str],
    environment: Mapping[str, str],
    enqueue: Callable[[int], object],
    *,
    rate: float,
    seconds: float,
) -> Metrics:
    """Enqueue at a fixed rate while the program works; p50, p99 and the worst, in milliseconds. The first second, in which
    caches and connections are warmed, is left out."""
    with programs.running(words, environment) as program:
        enqueue(0)
        program.tally.wait(1, program, PATIENCE)
        returned = paced(enqueue, rate=rate, seconds=seconds)
        program.tally.wait(len(returned) + 1, program, PATIENCE)
        program.tally.check(len(returned) + 1)
        started = program.tally.stamps()
    return percentiles([1000 * max(0.0, started[n] - at) for n, at in returned.items() if n > rate * WARM_UP])


def paced(enqueue: Callable[[int], object], *, rate: float, seconds: float) -> dict[int, float]:
    """Call `enqueue` with 1, 2, 3 … at a fixed rate; when each call returned."""
    returned: dict[int, float] = {}
    begin = time.monotonic()
    for n in range(1, int(rate * (seconds + WARM_UP)) + 1):
        pause = begin + n / rate - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        enqueue(n)
        returned[n] = time.monotonic()
    return returned


def percentiles(waits: Sequence[float]) -> Metrics:
    """p50, p99 and the worst."""
    ordered = sorted(waits)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    spread = {"p99 / p50": at[1] / at[0]} if at[0] > 0.01 else {}
    return {"p50 ms": at[0], "p99 ms": at[1], "max ms": ordered[-1], **spread}


def latency(stage: Stage, rate: float) -> Metrics:
    """A worker, and one producer with single enqueues."""
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=STAMPED, queue="bench")(_stamped)
        words, environment = programs.worker_words(), programs.worker_environment(url)
        return measured(words, environment, task.enqueue, rate=rate, seconds=stage.seconds)


def floor(stage: Stage, rate: float) -> Metrics:
    """What PostgreSQL and psycopg allow: the same producer, a bare listener, and one claim when it is woken."""
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=STAMPED, queue="bench")(_stamped)
        words = [sys.executable, "-m", "pgqueue.bench.listener"]
        return measured(words, programs.worker_environment(url), task.enqueue, rate=rate, seconds=stage.seconds)


def steady(stage: Stage) -> Metrics:
    """A producer at a fixed rate, in small batches; the backlog is looked at once a second."""
    batches = STEADY_RATE / STEADY_BATCH
    backlog: list[int] = []
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=STAMPED, queue="bench")(_stamped)

        def enqueue(number: int) -> None:
            first = number * STEADY_BATCH
            task.enqueue_many((n,) for n in range(first, first + STEADY_BATCH))
            if number % int(batches) == 0:
                backlog.append(execute(url, "SELECT count(*) FROM pgqueue.job WHERE lease_id IS NULL")[0][0])

        with programs.running(programs.worker_words(), programs.worker_environment(url)) as program:
            task.enqueue(0)
            program.tally.wait(1, program, PATIENCE)
            returned = paced(enqueue, rate=batches, seconds=stage.seconds)
            program.tally.wait(len(returned) * STEADY_BATCH + 1, program, PATIENCE)
            started = program.tally.stamps()
            program.tally.check(len(returned) * STEADY_BATCH + 1)
    waits = [
        1000 * max(0.0, at - returned[n // STEADY_BATCH]) for n, at in started.items() if n >= batches * STEADY_BATCH
    ]
    return {**percentiles(waits), "largest backlog": float(max(backlog))}


def idle(stage: Stage) -> Metrics:
    """A worker with nothing to do: statements per second, and processor time of its process."""
    with stage.database() as url:
        preload_one(url)
        return watch_idle(programs.worker_words(), programs.worker_environment(url), url, emptied(url))


def watch_idle(
    words: Sequence[str], environment: Mapping[str, str], url: str | None, ready: Callable[[], bool]
) -> Metrics:
    """After the program has done its first job and a moment more: what it does in ten seconds without work. `url` None: the
    statements are not counted, since there is no PostgreSQL."""
    with programs.running(words, environment) as program:
        program.tally.wait(1, program, PATIENCE)
        _wait_until(ready)
        time.sleep(2.0)
        before = program.cpu_seconds()
        if url is None:
            time.sleep(IDLE_SECONDS)
            counted: list[float] = []
        else:
            with statements(url) as counted:
                time.sleep(IDLE_SECONDS)
        spent = program.cpu_seconds() - before
    found = {"% of a core": 100 * spent / IDLE_SECONDS}
    return {**({"statements/s": counted[0] / IDLE_SECONDS} if counted else {}), **found}


def count_from_now(url: str) -> None:
    """Let the statements of connections opened from now on be counted."""
    with statements(url):
        pass


def preload_one(url: str) -> None:
    """One job, so that the worker says that it is there."""
    count_from_now(url)
    with PgQueue(url) as pq:
        pq.task(name="plain", queue="bench")(_stamped).enqueue(message(0))


def _wait_until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > end:
            raise Miscount("the first job is not settled")
        time.sleep(0.02)


def _stamped(number: object) -> None: ...

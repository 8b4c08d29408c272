"""The raw life cycle through the public API, in batches: enqueue, claim, decode, complete. No worker."""

from __future__ import annotations

import time

from pgqueue import Job, PgQueue
from pgqueue.bench.app import PLAIN, message
from pgqueue.bench.counters import log_position, row_versions
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage, execute
from pgqueue.bench.values import Metrics

QUEUE = "bench"
BATCHES = (1, 10, 100, 1000)


def number_of_jobs(stage: Stage, batch: int) -> int:
    """Enough for a second or so."""
    return stage.jobs({1: 1500, 10: 10_000}.get(batch, 40_000), unit=batch)


def life_cycle(stage: Stage, batch: int, *, archive: bool = True) -> Metrics:
    """Enqueue `batch`, claim `batch`, read their arguments, complete them; and again."""
    number = number_of_jobs(stage, batch)
    with stage.database() as url, PgQueue(url, archive=archive) as pq:
        task = pq.task(name=PLAIN, queue=QUEUE)(_nothing)
        _pass(pq, task, batch, 5)
        stage.settle()
        began = time.perf_counter()
        done = _pass(pq, task, batch, number // batch)
        spent = time.perf_counter() - began
        _check(url, done, number, archived=number + 5 * batch if archive else 0)
    return {"jobs/s": number / spent}


def claim_and_complete(stage: Stage, batch: int, *, archive: bool = False) -> Metrics:
    """Only the worker's half of it, on jobs enqueued before: the floor of a worker."""
    number = stage.jobs(100_000, unit=batch)
    with stage.database() as url, PgQueue(url, archive=archive) as pq:
        task = pq.task(name=PLAIN, queue=QUEUE)(_nothing)
        task.enqueue_many((message(n),) for n in range(number))
        stage.settle()
        done = 0
        began = time.perf_counter()
        while jobs := pq.claim(QUEUE, limit=batch):
            done += _read(jobs)
            pq.complete(jobs)
        spent = time.perf_counter() - began
        _check(url, done, number, archived=number if archive else 0)
    return {"jobs/s": number / spent}


def footprint(stage: Stage, *, archive: bool) -> Metrics:
    """What a job leaves behind: bytes of log, dead row versions, and the share of claims that touched no index."""
    number = stage.jobs(20_000, unit=100)
    with stage.database() as url:
        stage.settle()
        before = log_position(url)
        with PgQueue(url, archive=archive) as pq:
            task = pq.task(name=PLAIN, queue=QUEUE)(_nothing)
            done = _pass(pq, task, 100, number // 100)
        written = log_position(url) - before
        _check(url, done, number, archived=number if archive else 0)
        seen = _versions(url, number)
    return {
        "WAL bytes/job": written / number,
        "dead rows/job": (seen["updated"] + seen["deleted"]) / number,
        "HOT %": 100 * seen["hot"] / max(1.0, seen["updated"]),
    }


def _versions(url: str, number: int) -> dict[str, float]:
    seen = row_versions(url)
    for _ in range(200):  # statistics arrive when the session has ended, a moment later
        if seen["updated"] >= number and seen["deleted"] >= number:
            break
        time.sleep(0.05)
        seen = row_versions(url)
    return seen


def _pass(pq: PgQueue, task: object, batch: int, turns: int) -> int:
    done = 0
    enqueue_many = task.enqueue_many  # type: ignore[attr-defined]
    for turn in range(turns):
        enqueue_many([(message(turn * batch + n),) for n in range(batch)])
        jobs = pq.claim(QUEUE, limit=batch)
        done += _read(jobs)
        pq.complete(jobs)
    return done


def _read(jobs: list[Job]) -> int:
    return sum(1 for job in jobs if "n" in job.args[0])


def _check(url: str, done: int, number: int, *, archived: int) -> None:
    left = execute(url, "SELECT count(*) FROM pgqueue.job")[0][0]
    kept = execute(url, "SELECT count(*) FROM pgqueue.archive")[0][0]
    if (done, left, kept) != (number, 0, archived):
        raise Miscount(f"of {number} jobs {done} were executed, {left} are left and {kept} of {archived} archived")


def _nothing(message: dict[str, object]) -> None: ...

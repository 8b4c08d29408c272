"""What an old snapshot costs: row versions that nobody needs pile up at the head of the line, and cannot be removed."""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import nullcontext

from pgqueue import PgQueue
from pgqueue.bench.app import PLAIN, message
from pgqueue.bench.drain import old_snapshot
from pgqueue.bench.errors import Miscount
from pgqueue.bench.stage import Stage
from pgqueue.bench.values import Metrics
from pgqueue.ops import claim as claim_ops

QUEUE = "bench"
BATCH = 100


def life_cycle_under_snapshot(stage: Stage, *, held: bool = True) -> Metrics:
    """Enqueue, claim, complete through the public API, while a snapshot is held: the last tenth's rate against the first."""
    turns = stage.jobs(300_000, least=2000, unit=10 * BATCH) // BATCH
    ends = []
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=PLAIN, queue=QUEUE)(_nothing)
        task.enqueue_many((message(n),) for n in range(BATCH))
        stage.settle()
        with old_snapshot(url) if held else nullcontext():
            ends.append(time.perf_counter())
            for turn in range(turns):
                task.enqueue_many([(message(n),) for n in range(BATCH)])
                jobs = pq.claim(QUEUE, limit=BATCH)
                if len(jobs) != BATCH:
                    raise Miscount(f"a claim of {BATCH} brought {len(jobs)}")
                pq.complete(jobs)
                if (turn + 1) % (turns // 10) == 0:
                    ends.append(time.perf_counter())
    spans = [b - a for a, b in itertools.pairwise(ends)]
    return {"jobs/s": turns * BATCH / (ends[-1] - ends[0]), "last / first tenth": spans[0] / spans[9]}


def hint(stage: Stage) -> Metrics:
    """Claims behind 30,000 dead rows that a snapshot keeps: with the low-water hint, and without."""
    dead = stage.jobs(30_000, least=10_000, unit=1000)
    with stage.database() as url, PgQueue(url) as pq:
        task = pq.task(name=PLAIN, queue=QUEUE)(_nothing)
        with old_snapshot(url):
            task.enqueue_many((message(n),) for n in range(dead + 40 * BATCH))
            for _ in range(dead // 1000):
                pq.complete(pq.claim(QUEUE, limit=1000))
            with_hint = claim_ops.LowWater(share=0)
            _claim(pq, with_hint)
            known = [_claim(pq, with_hint) for _ in range(15)]
            unknown = [_claim(pq, claim_ops.LowWater(share=0)) for _ in range(5)]
    on, off = statistics.median(known), statistics.median(unknown)
    return {"µs/job with": on, "µs/job without": off, "without / with": off / on}


def _claim(pq: PgQueue, low_water: claim_ops.LowWater) -> float:
    began = time.perf_counter()
    jobs = pq.run(claim_ops.claim(QUEUE, BATCH, lease=30.0, low_water=low_water, relaxed=True))
    spent = time.perf_counter() - began
    if len(jobs) != BATCH:
        raise Miscount(f"a claim of {BATCH} brought {len(jobs)}")
    return 1e6 * spent / BATCH


def _nothing(message: dict[str, object]) -> None: ...

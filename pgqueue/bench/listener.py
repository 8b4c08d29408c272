"""The floor of latency, as a program: a bare LISTEN on one connection, one claim on another when it is woken.

The same statement that the worker uses, and nothing else of a worker. Run as ``python -m pgqueue.bench.listener``.
"""

from __future__ import annotations

import psycopg

from pgqueue import PgQueue
from pgqueue.bench import tally
from pgqueue.drivers.execute import run
from pgqueue.ops import claim as claim_ops

QUEUE = "bench"


def main() -> None:
    """Until it is killed."""
    pq = PgQueue()
    url = pq.settings.database_url or ""
    with psycopg.connect(url, autocommit=True) as ears, psycopg.connect(url, autocommit=True) as hands:
        hands.prepare_threshold = 0
        ears.execute(f'LISTEN "{pq.settings.schema}"')
        low_water = claim_ops.LowWater(share=0)
        _serve(pq, hands, low_water)
        for _ in ears.notifies():
            low_water.notified()
            _serve(pq, hands, low_water)


def _serve(pq: PgQueue, hands: psycopg.Connection, low_water: claim_ops.LowWater) -> None:
    op = claim_ops.claim(QUEUE, 10, lease=30.0, low_water=low_water, relaxed=True)
    jobs = run(hands, op, pq.settings.schema)
    for job in jobs:
        tally.stamp(job.args[0])
    if jobs:
        pq.complete(jobs, using=hands)


if __name__ == "__main__":
    main()

"""Many claimers on one queue: processes with a connection each, that claim and complete as fast as they can.

Run as ``python -m pgqueue.bench.claimers NUMBER QUEUES``; it forks before there is any thread. The parent prints the rate.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from pgqueue import PgQueue
from pgqueue.bench.app import PLAIN
from pgqueue.bench.drain import preload
from pgqueue.bench.errors import Miscount
from pgqueue.bench.programs import worker_environment
from pgqueue.bench.stage import Stage, execute
from pgqueue.bench.values import Metrics

BATCH = 20
NUMBERS = (1, 4, 16, 64)


def claimers(stage: Stage, number: int, *, apart: bool = False) -> Metrics:
    """Jobs per second through `number` claimers; `apart`: each on a queue of its own, so that none meets another."""
    queues = number if apart else 1
    jobs = stage.jobs(60_000, least=2000, unit=queues)
    with stage.database() as url:
        for queue in range(queues):
            preload(url, PLAIN, jobs // queues, queue=_queue(queue))
        stage.settle()
        done = subprocess.run(
            [sys.executable, "-m", "pgqueue.bench.claimers", str(number), str(queues)],
            env={**os.environ, **worker_environment(url)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise Miscount(f"the claimers failed: {done.stderr[-500:]}")
        left = execute(url, "SELECT count(*) FROM pgqueue.job")[0][0]
        kept = execute(url, "SELECT count(*) FROM pgqueue.archive")[0][0]
        if (left, kept) != (0, jobs):
            raise Miscount(f"of {jobs} jobs {left} are left and {kept} are archived")
    return {"jobs/s": jobs / float(done.stdout)}


def _queue(number: int) -> str:
    return f"bench{number}"


def main(number: int, queues: int) -> None:
    """Fork, connect, begin together, and print the seconds from the beginning until the last has found nothing."""
    waiting: list[tuple[int, int]] = []
    children: list[int] = []
    for claimer in range(number):
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            _claim_all(_queue(claimer % queues), ready[1], go[0])
        waiting.append((ready[0], go[1]))
        children.append(child)
    for ready_end, _ in waiting:
        os.read(ready_end, 1)
    began = time.perf_counter()
    for _, go_end in waiting:
        os.write(go_end, b"g")
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    print(time.perf_counter() - began)
    sys.exit(1 if failed else 0)


def _claim_all(queue: str, ready: int, go: int) -> None:
    status = 1
    try:
        pq = PgQueue(pool_size=1)
        pq.workers()
        os.write(ready, b"r")
        os.read(go, 1)
        while jobs := pq.claim(queue, limit=BATCH):
            pq.complete(jobs)
        status = 0
    finally:
        os._exit(status)  # the forked half has nothing to clean up


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

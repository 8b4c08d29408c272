"""Whether it is this worker that is broken: everything fails here, while others work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgqueue.ops.worker import Peer

UNFIT_JOBS = 3
UNFIT_SECONDS = 30.0
PROBE_WEIGHT = 10
"""A failed probe stands for the attempts that the pause before it spared. Counted singly, a worker whose circuits are open
would take more than an hour to fail so often."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a worker is unfit: so many attempts in a row failed in so many seconds, and others completed jobs meanwhile."""

    failures: int
    seconds: float
    queues: list[str]
    reason: str


class Fitness:
    """Whether every attempt of late has failed here while others completed jobs of the same queues.

    `attempts` failures in a row, at least three different jobs, over at least thirty seconds, make a worker suspect; 0
    switches the question off. It is unfit when a peer has completed jobs of a queue that fails here since that was first
    looked at. `worked` is set, without a lock, by whoever ends a job otherwise.
    """

    def __init__(self, attempts: int, *, clock: Clock = time.monotonic) -> None:
        self.attempts = attempts
        self.clock = clock
        self.worked = False
        self._lock = threading.Lock()
        self._reset()

    def failed(self, job_id: int, queue: str, reason: str, *, probe: bool = False) -> None:
        """An attempt failed."""
        with self._lock:
            self._forget_if_worked()
            now = self.clock()
            if not self._failures:
                self._first = now
            self._failures += 1
            self._weight += PROBE_WEIGHT if probe else 1
            self._last, self._reason = now, reason
            self._queues.add(queue)
            if len(self._jobs) < UNFIT_JOBS:
                self._jobs.add(job_id)

    def suspect(self) -> list[str]:
        """The queues about which the peers are to be asked; none while there is no reason for it."""
        with self._lock:
            self._forget_if_worked()
            enough = self.attempts and self._weight >= self.attempts and len(self._jobs) >= UNFIT_JOBS
            return sorted(self._queues) if enough and self._last - self._first >= UNFIT_SECONDS else []

    def judge(self, queues: Sequence[str], peers: Sequence[Peer]) -> Verdict | None:
        """What the peers' rows say of these queues, which `suspect` has named. The first look at a queue only remembers."""
        with self._lock:
            self._forget_if_worked()
            proof = sorted({peer.queue for peer in peers if peer.queue in self._seen and self._is_proof(peer)})
            if proof:
                seconds = self._last - self._first
                return Verdict(failures=self._failures, seconds=seconds, queues=proof, reason=self._reason)
            fresh = [peer for peer in peers if peer.queue not in self._seen]
            self._known.update({(peer.worker_id, peer.queue): peer.completed for peer in fresh})
            self._seen.update(queues)
            return None

    def _is_proof(self, peer: Peer) -> bool:
        return peer.sound and peer.completed > self._known.get((peer.worker_id, peer.queue), 0)

    def _forget_if_worked(self) -> None:
        if self.worked:
            self.worked = False
            self._reset()

    def _reset(self) -> None:
        self._failures = self._weight = 0
        self._first = self._last = 0.0
        self._reason = ""
        self._jobs: set[int] = set()
        self._queues: set[str] = set()
        self._seen: set[str] = set()
        self._known: dict[tuple[int, str], int] = {}

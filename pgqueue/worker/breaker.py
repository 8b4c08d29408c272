"""When attempts keep failing for one reason: the circuit of each queue, and whether it is this worker that is broken.

Everything here decides about values and a clock; nothing touches the database. The state is that of one worker process.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from pgqueue.events import Bus, EventName
from pgqueue.failure import PLACEHOLDER
from pgqueue.ops.worker import OpenCircuit, Peer
from pgqueue.outcome import RELEASED, Outcome, OutcomeKind
from pgqueue.worker.ledger import Held, Ledger, Phase
from pgqueue.worker.options import WorkerOptions

WITHIN = 60.0
"""Seconds within which so many failures in a row open a circuit: slower ones burn little, and may well be luck."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
PROBES_KNOWN = 64
UNFIT_JOBS = 3
UNFIT_SECONDS = 30.0
PROBE_WEIGHT = 10
"""A failed probe stands for the attempts that the pause before it spared. Counted singly, a worker whose circuits are open
would take more than an hour to fail so often."""

Clock = Callable[[], float]
_COMPLETED: Final = OutcomeKind.COMPLETED
_RELEASE: Final = OutcomeKind.RELEASE


def failure_of(outcome: Outcome) -> str | None:
    """The class of the exception, as it is recorded, where this run counts as a failure; None where the handler chose what
    becomes of its job (Snooze, Discard, Retry with a delay), and for releases and cancellations."""
    if outcome.steered or outcome.kind not in (OutcomeKind.RETRY, OutcomeKind.DEAD):
        return None
    try:
        return str(orjson.loads(outcome.error_json or "")["type"])
    except (ValueError, LookupError, TypeError):
        return PLACEHOLDER.type


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A circuit opened (`again`: a probe failed), with the pause before the next probe, or it closed after `seconds`."""

    opened: bool
    again: bool = False
    reason: str = ""
    failures: int = 0
    pause: float = 0.0
    seconds: float = 0.0


class Circuit:
    """The circuit of one queue. Closed: claims are unlimited. Open: none. After each pause one probe, a claim of one job:
    completed, it closes the circuit; failed, it doubles the pause; without an answer, the next one comes a pause later.

    `succeeded` is set, without a lock, by whoever completes a job. `open` may be read without one. `release` is called when
    it opens, before any other attempt that fails goes on: until the claimer's next turn the runners would go through all
    that waits.
    """

    def __init__(
        self,
        failures: int,
        *,
        release: Callable[[], None] | None = None,
        clock: Clock = time.monotonic,
        jitter: Clock = random.random,
    ) -> None:
        self.failures = failures
        self.release = release or _nobody
        self.clock = clock
        self.jitter = jitter
        self.open = False
        self.succeeded = False
        self._lock = threading.Lock()
        self._times: deque[float] = deque(maxlen=max(1, failures))
        self._reason = ""
        self._count = 0
        self._since = self._until = 0.0
        self._pause = self._longest = 0.0
        self._trying = False
        self._probes: deque[int] = deque(maxlen=PROBES_KNOWN)

    def failed(self, reason: str, token: int) -> Change | None:
        """An attempt under this token failed; what changed by it."""
        with self._lock:
            if self.open:
                if not self._answered(token):
                    return None  # it ran already when the circuit opened
                self._reason, self._count = reason, self._count + 1
                self._longest = min(LONGEST_PAUSE, self._longest * 2)
                return self._hold(again=True)
            if self.succeeded or reason != self._reason:
                self.succeeded = False
                self._reason, self._count = reason, 0
                self._times.clear()
            self._count += 1
            self._times.append(self.clock())
            if not self.failures or len(self._times) < self.failures or self._times[-1] - self._times[0] > WITHIN:
                return None
            self.open, self._since, self._longest, self._trying = True, self._times[-1], FIRST_PAUSE, False
            self.release()
            return self._hold(again=False)

    def completed(self, token: int) -> Change | None:
        """An attempt was completed while the circuit is open. What ran when it opened says nothing about now."""
        with self._lock:
            if not self.open or not self._answered(token):
                return None
            self.open = False
            self._times.clear()
            self._probes.clear()
            self._count = 0
            return Change(opened=False, seconds=self.clock() - self._since)

    def undecided(self, token: int) -> None:
        """An attempt ended without telling: if it was a probe, the next one may come at once."""
        with self._lock:
            if self.open and self._answered(token):
                self._until = self.clock()

    def allowed(self, wanted: int) -> int:
        """How many jobs to claim now: all that are wanted, one as a probe, or none."""
        with self._lock:
            if not self.open:
                return wanted
            if self.clock() < self._until:
                return 0
            self._trying = True
            return min(1, wanted)

    def admits(self, tokens: Sequence[int]) -> bool:
        """Whether what a claim has brought may run: not if the circuit opened while it was under way."""
        with self._lock:
            if not self.open:
                return True
            if not self._trying:
                return False
            self._trying = False
            self._probes.extend(tokens)
            self._pause = self._jittered()
            self._until = self.clock() + self._pause
            return True

    def due_in(self) -> float | None:
        """Seconds until a probe may be claimed; None when the circuit is closed, or a probe found nothing to claim."""
        with self._lock:
            return None if not self.open or self._trying else max(0.0, self._until - self.clock())

    def report(self, queue: str) -> OpenCircuit | None:
        """What others shall know; None while the circuit is closed."""
        with self._lock:
            if not self.open:
                return None
            seconds = self.clock() - self._since
            return OpenCircuit(
                queue=queue, reason=self._reason, failures=self._count, seconds=seconds, pause=self._pause
            )

    def _answered(self, token: int) -> bool:
        if token not in self._probes:
            return False
        self._probes.remove(token)
        return True

    def _hold(self, *, again: bool) -> Change:
        self._pause = self._jittered()
        self._until = self.clock() + self._pause
        return Change(opened=True, again=again, reason=self._reason, failures=self._count, pause=self._pause)

    def _jittered(self) -> float:
        # Workers whose circuits opened together must not come back together.
        return self._longest * (1.0 - 0.25 * self.jitter())


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


class Breaker:
    """All circuits of a worker, and its fitness, between the runners and the settler: `finish` sees every outcome.

    `opened` and `closed` are called, in the thread of a runner, after such a change.
    """

    def __init__(
        self,
        queues: Sequence[str],
        ledger: Ledger,
        events: Bus,
        options: WorkerOptions,
        submit: Callable[[Held, Outcome], None],
    ) -> None:
        self.circuits = {
            queue: Circuit(options.breaker_failures, release=functools.partial(self._release, queue))
            for queue in queues
        }
        self.fitness = Fitness(options.unfit_failures)
        self.ledger = ledger
        self.events = events
        self.submit = submit
        self.opened: Callable[[], None] = _nobody
        self.closed: Callable[[], None] = _nobody

    def finish(self, held: Held, outcome: Outcome) -> None:
        """Hand the outcome of a run on, and learn from it."""
        self.submit(held, outcome)
        circuit = self.circuits[held.job.queue]
        if outcome.kind is _COMPLETED:
            circuit.succeeded = self.fitness.worked = True
            if circuit.open:
                self._tell(held.job.queue, circuit.completed(held.job.token))
        else:
            self._learn(held, outcome, circuit)

    def due_in(self) -> float | None:
        """Seconds until the next probe of any queue; None when none is to be waited for."""
        due = [seconds for circuit in self.circuits.values() if (seconds := circuit.due_in()) is not None]
        return min(due, default=None)

    def report(self) -> list[OpenCircuit]:
        """The open circuits."""
        reports = (circuit.report(queue) for queue, circuit in self.circuits.items())
        return [report for report in reports if report is not None]

    def _learn(self, held: Held, outcome: Outcome, circuit: Circuit) -> None:
        job = held.job
        reason = failure_of(outcome)
        if reason is None:
            if outcome.kind is not _RELEASE:
                self.fitness.worked = True  # the handler ran, and answered
            circuit.undecided(job.token)
            return
        change = circuit.failed(reason, job.token)
        self.fitness.failed(job.id, job.queue, reason, probe=change is not None and change.again)
        self._tell(job.queue, change)

    def _tell(self, queue: str, change: Change | None) -> None:
        if change is None:
            return
        if not change.opened:
            self.events.emit(EventName.QUEUE_CIRCUIT_CLOSED, queue=queue, seconds=change.seconds)
            self.closed()
            return
        self.events.emit(
            EventName.QUEUE_CIRCUIT_OPENED,
            queue=queue,
            reason=change.reason,
            failures=change.failures,
            pause=change.pause,
        )
        self.opened()

    def _release(self, queue: str) -> None:
        for held in self.ledger.take_all(Phase.WAITING, queue=queue):
            self.submit(held, RELEASED)


def _nobody() -> None: ...

"""When attempts of one task keep failing for one reason: its circuit, and all circuits of a queue.

Everything here decides about values and a clock; nothing touches the database. The state is that of one worker process.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pgqueue.job import Job
from pgqueue.ops.worker import OpenCircuit

WITHIN = 60.0
"""Seconds within which so many failures in a row open a circuit: slower ones burn little, and may well be luck."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
PROBES_KNOWN = 64
TASKS_KNOWN = 1000
"""Names of tasks are read from rows: whoever writes rows must not fill the memory of workers."""

Clock = Callable[[], float]


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
    """The circuit of one task in one queue. Closed: its jobs are claimed like any others. Open: they stay where they are.
    After each pause one of them is a probe: completed, it closes the circuit; failed, it doubles the pause; without an
    answer, the next one comes a pause later.

    `succeeded` is set, without a lock, by whoever completes such a job. `open` may be read without one. `release` is called
    when it opens, before any other attempt that fails goes on: until the claimer's next turn the runners would go through
    all that waits.
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

    def claimable(self) -> bool:
        """Whether a claim may bring jobs of this task: always while it is closed, and when a probe is due."""
        with self._lock:
            if self.open and not self._trying:
                self._trying = self.clock() >= self._until
            return not self.open or self._trying

    def admits(self, token: int) -> bool:
        """Whether a job that a claim has brought may run: one, if a probe was due; none, if the circuit opened while the
        claim was under way."""
        with self._lock:
            if not self.open:
                return True
            if not self._trying:
                return False
            self._trying = False
            self._probes.append(token)
            self._pause = self._jittered()
            self._until = self.clock() + self._pause
            return True

    def due_in(self) -> float | None:
        """Seconds until a probe may be claimed; None when the circuit is closed, or a probe found nothing to claim."""
        with self._lock:
            return None if not self.open or self._trying else max(0.0, self._until - self.clock())

    def report(self, queue: str, task: str) -> OpenCircuit | None:
        """What others shall know; None while the circuit is closed."""
        with self._lock:
            if not self.open:
                return None
            return OpenCircuit(
                queue=queue,
                task=task,
                reason=self._reason,
                failures=self._count,
                seconds=self.clock() - self._since,
                pause=self._pause,
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


class Circuits:
    """The circuits of one queue, one for each task that has failed there: a task that fails must not hold up the others.

    `by_task` is replaced and never changed, so that whoever ends a job may look into it without a lock; nearly always it is
    empty. `release` gets the name of the task whose circuit has opened.
    """

    def __init__(self, failures: int, release: Callable[[str], None]) -> None:
        self.failures = failures
        self.release = release
        self.by_task: dict[str, Circuit] = {}
        self._lock = threading.Lock()

    def of(self, task: str) -> Circuit:
        """The circuit of a task that has failed."""
        with self._lock:
            circuit = self.by_task.get(task)
            if circuit is None:
                known = self.by_task
                if len(known) >= TASKS_KNOWN:
                    known = {name: other for name, other in known.items() if other.open}
                circuit = Circuit(self.failures, release=lambda: self.release(task))
                self.by_task = {**known, task: circuit}
            return circuit

    def left_out(self) -> list[str]:
        """The tasks whose jobs the next claim leaves where they are."""
        return sorted(task for task, circuit in self.by_task.items() if not circuit.claimable())

    def admits(self, job: Job) -> bool:
        """Whether a job that a claim has brought may run."""
        circuit = self.by_task.get(job.task)
        return circuit is None or circuit.admits(job.token)

    def due_in(self) -> float | None:
        """Seconds until the next probe of any task; None when none is to be waited for."""
        due = [seconds for circuit in self.by_task.values() if (seconds := circuit.due_in()) is not None]
        return min(due, default=None)

    def report(self, queue: str) -> list[OpenCircuit]:
        """The open ones."""
        reports = (circuit.report(queue, task) for task, circuit in sorted(self.by_task.items()))
        return [report for report in reports if report is not None]


def _nobody() -> None: ...

"""The breaker of a worker: it sees every outcome on its way to the settler, and learns from it what to claim."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

import orjson

from pgqueue.events import Bus, EventName
from pgqueue.failure import PLACEHOLDER
from pgqueue.job import Job
from pgqueue.ops.worker import OpenCircuit
from pgqueue.outcome import RELEASED, Outcome, OutcomeKind
from pgqueue.worker.circuit import Change, Circuits
from pgqueue.worker.fitness import Fitness
from pgqueue.worker.ledger import Held, Ledger, Phase
from pgqueue.worker.options import WorkerOptions

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
            queue: Circuits(options.breaker_failures, functools.partial(self._release, queue)) for queue in queues
        }
        self.fitness = Fitness(options.unfit_failures)
        self.ledger = ledger
        self.events = events
        self.submit = submit
        self.opened: Callable[[], None] = _nobody
        self.closed: Callable[[], None] = _nobody

    def finish(self, held: Held, outcome: Outcome, *, settled: bool = False) -> None:
        """Hand the outcome of a run on, and learn from it. `settled`: it is on its way, and only to be learned from."""
        if not settled:
            self.submit(held, outcome)
        if outcome.kind is not _COMPLETED:
            self._learn(held.job, outcome)
            return
        self.fitness.worked = True
        if known := self.circuits[held.job.queue].by_task:
            circuit = known.get(held.job.task)
            if circuit is not None:
                circuit.succeeded = True
                if circuit.open:
                    self._tell(held.job, circuit.completed(held.job.token))

    def finish_call(self, pairs: Sequence[tuple[Held, Outcome]]) -> None:
        """The same for jobs that ran in one call. Learned from is the call, which failed when none of its jobs was
        completed: one bad job must not count as often as there are jobs beside it."""
        for held, outcome in pairs:
            self.submit(held, outcome)
        for wanted in (_is_completed, _is_failure, _is_any):
            for held, outcome in pairs:
                if wanted(outcome):
                    self.finish(held, outcome, settled=True)
                    return

    def due_in(self) -> float | None:
        """Seconds until the next probe of any queue; None when none is to be waited for."""
        due = [seconds for circuits in self.circuits.values() if (seconds := circuits.due_in()) is not None]
        return min(due, default=None)

    def report(self) -> list[OpenCircuit]:
        """The open circuits."""
        return [report for queue, circuits in self.circuits.items() for report in circuits.report(queue)]

    def _learn(self, job: Job, outcome: Outcome) -> None:
        reason = failure_of(outcome)
        if reason is None:
            if outcome.kind is not _RELEASE:
                self.fitness.worked = True  # the handler ran, and answered
            circuit = self.circuits[job.queue].by_task.get(job.task)
            if circuit is not None:
                circuit.undecided(job.token)
            return
        change = self.circuits[job.queue].of(job.task).failed(reason, job.token)
        self.fitness.failed(job.id, job.queue, reason, probe=change is not None and change.again)
        self._tell(job, change)

    def _tell(self, job: Job, change: Change | None) -> None:
        if change is None:
            return
        if not change.opened:
            self.events.emit(EventName.TASK_CIRCUIT_CLOSED, queue=job.queue, task=job.task, seconds=change.seconds)
            self.closed()
            return
        self.events.emit(
            EventName.TASK_CIRCUIT_OPENED,
            queue=job.queue,
            task=job.task,
            reason=change.reason,
            failures=change.failures,
            pause=change.pause,
        )
        self.opened()

    def _release(self, queue: str, task: str) -> None:
        for held in self.ledger.take_all(Phase.WAITING, queue=queue, task=task):
            self.submit(held, RELEASED)


def _is_completed(outcome: Outcome) -> bool:
    return outcome.kind is _COMPLETED


def _is_failure(outcome: Outcome) -> bool:
    return failure_of(outcome) is not None


def _is_any(outcome: Outcome) -> bool:
    return True


def _nobody() -> None: ...

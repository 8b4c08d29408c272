"""Running one job: look the task up, decode, bind, call, decide. Whatever happens becomes an Outcome."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from pgqueue.events import Bus, EventName
from pgqueue.failure import one_line
from pgqueue.job import Job
from pgqueue.outcome import Outcome, OutcomeKind, decide
from pgqueue.task import BaseTask, Registry
from pgqueue.worker.ledger import Held

COMPLETED = Outcome(kind=OutcomeKind.COMPLETED)
RELEASED = Outcome(kind=OutcomeKind.RELEASE)
UNKNOWN_TASK_DELAY = 5.0
"""Another worker of a rolling deploy may know the task: never retry at once, that would be a hot loop."""


def prepare(registry: Registry, job: Job) -> tuple[BaseTask[..., Any], list[Any], dict[str, Any]]:
    """The task and its arguments; UnknownTask, PayloadDecodeError or ArgumentsDoNotBind concern this job alone."""
    task = registry.find(job.task)
    args, kwargs = job.args, job.kwargs
    task.check(args, kwargs)
    return task, args, kwargs


def judge(held: Held, error: BaseException | None, *, prepared: bool) -> Outcome:
    """The outcome of a run that returned (`error` None) or raised. `prepared`: the function was reached at all."""
    if error is None:
        return COMPLETED
    outcome = decide(held.job, error, random=random.random())
    if held.cancel_requested and outcome.kind in (OutcomeKind.RETRY, OutcomeKind.SNOOZE, OutcomeKind.DEAD):
        # The release of a job whose cancellation was asked for archives it as cancelled.
        return RELEASED
    if outcome.kind is OutcomeKind.RETRY and not prepared:
        return dataclasses.replace(outcome, delay=max(outcome.delay, UNKNOWN_TASK_DELAY))
    return outcome


def report(events: Bus, held: Held, outcome: Outcome, error: BaseException | None) -> None:
    """Tell subscribers of a failed attempt."""
    if error is not None and events:
        events.emit(
            EventName.JOB_FAILED,
            id=held.job.id,
            queue=held.job.queue,
            task=held.job.task,
            attempt=held.job.attempt,
            outcome=outcome.kind.value,
            error=one_line(type(error).__name__),
            delay=outcome.delay,
        )


Finish = Callable[[Held, Outcome], None]

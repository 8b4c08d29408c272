"""Running one job: look the task up, decode, bind, call, decide. Whatever happens becomes an Outcome."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any

from pgqueue.errors import TaskError
from pgqueue.events import Bus, EventName
from pgqueue.failure import describe, one_line
from pgqueue.job import Job
from pgqueue.outcome import COMPLETED, RELEASED, DeadLetter, Outcome, OutcomeKind, decide
from pgqueue.task import BaseTask, Registry
from pgqueue.worker.ledger import Held

UNKNOWN_TASK_DELAY = 5.0
"""Another worker of a rolling deploy may know the task: never retry at once, that would be a hot loop."""


def prepare(registry: Registry, job: Job) -> tuple[BaseTask[..., Any], list[Any], dict[str, Any]]:
    """The task and its arguments; UnknownTask, PayloadDecodeError or ArgumentsDoNotBind concern this job alone.

    DeadLetter for a row whose attempts were used up before this one: written by hand, or its maximum lowered afterwards.
    """
    if job.attempt > job.max_attempts:
        raise DeadLetter(f"its {job.max_attempts} attempts were used up before this one")
    task = registry.find(job.task)
    args, kwargs = job.args, job.kwargs
    task.check(args, kwargs)
    return task, args, kwargs


def check_result(result: object) -> None:
    """TaskError when a plain function returned something that has yet to run: the job would count as done, undone."""
    if result is None:
        return
    if inspect.isawaitable(result) or inspect.isgenerator(result):
        if hasattr(result, "close"):
            result.close()
        raise TaskError(f"the function returned a {type(result).__name__}, which nobody runs: declare it `async def`")


def judge(held: Held, error: BaseException | None, *, prepared: bool) -> Outcome:
    """The outcome of a run that returned (`error` None) or raised. `prepared`: the function was reached at all."""
    if error is None:
        return COMPLETED
    outcome = _decide(held.job, error)
    if held.cancel_requested and outcome.kind in (OutcomeKind.RETRY, OutcomeKind.SNOOZE, OutcomeKind.DEAD):
        # The release of a job whose cancellation was asked for archives it as cancelled.
        return RELEASED
    if outcome.kind is OutcomeKind.RETRY and not prepared:
        return dataclasses.replace(outcome, delay=max(outcome.delay, UNKNOWN_TASK_DELAY))
    return outcome


def _decide(job: Job, error: BaseException) -> Outcome:
    try:
        return decide(job, error, random=random.random())
    except BaseException:  # noqa: BLE001 - an exception object of a task may do anything when it is looked at
        return decide(job, TaskError("the task raised an exception that cannot be read"), random=random.random())


def report(events: Bus, held: Held, outcome: Outcome, error: BaseException | None) -> None:
    """Tell subscribers of a failed attempt."""
    if error is not None and events.wanted(EventName.JOB_FAILED):
        events.emit(
            EventName.JOB_FAILED,
            id=held.job.id,
            queue=held.job.queue,
            task=held.job.task,
            attempt=held.job.attempt,
            outcome=outcome.kind.value,
            error=one_line(describe(error).type),
            delay=outcome.delay,
        )


Finish = Callable[[Held, Outcome], None]

"""Running one job: look the task up, decode, bind, call, decide. Whatever happens becomes an Outcome.

Also what the three runners (threads, coroutines, child processes) share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from pgqueue import rules
from pgqueue.current import CurrentJob, Stage
from pgqueue.errors import TaskError
from pgqueue.events import Bus, EventName
from pgqueue.failure import Failure, describe, one_line
from pgqueue.job import Job
from pgqueue.outcome import COMPLETED, RELEASED, DeadLetter, Outcome, OutcomeKind, decide
from pgqueue.task import BaseTask, Registry
from pgqueue.worker.desk import Desk
from pgqueue.worker.ledger import Held, Ledger, Start

UNKNOWN_TASK_DELAY = 5.0
"""Another worker of a rolling deploy may know the task: never retry at once, that would be a hot loop."""
WORKER_LOST = "WorkerLost"
"""The type of the error that a lost attempt leaves, here as in a rescue."""

NOT_COMMITTED = "the handler completed its job in a transaction, and that was not committed"

_WORKER: Final = Stage.WORKER
Finish = Callable[[Held, Outcome], None]
Extend = Callable[[Job, float], None]
CurrentT = TypeVar("CurrentT", bound=CurrentJob)


def prepare(
    find: Callable[[str], BaseTask[..., Any]], job: Job
) -> tuple[BaseTask[..., Any], list[Any], dict[str, Any]]:
    """The task, as `find` knows it, and its arguments; UnknownTask, PayloadDecodeError or ArgumentsDoNotBind concern this
    job alone.

    DeadLetter for a row whose attempts were used up before this one: written by hand, or its maximum lowered afterwards.
    """
    if job.attempt > job.max_attempts:
        raise DeadLetter(f"its {job.max_attempts} attempts were used up before this one")
    task = find(job.task)
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


async def limited(work: Awaitable[Any], timeout: float | None) -> Any:
    """Await `work`, cancelled after `timeout` seconds; what it returns."""
    if timeout is None:
        return await work
    async with asyncio.timeout(timeout):
        return await work


def judge(
    held: Held,
    error: BaseException | None,
    *,
    prepared: bool,
    task: BaseTask[..., Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """The outcome of a run that returned (`error` None) or raised. `prepared`: the function was reached at all.

    `task`: whose own rule decides; `tell` is called when that rule is broken.
    """
    return heeding(held, verdict(held.job, error, prepared=prepared, task=task, tell=tell))


def verdict(
    job: Job,
    error: BaseException | None,
    *,
    prepared: bool,
    task: BaseTask[..., Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Outcome:
    """The same, by what the job and its task say."""
    if error is None:
        return COMPLETED
    if prepared and task is not None and task.rule is not None:
        ruled = rules.apply(task.rule, job, error, random=random.random())
        if ruled.problem and tell is not None:
            tell(ruled.problem)
        if ruled.outcome is not None:
            return ruled.outcome
    outcome = _decide(job, error)
    if outcome.kind is OutcomeKind.RETRY and not prepared:
        return dataclasses.replace(outcome, delay=max(outcome.delay, UNKNOWN_TASK_DELAY))
    return outcome


def heeding(held: Held, outcome: Outcome) -> Outcome:
    """This outcome, unless a cancellation was asked for: the release of such a job archives it as cancelled."""
    if held.cancel_requested and outcome.kind in (OutcomeKind.RETRY, OutcomeKind.SNOOZE, OutcomeKind.DEAD):
        return RELEASED
    return outcome


def lost(held: Held, how: str, *, prepared: bool, apart: bool = False) -> Outcome:
    """The outcome of an attempt whose process has gone; `how` says how. It reads as if a rescue had written it. `apart`:
    a job of a batch, any of which may be to blame: it runs alone from now on."""
    outcome = judge(held, TaskError(how), prepared=prepared)
    if outcome.error_json is None:
        return outcome
    failure = Failure(type=WORKER_LOST, message=f"worker lost: {how}")
    reason = "worker lost" if outcome.kind is OutcomeKind.DEAD else None
    error_json = failure.to_json(attempt=held.job.attempt)
    return dataclasses.replace(outcome, error_json=error_json, reason=reason, lost=apart)


def _decide(job: Job, error: BaseException) -> Outcome:
    try:
        return decide(job, error, random=random.random())
    except BaseException:  # noqa: BLE001 - an exception object of a task may do anything when it is looked at
        return decide(job, TaskError("the task raised an exception that cannot be read"), random=random.random())


def report(events: Bus, held: Held, outcome: Outcome, error: BaseException | None) -> None:
    """Tell subscribers of a failed attempt."""
    if error is not None and events.wanted(EventName.JOB_FAILED):
        tell_failed(events, held, outcome, one_line(describe(error).type))


def tell_failed(events: Bus, held: Held, outcome: Outcome, error: str) -> None:
    """The same, where the class of the error is known as text."""
    events.emit(
        EventName.JOB_FAILED,
        id=held.job.id,
        queue=held.job.queue,
        task=held.job.task,
        attempt=held.job.attempt,
        outcome=outcome.kind.value,
        error=error,
        delay=outcome.delay,
    )


def tell_missing(events: Bus, job: Job) -> None:
    """Tell subscribers of a result that cannot be stored."""
    events.emit(EventName.RESULT_MISSING, id=job.id, queue=job.queue, task=job.task)


class Runner:
    """What the runners share: how they were made, and the steps before and after a run.

    `hungry` is called when the buffer runs low, so that the next claim is under way in time. `announce`, refreshed at every
    claim, says whether anybody wants to hear of every start.
    """

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        events: Bus,
        *,
        concurrency: int,
        finish: Finish,
        finish_call: Callable[[Sequence[tuple[Held, Outcome]]], None],
        extend: Extend,
        hungry: Callable[[], None],
        doubt: Callable[[Held, Outcome, str | None, bool], None],
        desk: Desk,
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.events = events
        self.concurrency = concurrency
        self.finish = finish
        self.finish_call = finish_call
        self.extend = extend
        self.hungry = hungry
        self.doubt = doubt
        self.desk = desk
        self.low_mark = 0
        self.announce = True

    def begin(self, held: Held) -> CurrentJob | None:
        """What the handler will see of its job; None when the job is not to be run here (any more)."""
        return self.begin_as(CurrentJob, held)

    def begin_as(self, kind: Callable[[Job, Extend, Desk], CurrentT], held: Held) -> CurrentT | None:
        """The same, as an object of this kind."""
        current = kind(held.job, self.extend, self.desk)
        start = self.ledger.begin(held, current)
        if start is Start.GIVE_BACK:
            self.finish(held, RELEASED)
        if start is not Start.RUN:
            return None
        if self.announce:
            self.events.emit(EventName.JOB_STARTED, id=held.job.id, task=held.job.task, attempt=held.job.attempt)
        return current

    def broken_policy(self, held: Held, problem: str) -> None:
        """The retry policy of a task has failed."""
        job = held.job
        facts: dict[str, Any] = {"id": job.id, "queue": job.queue, "task": job.task, "attempt": job.attempt}
        self.events.emit(EventName.TASK_POLICY_FAILED, **facts, error=problem)

    def end(self, held: Held, outcome: Outcome, error: BaseException | None) -> None:
        """The job ran, and this came of it."""
        if self.ledger.take(held):
            current = held.current
            # Not by the property: this is asked after every job.
            if current is not None and current._stage is not _WORKER:
                kind = None if error is None else one_line(describe(error).type)
                self.finish_or_doubt(held, outcome, kind)
                return
            self.finish(held, outcome)
            if error is not None:
                report(self.events, held, outcome, error)

    def finish_or_doubt(self, held: Held, outcome: Outcome, error: str | None) -> None:
        """The same where the job is taken and the class of the error is known as text. What a handler has settled itself the
        settler looks into: the outcome holds only if that has not become true."""
        if not self.doubted(held, outcome, error):
            self.finish(held, outcome)
            if error is not None:
                tell_failed(self.events, held, outcome, error)

    def doubted(self, held: Held, outcome: Outcome, error: str | None, *, counts: bool = True) -> bool:
        """Whether the handler has settled this job itself, so that the settler looks into it. `counts`: what it finds is
        something to learn from."""
        current = held.current
        if current is None or not current.settled:
            return False
        if outcome.kind is OutcomeKind.COMPLETED:
            outcome = judge(held, TaskError(NOT_COMMITTED), prepared=True)
        self.doubt(held, outcome, error, counts)
        return True

    def raised(self, held: Held, task: BaseTask[..., Any] | None, error: BaseException) -> Outcome:
        """The outcome of a run that raised; `task` None where its function was not reached."""
        tell = functools.partial(self.broken_policy, held)
        return judge(held, error, prepared=task is not None, task=task, tell=tell)

    def rescue(self, held: Held, error: BaseException) -> None:
        """Something of ours failed around a job: that is a failed attempt of it, unless its outcome is known already."""
        if self.ledger.take(held):
            self.finish_or_doubt(held, judge(held, error, prepared=True), None)

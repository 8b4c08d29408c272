"""One job in this thread, called as a worker calls it: the same runner, without the loops around it."""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

from pgqueue.core import Core
from pgqueue.current import CurrentJob, Stage, enter
from pgqueue.errors import PgQueueError
from pgqueue.job import Job
from pgqueue.ops import Op
from pgqueue.outcome import COMPLETED, Outcome, Signal
from pgqueue.task import BaseTask
from pgqueue.worker.batch_call import BatchCall
from pgqueue.worker.batches import Group
from pgqueue.worker.desk import Desk
from pgqueue.worker.execution import Runner, limited, prepare
from pgqueue.worker.ledger import Held, Ledger
from pgqueue.worker.wrapping import call_coroutine, call_function

T = TypeVar("T")
SETTLED, LOST = "settled", "lost"


class Ask(NamedTuple):
    """Run this operation in the database."""

    op: Op[Any]


class Await(NamedTuple):
    """Run this in an event loop."""

    work: Awaitable[Any]


class Guard(NamedTuple):
    """A handler is about to run (True), or has (False)."""

    begins: bool


Plan: TypeAlias = Generator[Ask | Await | Guard, Any, T]
"""What is to be done, for a loop of either colour to do."""


class TooManyJobs(PgQueueError):
    """More jobs than `limit` allows: they enqueue each other without end, or the limit is too low."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A job that ran. `outcome`: completed, retry, snooze, discard, dead or release (given back, without a run), as a worker
    would have written it; "settled" where the handler settled it by hand, "lost" where the job was not ours any more at
    the end. `error` is what counts as raised, a signal such as Retry included; `result` what the function returned.
    """

    id: int
    queue: str
    task: str
    attempt: int
    args: list[Any] | None
    kwargs: dict[str, Any] | None
    outcome: str
    error: BaseException | None = None
    result: Any = None


class Caller(Runner):
    """Calls jobs one after the other. `decided` are the outcomes of the last call, `doubts` those to be looked into."""

    def __init__(self, app: Core, desk: Desk, extend: Callable[[Job, float], None]) -> None:
        self.decided: list[tuple[Held, Outcome]] = []
        self.doubts: list[tuple[Held, Outcome]] = []
        self.raising: dict[int, BaseException] = {}
        self.returned: dict[int, Any] = {}
        super().__init__(
            app.tasks,
            Ledger(),
            app.events,
            concurrency=1,
            finish=lambda held, outcome: self.decided.append((held, outcome)),
            finish_call=self.decided.extend,
            extend=extend,
            hungry=_nothing,
            doubt=lambda held, outcome, _error, _counts: self.doubts.append((held, outcome)),
            desk=desk,
        )

    def call(self, jobs: Sequence[Job]) -> Plan[None]:
        """One job, or several of a batch task in one call. Their outcomes are in `decided` and `doubts` afterwards."""
        self.decided.clear()
        self.doubts.clear()
        self.raising.clear()
        self.returned.clear()
        helds = self.ledger.add(jobs, math.inf)
        task = self.registry.get(jobs[0].task)
        yield Guard(True)
        try:
            if task is not None and task.defaults.batch is not None:
                yield from self._batch(task, helds)
            else:
                yield from self._one(helds[0])
        finally:
            self.ledger.remove(helds)
        yield Guard(False)

    def raised(self, held: Held, task: BaseTask[..., Any] | None, error: BaseException) -> Outcome:
        """See Runner."""
        self.raising[held.job.id] = error
        return super().raised(held, task, error)

    def ran(self, job: Job, outcome: str) -> Ran:
        """What is told of it."""
        args, kwargs = _decoded(job)
        return Ran(
            id=job.id,
            queue=job.queue,
            task=job.task,
            attempt=job.attempt,
            args=args,
            kwargs=kwargs,
            outcome=outcome,
            error=self.raising.get(job.id),
            result=self.returned.get(job.id),
        )

    def _batch(self, task: BaseTask[..., Any], helds: list[Held]) -> Plan[None]:
        call = BatchCall(self, cast("Group", _Group(task, helds)))
        if not call.batch:
            return
        if task.is_async:
            yield Await(call.run_async())
        else:
            contextvars.Context().run(call.run)

    def _one(self, held: Held) -> Plan[None]:
        current = self.begin(held)
        if current is None:
            return
        task = self.registry.get(held.job.task)
        if task is not None and task.is_async:
            outcome, error = yield Await(self._call_async(held, current))
        else:
            outcome, error = self._call(held, current)
        self.end(held, outcome, error)

    def _call(self, held: Held, current: CurrentJob) -> tuple[Outcome, BaseException | None]:
        """As a thread of a worker does it, in a context in which nothing is set, as there."""
        task: BaseTask[..., Any] | None = None
        try:
            task, args, kwargs = prepare(self.registry.find, held.job)
            result = call_function(task, current, contextvars.Context(), args, kwargs)
            return self._returned(task, current, result), None
        except BaseException as error:  # noqa: BLE001 - as in a worker; raised again once the outcome is written
            return self.raised(held, task, error), error

    async def _call_async(self, held: Held, current: CurrentJob) -> tuple[Outcome, BaseException | None]:
        """As the event loop of a worker does it."""
        task: BaseTask[..., Any] | None = None
        try:
            task, args, kwargs = prepare(self.registry.find, held.job)
            enter(current)
            result = await limited(call_coroutine(task, current, args, kwargs), held.job.timeout)
            return self._returned(task, current, result), None
        except BaseException as error:  # noqa: BLE001
            return self.raised(held, task, error), error

    def _returned(self, task: BaseTask[..., Any], current: CurrentJob, result: Any) -> Outcome:
        self.returned[current.id] = result
        return COMPLETED if task.keeps is None else self.desk.returned(current, result)


class _Group:
    """A batch that is complete."""

    def __init__(self, task: BaseTask[..., Any], helds: list[Held]) -> None:
        self.task = task
        self.queue = helds[0].job.queue
        self.helds = helds

    def close(self) -> list[Held]:
        return self.helds


def settled_by_handler(held: Held) -> str:
    """What a job whose handler settled it came to."""
    current = held.current
    return COMPLETED.kind.value if current is not None and current.stage is Stage.SETTLED else SETTLED


def to_raise(ran: Sequence[Ran], *, wanted: bool) -> BaseException | None:
    """The first error among these that is one: a signal is an answer. Not unless it is wanted, but for Ctrl-C."""
    for one in ran:
        error = one.error
        if error is None or isinstance(error, Signal):
            continue
        if wanted or isinstance(error, KeyboardInterrupt):
            error.add_note(f"raised in job {one.id} of task {one.task}, attempt {one.attempt}; outcome: {one.outcome}")
            return error
    return None


def _decoded(job: Job) -> tuple[list[Any] | None, dict[str, Any] | None]:
    try:
        return job.args, job.kwargs
    except PgQueueError:
        return None, None


def _nothing() -> None: ...

"""The inline mode: an enqueue runs its job at once, in the same thread, without a database."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeVar

from pgqueue.async_client import AsyncPgQueue
from pgqueue.core import Core
from pgqueue.current import CurrentJob
from pgqueue.drivers.resolve import check_async, check_sync
from pgqueue.errors import PgQueueError
from pgqueue.job import Job
from pgqueue.ops import Op, Rows, Step, Stream
from pgqueue.testing.calling import Ask, Await, Caller, Guard, Plan, Ran, TooManyJobs, settled_by_handler, to_raise
from pgqueue.testing.loops import Loop, driven, driven_async, in_new_task
from pgqueue.testing.pointing import home_of, running_by
from pgqueue.worker.desk import Desk

T = TypeVar("T")
ONE, MANY, KEYED = "job_enqueue", "job_enqueue_many", "job_enqueue_keyed"
UNIQUE = ("job_enqueue_unique", "job_enqueue_over")
MOST = 1000
DEEPEST = 50
ENQUEUES_ONLY = (
    "the inline mode has no queue, so only an enqueue does something there, and this is none ({}): do it outside of the "
    "inline mode, or test it with run_jobs on a database for tests"
)
NO_DATABASE = "an inline job is in no database: give transaction(using=…) a connection of yours, or use run_jobs"


@contextmanager
def inline(pq: Core, *, raise_errors: bool = True, limit: int = MOST) -> Iterator[list[Ran]]:
    """Let every enqueue of `pq` run its job at once, during the block; what ran is in the list.

    The arguments go through JSON, and what production refuses is refused. There is one attempt, whatever the delay, the keys
    and the limits; nothing is written, so a rollback undoes nothing. Whatever else is asked of `pq` is refused: it never
    reaches the database that `pq` is configured for. The ids of the jobs are negative.
    `raise_errors`: the enqueue raises what the handler raised. TooManyJobs once more than `limit` would run, or jobs enqueue
    each other 50 deep.
    """
    app = home_of(pq)
    mode = _Inline(app, raise_errors, limit)
    with running_by(app, mode.run_async if isinstance(app, AsyncPgQueue) else mode.run), mode:
        yield mode.ran


class _Inline:
    def __init__(self, app: Core, raise_errors: bool, limit: int) -> None:
        self._app = app
        self._raise_errors = raise_errors
        self._limit = limit
        self._numbers = itertools.count(1)
        self._depth = 0
        self._loop = Loop()
        self.ran: list[Ran] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_error: object) -> None:
        self._loop.close()

    def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """See PgQueue.run."""
        if using is not None:
            check_sync(using)
        answer, jobs = self._taken(op)
        driven(self._plan(jobs), self._answer)
        return answer

    async def run_async(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """See AsyncPgQueue.run."""
        if using is not None:
            check_async(using)
        answer, jobs = self._taken(op)
        await driven_async(self._plan(jobs), self._answer_in_loop)
        return answer

    def _taken(self, op: Op[T]) -> tuple[T, list[Job]]:
        """Answer the enqueue as the database would, to its end: what is refused is refused before anything runs, and so is
        all that is no enqueue."""
        jobs: list[Job] = []
        try:
            step = next(op)
            while True:
                steps = step.steps if isinstance(step, Stream) else [step]
                rows: Rows = []
                for one in steps:
                    made = self._made(one)
                    jobs += made
                    rows += _answered(one.name, [job.id for job in made])
                step = op.send(rows)
        except StopIteration as stop:
            return stop.value, jobs
        finally:
            op.close()

    def _made(self, step: Step) -> list[Job]:
        params = step.params
        if step.name == ONE:
            calls = [(params["args"], params["kwargs"])]
        elif step.name == MANY or step.name == KEYED or step.name in UNIQUE:
            args = list(params["args"])
            kwargs = params["kwargs"] or [None] * len(args)
            calls = list(zip(args, kwargs, strict=True))
        else:
            raise PgQueueError(ENQUEUES_ONLY.format(step.name))
        return [self._job(params, *call) for call in calls]

    def _job(self, params: Mapping[str, Any], args_json: str | None, kwargs_json: str | None) -> Job:
        number = next(self._numbers)
        return Job(
            id=-number,  # no job in any database has it
            queue=params["queue"],
            task=params["task"],
            token=number,
            attempt=1,
            max_attempts=params["max_attempts"],
            lost=0,
            priority=params["priority"],
            position=number,
            timeout=params["timeout"],
            created_utc=datetime.now(UTC).replace(tzinfo=None),
            args_json=args_json,
            kwargs_json=kwargs_json,
            retry_json=params["retry"],
            headers_json=params["headers"],
        )

    def _plan(self, jobs: list[Job]) -> Plan[None]:
        if self._depth >= DEEPEST:
            raise TooManyJobs(f"jobs enqueue each other {DEEPEST} deep: inline they would never end")
        self._depth += 1
        try:
            for job in jobs:
                if len(self.ran) >= self._limit:
                    raise TooManyJobs(f"{self._limit} jobs ran inline; inline(…, limit=…) allows more")
                yield from self._one(job)
        finally:
            self._depth -= 1

    def _one(self, job: Job) -> Plan[None]:
        caller = Caller(self._app, _Desk(self._app), _nothing)  # of its own: what runs may enqueue
        yield from caller.call([job])
        told = [caller.ran(job, outcome.kind.value) for _, outcome in caller.decided]
        told += [caller.ran(job, settled_by_handler(held)) for held, _ in caller.doubts]
        self.ran += told
        if (error := to_raise(told, wanted=self._raise_errors)) is not None:
            raise error

    def _answer(self, wish: Ask | Await | Guard) -> Any:
        return self._loop.run(wish.work) if isinstance(wish, Await) else None

    async def _answer_in_loop(self, wish: Ask | Await | Guard) -> Any:
        return await in_new_task(wish.work) if isinstance(wish, Await) else None


class _Desk(Desk):
    """What a handler asks of its worker, where there is no queue."""

    def __init__(self, app: Core) -> None:
        super().__init__(app.settings, connections=1, keeps=_keeps(app), report=_nothing, missing=_nothing, app=app)

    def transaction(self, jobs: Any, using: Any) -> Any:
        """See Desk."""
        if using is None:
            raise PgQueueError(NO_DATABASE)
        return _Block(jobs, using)


class _Block(AbstractContextManager[Any], AbstractAsyncContextManager[Any]):
    """The transaction is the caller's; the completion is nowhere to be written."""

    def __init__(self, jobs: list[CurrentJob], using: Any) -> None:
        self._jobs = jobs
        self._using = using

    def __enter__(self) -> Any:
        for job in self._jobs:
            job.enter_block()
        return self._using

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.leave_block()

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def _answered(name: str, ids: list[int]) -> Rows:
    if name == ONE:
        return [(ids[0], None)]
    if name in UNIQUE:
        return [(place, number, True, False) for place, number in enumerate(ids, 1)]
    return [(ids, None)]


def _keeps(app: Core) -> Callable[[Job], float | None]:
    return lambda job: None if (task := app.tasks.get(job.task)) is None else task.keeps


def _nothing(*_facts: object) -> None: ...

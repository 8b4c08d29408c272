"""What was enqueued: live jobs, also those of the test's own transaction, and assertions about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from pgqueue.async_client import AsyncPgQueue
from pgqueue.client import PgQueue
from pgqueue.core import Core
from pgqueue.errors import ConfigurationError
from pgqueue.ops import Op
from pgqueue.ops import status as status_ops
from pgqueue.ops.status import LiveJob
from pgqueue.payload import decode_args, decode_kwargs, encode_call
from pgqueue.task import BaseTask

AnyTask: TypeAlias = Any
"""A task, its name, or a task of Django's framework."""
STATES = ("ready", "scheduled", "blocked", "running")
SHOWN = 20
LONGEST = 200
MISSING_APP = "a name, or a task of Django's framework, needs the queue object beside it: assert_enqueued(…, pq=pq)"
ASYNC = "an AsyncPgQueue is asynchronous: await {}_async(…)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """A live job. `state` is ready, scheduled, blocked or running; `run_at` when it is due, None where that is now."""

    id: int
    task: str
    queue: str
    args: list[Any]
    kwargs: dict[str, Any]
    state: str
    priority: int
    attempt: int
    max_attempts: int
    run_at: datetime | None
    created_at: datetime | None
    unique_key: str | None

    def __str__(self) -> str:
        """As the call that enqueued it, with what is not as usual."""
        call = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        said = f"{self.task}({', '.join(call)})"
        said = said if len(said) <= LONGEST else f"{said[:LONGEST]}…"
        facts = [f"job {self.id}", f"queue {self.queue}", self.state]
        facts += [f"priority {self.priority}"] if self.priority else []
        facts += [f"attempt {self.attempt}"] if self.attempt else []
        facts += [f"due {self.run_at.astimezone(UTC).isoformat()}"] if self.run_at else []
        facts += [f"unique key {self.unique_key}"] if self.unique_key else []
        return f"{said}  [{', '.join(facts)}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What a job must be like. None says nothing."""

    task: str
    names: set[str]
    call: tuple[list[Any], dict[str, Any]] | None
    known: BaseTask[Any, Any] | None
    facts: Mapping[str, Any]

    def fits(self, job: Enqueued) -> bool:
        if job.task not in self.names or any(
            getattr(job, name) != value for name, value in self.facts.items() if value is not None
        ):
            return False
        return self.call is None or _bound(self.known, *self.call) == _bound(self.known, job.args, job.kwargs)

    def __str__(self) -> str:
        inside = "…"
        if self.call is not None:
            args, kwargs = self.call
            inside = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        facts = [f"{name}={value!r}" for name, value in self.facts.items() if value is not None]
        return f"{self.task}({inside})" + (f" with {', '.join(facts)}" if facts else "")


def enqueued_jobs(
    pq: Core | AnyTask, *, task: AnyTask | None = None, queue: str | None = None, using: Any = None
) -> list[Enqueued]:
    """The live jobs in the order in which they were enqueued: those of a task, of a queue, of all.

    `pq` is the queue object, or a task of it. `using`: as that connection sees it, with what it has not committed; not
    needed where `pq` is bound to it, or on Django's own connections.
    """
    app, op = _look(pq, task, queue)
    if not isinstance(app, PgQueue):
        raise ConfigurationError(ASYNC.format("enqueued_jobs"))
    return [_seen(job) for job in app.run(op, using)]


async def enqueued_jobs_async(
    pq: Core | AnyTask, *, task: AnyTask | None = None, queue: str | None = None, using: Any = None
) -> list[Enqueued]:
    """The same for an AsyncPgQueue and its tasks."""
    app, op = _look(pq, task, queue)
    if not isinstance(app, AsyncPgQueue):
        raise ConfigurationError("a PgQueue is synchronous: call enqueued_jobs(…) without await")
    return [_seen(job) for job in await app.run(op, using)]


def assert_enqueued(
    task: AnyTask,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    times: int | None = None,
    pq: Core | None = None,
    queue: str | None = None,
    priority: int | None = None,
    state: str | None = None,
    run_at: datetime | None = None,
    unique_key: str | None = None,
    max_attempts: int | None = None,
    using: Any = None,
) -> list[Enqueued]:
    """AssertionError unless a live job of `task` is there for which all of this is true; the jobs that are like this.

    A name, or a task of Django's framework, needs `pq` beside it. `args` and `kwargs` are those of the call, and compared
    as the handler would get them, through JSON, whether they were given by place or by name. Without any, those of the job
    do not matter; ``kwargs={}`` means a call without arguments.
    `times`: exactly so many jobs; 0: none. What has run already is not live any more: see what run_jobs returns.
    """
    app = _app_of(task, pq)
    facts = {
        "queue": queue,
        "priority": priority,
        "state": state,
        "run_at": run_at,
        "unique_key": unique_key,
        "max_attempts": max_attempts,
    }
    return _judged(_wanted(app, task, args, kwargs, facts), times, enqueued_jobs(app, using=using))


async def assert_enqueued_async(
    task: AnyTask,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    times: int | None = None,
    pq: Core | None = None,
    queue: str | None = None,
    priority: int | None = None,
    state: str | None = None,
    run_at: datetime | None = None,
    unique_key: str | None = None,
    max_attempts: int | None = None,
    using: Any = None,
) -> list[Enqueued]:
    """The same for an AsyncPgQueue and its tasks."""
    app = _app_of(task, pq)
    facts = {
        "queue": queue,
        "priority": priority,
        "state": state,
        "run_at": run_at,
        "unique_key": unique_key,
        "max_attempts": max_attempts,
    }
    return _judged(_wanted(app, task, args, kwargs, facts), times, await enqueued_jobs_async(app, using=using))


def _wanted(
    app: Core,
    task: AnyTask,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    facts: Mapping[str, Any],
) -> _Wanted:
    if facts["state"] is not None and facts["state"] not in STATES:
        raise ConfigurationError(f"state is one of {', '.join(STATES)}, and not {facts['state']!r}")
    name = _name(app, task)
    known = app.tasks.get(name)
    call = None
    if args or kwargs is not None:
        if known is not None:
            known.check(args, kwargs or {})  # a test that could never pass says so
        args_json, kwargs_json = encode_call(args, kwargs or {}, max_bytes=app.settings.max_payload_bytes)
        call = (decode_args(args_json), decode_kwargs(kwargs_json))
    aliases = [other for other, of in app.tasks._aliases.items() if known is not None and of.name == known.name]
    return _Wanted(task=name, names={name, *aliases}, call=call, known=known, facts=facts)


def _judged(wanted: _Wanted, times: int | None, jobs: list[Enqueued]) -> list[Enqueued]:
    found = [job for job in jobs if wanted.fits(job)]
    if (times is None and found) or times == len(found):
        return found
    number = "" if times is None else f" {times} times" if times != 1 else " once"
    verb = "was not enqueued" if not found else f"was enqueued {len(found)} times"
    expected = f"expected {wanted}{number}: it {verb}"
    near = [job for job in jobs if job.task == wanted.task]
    others = [job for job in jobs if job.task != wanted.task]
    lines = [f"  {job}" for job in [*near, *others][:SHOWN]]
    left = len(jobs) - len(lines)
    lines += [f"  … and {left} more"] if left else []
    listing = "\n".join(["enqueued is:", *lines]) if jobs else "nothing is enqueued"
    raise AssertionError(f"{expected}\n{listing}")


def _look(pq: Core | AnyTask, task: AnyTask | None, queue: str | None) -> tuple[Any, Op[list[LiveJob]]]:
    if isinstance(pq, str):
        raise ConfigurationError("enqueued_jobs needs the queue object, or a task of it")
    if isinstance(pq, BaseTask):
        task = pq if task is None else task
        pq = _app_of(pq, None)
    name = None if task is None else _name(pq, task)
    return pq, status_ops.jobs(queue=queue, task=name, limit=status_ops.MOST)


def _app_of(task: AnyTask, pq: Core | None) -> Core:
    app = getattr(task, "app", None) if pq is None else pq
    if not isinstance(app, Core):
        raise ConfigurationError(MISSING_APP)
    return app


def _name(app: Core, task: AnyTask) -> str:
    if isinstance(task, (str, BaseTask)):
        return task if isinstance(task, str) else task.name
    function = getattr(task, "func", None)
    for name, known in app.tasks.items():
        framework = getattr(known, "django_task", None)
        if framework is not None and framework.func is function:
            return name
    raise ConfigurationError(f"{task!r} is no task of this queue, nor the name of one")


def _bound(task: BaseTask[Any, Any] | None, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Arguments by the names of their parameters, where the task is known and they fit."""
    if task is not None:
        try:
            bound = task._signature.bind(*args, **kwargs)
        except TypeError:
            return args, kwargs
        bound.apply_defaults()
        return bound.arguments
    return args, kwargs


def _seen(job: LiveJob) -> Enqueued:
    return Enqueued(
        id=job.id,
        task=job.task,
        queue=job.queue,
        args=decode_args(job.args_json),
        kwargs=decode_kwargs(job.kwargs_json),
        state=job.state,
        priority=job.priority,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        run_at=job.run_at,
        created_at=job.created_at,
        unique_key=job.unique_key,
    )

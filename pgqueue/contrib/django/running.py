"""What a worker does around a job of a Django application: its connections, the signals of the framework, the context."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from django.dispatch import Signal
from django.utils import timezone

from pgqueue.batch import Batch
from pgqueue.client import Task as QueueTask
from pgqueue.contrib.django import hygiene
from pgqueue.contrib.django.framework import (
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from pgqueue.contrib.django.times import as_django, claimed_at
from pgqueue.current import CurrentJob, current_job
from pgqueue.errors import TaskError as JobError
from pgqueue.failure import describe
from pgqueue.middleware import Middleware
from pgqueue.outcome import OutcomeKind
from pgqueue.task import TaskOptions
from pgqueue.worker.execution import verdict

if TYPE_CHECKING:
    from pgqueue.contrib.django.queues import DjangoQueue

UNKNOWN_WORKER = "unknown"
"""Who ran an earlier attempt: the queue does not keep it, and the framework counts attempts by the length of that list."""
RECEIVERS = 5.0
"""Seconds that receivers of a signal may take around an `async def`."""
_FINAL = (OutcomeKind.DEAD, OutcomeKind.DISCARD)
_running: ContextVar[TaskResult[..., Any]] = ContextVar("pgqueue_django_result")


class FrameworkTask(QueueTask[..., Any]):
    """A task of Django's framework as a queue knows it."""

    def __init__(self, app: DjangoQueue, task: Any, name: str, options: TaskOptions) -> None:
        self.django_task = task
        self.backend: str = task.backend
        super().__init__(app, _runnable(app, task), name, options)


def _runnable(app: DjangoQueue, task: Any) -> Callable[..., Any]:
    """The function, with the context before its arguments where it takes one; what it returns is as the framework has it."""
    function = task.func

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        context = (TaskContext(task_result=_result_here(app, task)),) if task.takes_context else ()
        return function(*context, *args, **kwargs)

    async def asynchronous(*args: Any, **kwargs: Any) -> Any:
        return _plain(await call(args, kwargs))

    def synchronous(*args: Any, **kwargs: Any) -> Any:
        return _plain(call(args, kwargs))

    chosen: Any = asynchronous if inspect.iscoroutinefunction(function) else synchronous
    run: Any = functools.wraps(function)(chosen)
    if task.takes_context:
        signature = inspect.signature(function)
        run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return run  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """As JSON has it. What has no such form stays: the worker says that it cannot be kept."""
    if value is None:
        return None
    try:
        return normalize_json(value)
    except (TypeError, ValueError, RecursionError):
        return value


def _result_here(app: DjangoQueue, task: Any) -> TaskResult[..., Any]:
    found = _running.get(None)
    return _begun(app, task, current_job()) if found is None else found


def _begun(app: DjangoQueue, task: Any, job: CurrentJob) -> TaskResult[..., Any]:
    """The result of a job that has just begun."""
    began = as_django(claimed_at(job.token))
    worker = f"{socket.gethostname()}:{os.getpid()}"
    return TaskResult(
        task=task,
        id=str(job.id),
        status=TaskResultStatus.RUNNING,
        enqueued_at=as_django(job.job.created_at),
        started_at=began,
        last_attempted_at=began,
        finished_at=None,
        args=job.job.args,
        kwargs=job.job.kwargs,
        backend=app.alias,
        errors=[],
        worker_ids=[*([UNKNOWN_WORKER] * (job.attempt - 1)), worker],
    )


class AroundJobs(Middleware):
    """Around every job of a queue: usable connections before it, none left in a transaction behind it, and the signals
    task_started and task_finished of the framework, the latter when the job is over and not at a failure that is retried.
    """

    def __init__(self, app: DjangoQueue) -> None:
        self._app = app

    def run(self, job: CurrentJob, proceed: Callable[[], Any]) -> Any:
        """See Middleware."""
        outer = hygiene.open_blocks()
        hygiene.refresh(outer)
        try:
            result = self._begin(job)
            _send(task_started, result)
            try:
                value = proceed()
                _refuse_open(hygiene.left_open(outer))
            except BaseException as error:
                _send(task_finished, self._failed(job, result, error))
                raise
            _send(task_finished, _succeeded(result, value))
        finally:
            hygiene.tidy(outer)
        return value

    async def run_async(self, job: CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """See Middleware. Each job has a thread of its own for what it does in `sync_to_async`, as each request has."""
        async with hygiene.OwnThread() as thread:
            result = self._begin(job)
            await _asend(task_started, result)
            try:
                value = await proceed()
                _refuse_open(await thread.left_open())
            except BaseException as error:
                await _asend(task_finished, self._failed(job, result, error))
                raise
            await _asend(task_finished, _succeeded(result, value))
        return value

    def run_batch(self, batch: Batch, proceed: Callable[[], Any]) -> Any:
        """See Middleware. Batch handlers are tasks of the queue alone: the framework has no signals for them."""
        outer = hygiene.open_blocks()
        hygiene.refresh(outer)
        try:
            value = proceed()
            _refuse_open(hygiene.left_open(outer))
        finally:
            hygiene.tidy(outer)
        return value

    async def run_batch_async(self, batch: Batch, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """See Middleware."""
        async with hygiene.OwnThread() as thread:
            value = await proceed()
            _refuse_open(await thread.left_open())
        return value

    def _begin(self, job: CurrentJob) -> TaskResult[..., Any] | None:
        """None for a task that is not one of the framework."""
        task = self._app.tasks.get(job.task)
        if not isinstance(task, FrameworkTask):
            return None
        result = _begun(self._app, task.django_task, job)
        _running.set(result)
        return result

    def _failed(
        self, job: CurrentJob, result: TaskResult[..., Any] | None, error: BaseException
    ) -> TaskResult[..., Any] | None:
        """None while the job is not over: it is retried, or its handler has settled it."""
        if result is None or job.settled:
            return None
        outcome = verdict(job.job, error, prepared=True, task=self._app.tasks.get(job.task))
        if outcome.kind not in _FINAL:
            return None
        kind = type(error)
        result.errors.append(
            TaskError(
                exception_class_path=f"{kind.__module__}.{kind.__qualname__}",
                traceback=f"{describe(error).traceback}\n",
            )
        )
        return _ended(result, TaskResultStatus.FAILED)


def _succeeded(result: TaskResult[..., Any] | None, value: Any) -> TaskResult[..., Any] | None:
    if result is None:
        return None
    object.__setattr__(result, "_return_value", value)
    return _ended(result, TaskResultStatus.SUCCESSFUL)


def _ended(result: TaskResult[..., Any], status: TaskResultStatus) -> TaskResult[..., Any]:
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", timezone.now())
    return result


def _refuse_open(aliases: list[str]) -> None:
    if aliases:
        raise JobError(f"the function left a transaction open on {', '.join(aliases)}: it is rolled back")


def _send(signal: Signal, result: TaskResult[..., Any] | None) -> None:
    """What a receiver raises is logged by Django, and is nothing of the job's."""
    if result is not None:
        signal.send_robust(sender=_sender(result), task_result=result)


async def _asend(signal: Signal, result: TaskResult[..., Any] | None) -> None:
    if result is None:
        return
    if len(signal.receivers) <= 1:
        # Only the framework's own, which writes a log line: not worth a thread.
        signal.send_robust(sender=_sender(result), task_result=result)
        return
    # The thread of the job may hang in what has just been cancelled.
    with suppress(TimeoutError):
        async with asyncio.timeout(RECEIVERS):
            await signal.asend_robust(sender=_sender(result), task_result=result)


def _sender(result: TaskResult[..., Any]) -> type[Any]:
    return type(task_backends[result.backend])

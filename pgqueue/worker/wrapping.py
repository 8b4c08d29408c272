"""Running a function through the middleware of its application.

No middleware can lose a job: one that calls nothing, or swallows what the function raised, does not make it done.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from typing import Any

from pgqueue.batch import Batch
from pgqueue.current import CurrentJob, enter
from pgqueue.errors import TaskError
from pgqueue.task import BaseTask
from pgqueue.worker.execution import check_result


def call_function(
    task: BaseTask[..., Any], current: CurrentJob, context: Context, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a plain function for this job, in this context; what it returned."""
    context.run(enter, current)
    if task.chain is not None and task.chain.runs:
        return context.run(through, task.chain.runs, current, task.function, args, kwargs)
    result = context.run(task.function, *args, **kwargs)
    check_result(result)
    return result


def call_coroutine(
    task: BaseTask[..., Any], current: CurrentJob, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Awaitable[Any]:
    """The same for an `async def`: what is to be awaited, where the job was entered."""
    if task.chain is not None and task.chain.runs_async:
        return through_async(task.chain.runs_async, current, task.function, args, kwargs)
    work: Awaitable[Any] = task.function(*args, **kwargs)
    return work


class _Ran:
    """How the last call of the function ended."""

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.returned: Any = None

    def value(self) -> Any:
        """What it returned, or raised."""
        if self.error is not None:
            raise self.error
        if not self.done:
            raise TaskError("a middleware ended without running the function: the job is not done")
        return self.returned


def through(
    wraps: Sequence[Callable[..., Any]],
    current: CurrentJob | Batch,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a plain function inside these methods of middleware; what it returned."""
    ran = _Ran()

    def innermost() -> Any:
        ran.error, ran.done = None, False
        try:
            result = function(*args, **kwargs)
            check_result(result)
        except BaseException as error:
            ran.error = error
            raise
        ran.done, ran.returned = True, result
        return result

    proceed: Callable[[], Any] = innermost
    for wrap in reversed(wraps):
        proceed = functools.partial(wrap, current, proceed)
    proceed()
    return ran.value()


async def through_async(
    wraps: Sequence[Callable[..., Awaitable[Any]]],
    current: CurrentJob | Batch,
    function: Callable[..., Awaitable[Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an `async def` inside these; what it returned."""
    ran = _Ran()

    async def innermost() -> Any:
        ran.error, ran.done = None, False
        try:
            result = await function(*args, **kwargs)
        except BaseException as error:
            ran.error = error
            raise
        ran.done, ran.returned = True, result
        return result

    proceed: Callable[[], Awaitable[Any]] = innermost
    for wrap in reversed(wraps):
        proceed = functools.partial(wrap, current, proceed)
    await proceed()
    return ran.value()

"""Middleware: what an application wraps around every enqueue and every run of its tasks."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pgqueue.batch import Batch
from pgqueue.config import shown
from pgqueue.current import CurrentJob, running_job
from pgqueue.errors import ConfigurationError


@dataclass(slots=True, kw_only=True)
class EnqueueCall:
    """An enqueue that is about to happen. `headers` may be changed. `args` and `kwargs` are None for an enqueue of many
    jobs, which is asked about once. `topic`: a publish, whose `task` and `queue` are empty: subscriptions decide."""

    task: str
    queue: str
    args: Sequence[Any] | None
    kwargs: Mapping[str, Any] | None
    headers: dict[str, Any]
    topic: str | None = None


class Middleware:
    """Override what you need, and register an instance with ``pq.middleware(…)``; what is not overridden costs nothing.

    The first that is registered is the outermost. `run` is for plain functions, `run_async` for `async def`.
    """

    def enqueue(self, call: EnqueueCall) -> None:
        """Called before anything is sent. Change `call.headers`, or raise to refuse: the caller gets what is raised, and its
        transaction stays usable."""

    def run(self, job: CurrentJob, proceed: Callable[[], Any]) -> Any:
        """Around a run: call `proceed` once. What is raised here is a failed attempt; what the function raised stays one,
        and a job whose function was not called is not done. The result that is kept is the function's, whatever is
        returned here."""
        return proceed()

    async def run_async(self, job: CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """The same around an `async def`."""
        return await proceed()

    def run_batch(self, batch: Batch, proceed: Callable[[], Any]) -> Any:
        """The same around the call of a batch handler, for all of its jobs at once; `run` is not called for those."""
        return proceed()

    async def run_batch_async(self, batch: Batch, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """The same around an `async def`."""
        return await proceed()


COLOURS = {"enqueue": False, "run": False, "run_async": True, "run_batch": False, "run_batch_async": True}
"""Which methods of a middleware are `async def`."""


class Chain:
    """The middleware of an application, by what it overrides: bound methods, in tuples that are replaced and never
    changed."""

    __slots__ = ("batches", "batches_async", "enqueues", "runs", "runs_async")

    def __init__(self) -> None:
        self.enqueues: tuple[Middleware, ...] = ()
        self.runs: tuple[Callable[..., Any], ...] = ()
        self.runs_async: tuple[Callable[..., Any], ...] = ()
        self.batches: tuple[Callable[..., Any], ...] = ()
        self.batches_async: tuple[Callable[..., Any], ...] = ()

    def add(self, middleware: Middleware) -> None:
        """Register; ConfigurationError for what is none, or has a method of the wrong colour."""
        if not isinstance(middleware, Middleware):
            raise ConfigurationError(
                f"middleware must be an instance of a subclass of Middleware, not {shown(middleware)}"
            )
        kind = type(middleware)
        for method, wanted in COLOURS.items():
            if inspect.iscoroutinefunction(getattr(kind, method)) != wanted:
                raise ConfigurationError(
                    f"{kind.__name__}.{method} must be {'async def' if wanted else 'a plain function'}"
                )
        if kind.enqueue is not Middleware.enqueue:
            self.enqueues = (*self.enqueues, middleware)
        if kind.run is not Middleware.run:
            self.runs = (*self.runs, middleware.run)
        if kind.run_async is not Middleware.run_async:
            self.runs_async = (*self.runs_async, middleware.run_async)
        if kind.run_batch is not Middleware.run_batch:
            self.batches = (*self.batches, middleware.run_batch)
        if kind.run_batch_async is not Middleware.run_batch_async:
            self.batches_async = (*self.batches_async, middleware.run_batch_async)


class CopyContext(Middleware):
    """Carries context variables from the enqueue to the run.

    ``CopyContext({"tenant": tenant})`` puts the value of the variable `tenant` into the header "tenant", and sets the
    variable before the handler runs.

    Values must be JSON. A variable without a value leaves no header; a header that the caller gave stays.
    """

    def __init__(self, variables: Mapping[str, ContextVar[Any]]) -> None:
        if not isinstance(variables, Mapping) or not all(
            isinstance(name, str) and isinstance(variable, ContextVar) for name, variable in variables.items()
        ):
            raise ConfigurationError("CopyContext needs a mapping of names of headers to context variables")
        self.variables = dict(variables)

    def enqueue(self, call: EnqueueCall) -> None:
        """Fill in the headers."""
        for name, variable in self.variables.items():
            value = variable.get(_UNSET)
            if value is not _UNSET:
                call.headers.setdefault(name, value)

    def run(self, job: CurrentJob, proceed: Callable[[], Any]) -> Any:
        """Set the variables."""
        self._restore(job)
        return proceed()

    async def run_async(self, job: CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
        """Set the variables."""
        self._restore(job)
        return await proceed()

    def _restore(self, job: CurrentJob) -> None:
        headers = job.headers
        for name, variable in self.variables.items():
            if name in headers:
                variable.set(headers[name])


class InheritHeaders(Middleware):
    """Jobs that a handler enqueues get these headers of its own job: ``InheritHeaders("traceparent", "request_id")``.

    A header that the caller gave stays.
    """

    def __init__(self, *names: str) -> None:
        if not names or not all(isinstance(name, str) for name in names):
            raise ConfigurationError("InheritHeaders needs names of headers")
        self.names = names

    def enqueue(self, call: EnqueueCall) -> None:
        """Fill in the headers."""
        job = running_job()
        if job is None:
            return
        headers = job.headers
        for name in self.names:
            if name in headers:
                call.headers.setdefault(name, headers[name])


_UNSET: Any = object()

"""The tasks of Django's framework with our options: the decorators, and what they return."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, overload
from zoneinfo import ZoneInfo

from django.utils.module_loading import import_string

from pgqueue.contrib.django.framework import InvalidTask, Task
from pgqueue.contrib.django.options import DEFAULT, check_names, check_task_options
from pgqueue.errors import ConfigurationError, DuplicateTask
from pgqueue.schedule import GRACE, rhythm
from pgqueue.task import OF_THE_TASK, TaskOptions, import_name

if TYPE_CHECKING:
    from pgqueue.client import Task as QueueTask

P = ParamSpec("P")
R = TypeVar("R")
TaskT = TypeVar("TaskT", bound="Task[..., Any]")


class Scheduled(NamedTuple):
    """A schedule as it was written above a task."""

    task: Any
    options: Mapping[str, Any]


def place_of(task: Any) -> tuple[str, str]:
    """Where its function was written: the same place again is a reload."""
    return import_name(task.func.__module__), task.func.__qualname__


class Defined:
    """What modules have defined so far, for every queue of this process to look at. `number` grows with it."""

    def __init__(self) -> None:
        self.number = 0
        self.tasks: dict[str, Any] = {}
        self.schedules: list[Scheduled] = []
        self._lock = threading.Lock()

    def add(self, task: Any) -> None:
        """A task of any backend; a copy with other options is none of its own, and one that was reloaded replaces it.
        DuplicateTask where another function has its name or one of its aliases."""
        name = self.name_of(task)
        with self._lock:
            known = self.tasks.get(name)
            if known is not None and known.func is task.func:
                return
            wanted = {name, *getattr(task, "aliases", ())}
            for other_name, other in self.tasks.items():
                taken = wanted & {other_name, *getattr(other, "aliases", ())}
                if taken and place_of(other) != place_of(task):
                    raise DuplicateTask(f"two tasks are named {min(taken)!r}: give one of them name=…")
            self.tasks[name] = task
            self.number += 1

    @staticmethod
    def name_of(task: Any) -> str:
        """The name under which jobs of this task are stored."""
        given = getattr(task, "job_name", "")
        return given or f"{import_name(task.func.__module__)}.{task.func.__qualname__}"

    def add_schedule(self, scheduled: Scheduled) -> None:
        """A schedule; one of a task that was reloaded replaces it."""
        with self._lock:
            place = (self.name_of(scheduled.task), scheduled.options.get("name"))
            kept = [
                one
                for one in self.schedules
                if (self.name_of(one.task), one.options.get("name")) != place or one.task.func is scheduled.task.func
            ]
            self.schedules = [*kept, scheduled]
            self.number += 1


defined = Defined()


if TYPE_CHECKING:

    class PgQueueTask(Task[P, R]):
        options: Mapping[str, Any]
        job_name: str
        aliases: tuple[str, ...]

        def using(
            self,
            *,
            priority: int | None = None,
            queue_name: str | None = None,
            run_after: datetime | None = None,
            backend: str | None = None,
            **options: Any,
        ) -> PgQueueTask[P, R]: ...
        @property
        def pgqueue_task(self) -> QueueTask[..., R]: ...

else:

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True, init=False)
    class PgQueueTask(Task):
        """A task of Django's framework. `options`: what was said beyond the framework, see `pgqueue.task.TaskOptions`.

        `job_name`: the name under which its jobs are stored, instead of module and function. `aliases`: names that it had.
        `using` takes our options as well.
        """

        options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
        job_name: str = ""
        aliases: tuple[str, ...] = ()

        def __init__(
            self,
            *,
            options: Mapping[str, Any] | None = None,
            job_name: str = "",
            aliases: Sequence[str] = (),
            **more: Any,
        ) -> None:
            ours = {name: more.pop(name) for name in list(more) if name not in _OF_TASK}
            chosen = {**(options or {}), **ours}
            try:
                check_task_options(chosen)
                check_names(job_name, aliases)
            except ConfigurationError as error:
                raise InvalidTask(str(error)) from error
            for name, value in (("options", chosen), ("job_name", job_name), ("aliases", tuple(aliases))):
                object.__setattr__(self, name, value)
            Task.__init__(self, **more)  # not super(): with slots the class is made anew
            defined.add(self)

        def using(self, *, priority=None, queue_name=None, run_after=None, backend=None, **options):  # noqa: ANN001, ANN003, ANN201 - typed above
            """The same task with other options for the calls made on the copy."""
            try:
                TaskOptions().for_call({name: options[name] for name in ("retry", *OF_THE_TASK) if name in options})
            except ConfigurationError as error:
                raise InvalidTask(str(error)) from error
            given = {"priority": priority, "queue_name": queue_name, "run_after": run_after, "backend": backend}
            changes = {name: value for name, value in given.items() if value is not None}
            return dataclasses.replace(self, **changes, options={**self.options, **options})

        def __reduce__(self) -> tuple[Any, ...]:
            given = {
                field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "func"
            }
            return _unpickled, (type(self), self.module_path, given)

        @property
        def pgqueue_task(self) -> QueueTask[..., Any]:
            """The same as the queue of its backend knows it."""
            from pgqueue.contrib.django.queues import queue

            return queue(self.backend).tasks.find(defined.name_of(self))

    def _unpickled(kind: type[PgQueueTask], path: str, given: Mapping[str, Any]) -> PgQueueTask:
        """With the function of the task of this name: under its own name there is the task."""
        return kind(func=import_string(path).func, **given)

    _OF_TASK = frozenset(field.name for field in dataclasses.fields(Task))


@overload
def task(function: Callable[P, R], /) -> PgQueueTask[P, R]: ...
@overload
def task(
    *,
    name: str = "",
    aliases: Sequence[str] = (),
    priority: int = 0,
    queue_name: str = DEFAULT,
    backend: str = DEFAULT,
    takes_context: bool = False,
    **options: Any,
) -> Callable[[Callable[..., R]], PgQueueTask[..., R]]: ...
def task(
    function: Any = None,
    *,
    name: str = "",
    aliases: Sequence[str] = (),
    priority: int = 0,
    queue_name: str = DEFAULT,
    backend: str = DEFAULT,
    takes_context: bool = False,
    **options: Any,
) -> Any:
    """Define a task of Django's framework, with the options that the framework lacks; InvalidTask for what cannot be,
    DuplicateTask for a name that another function has.

    `priority`, `queue_name`, `backend`, `takes_context`: as for the decorator of Django. `name`: under which its jobs are
    stored, instead of its module and function; `aliases`: names that it had before. `options`: max_attempts, retry, timeout,
    keys and so on, see `pgqueue.task.TaskOptions`. On another backend our options mean nothing.
    """

    def wrapper(function: Any) -> Any:
        made: Any = PgQueueTask
        return made(
            func=function,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            run_after=None,
            job_name=name,
            aliases=aliases,
            options=options,
        )

    return wrapper if function is None else wrapper(function)


def schedule(
    cron: str | None = None,
    *,
    every: float | timedelta | None = None,
    tz: str | ZoneInfo = "UTC",
    name: str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    missed: str = "once",
    grace: float | timedelta = GRACE,
    overlap: bool = True,
) -> Callable[[TaskT], TaskT]:
    """Enqueue the task below by the clock, whichever decorator has made it; see `PgQueue.schedule`.

    Workers of the task's backend write it to the database when they start. ConfigurationError for what cannot be.
    """
    rhythm(cron, every=every, tz=tz, missed=missed, grace=grace, overlap=overlap)
    options = {"cron": cron, "every": every, "tz": tz, "name": name, "args": args, "kwargs": kwargs}
    options |= {"missed": missed, "grace": grace, "overlap": overlap}

    def register(task: TaskT) -> TaskT:
        if not isinstance(task, Task):
            raise ConfigurationError("schedule stands above the decorator of the task")
        defined.add(task)
        defined.add_schedule(Scheduled(task, options))
        return task

    return register

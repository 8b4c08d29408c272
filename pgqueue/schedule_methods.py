"""What both clients can do with schedules: a line a method, in their colour; and the decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from zoneinfo import ZoneInfo

from pgqueue.config import validate_name
from pgqueue.core import Core
from pgqueue.errors import ConfigurationError
from pgqueue.ops import Op
from pgqueue.ops import schedule as ops
from pgqueue.ops.schedule import Schedule
from pgqueue.rules import stored_json
from pgqueue.schedule import GRACE, Definition, check_changes, rhythm
from pgqueue.task import BaseTask, TaskOptions

T = TypeVar("T")
TaskT = TypeVar("TaskT", bound=BaseTask[..., Any])
_OF_THE_MOMENT = ("delay", "run_at", "channel", "prefix")


class Schedules(Core):
    """What needs no connection."""

    def schedule(
        self,
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
        """Enqueue the task below whenever `cron` names a time in the zone `tz`, or `every` so many seconds.

        `cron`: minute, hour, day of month, month, day of week, with the seconds before them where there are six fields.
        `name`: that of the task, unless given; a task may have any number of schedules. `args`, `kwargs`: of its jobs.
        `missed`: "skip", "once" or "all", for ticks that no worker could make within `grace` seconds. `overlap` False: no
        job while the last one lives. Workers write it to the database when they start. ConfigurationError,
        ArgumentsDoNotBind or PayloadError, here and now, for what cannot be.
        """
        timing = rhythm(cron, every=every, tz=tz, missed=missed, grace=grace, overlap=overlap)

        def register(task: TaskT) -> TaskT:
            if not isinstance(task, BaseTask):
                raise ConfigurationError("pq.schedule stands above pq.task: what it is given is not a task yet")
            job = self._job(task.name, task, task.defaults, args, kwargs or {})
            definition = Definition(name=task.name if name is None else name, rhythm=timing, job=job)
            known = self.code_schedules.get(definition.name)
            if known is not None and known != definition:
                raise ConfigurationError(f"two schedules are named {definition.name!r}: give one of them name=…")
            self.code_schedules[definition.name] = definition
            return task

        return register

    def _new(
        self, name: str, task: str | BaseTask[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **given: Any
    ) -> Definition:
        parts = ("cron", "every", "tz", "missed", "grace", "overlap")
        timing = rhythm(**{part: given.pop(part) for part in parts})
        known = task if isinstance(task, BaseTask) else self.tasks.get(task)
        options = (known.defaults if known is not None else TaskOptions()).for_call(given)
        # Not the old name of a renamed task.
        stored = known.name if known is not None else validate_name("task", str(task))
        return Definition(name=name, rhythm=timing, job=self._job(stored, known, options, args, kwargs))

    def _job(
        self,
        name: str,
        task: BaseTask[..., Any] | None,
        options: TaskOptions,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        if options.delay is not None or options.run_at is not None:
            raise ConfigurationError("a schedule says when its jobs run: leave out delay and run_at")
        if options.has_keys:
            raise ConfigurationError(
                f"task {name} has a key, and a tick makes jobs without keys: schedule a task that enqueues it"
            )
        if task is not None:
            task.check(args, kwargs)
        call = self.call(args, kwargs)
        retry_json = stored_json(options.retry) if task is None else self._retry_json(task, options)
        params = self.envelope(name, options, retry_json).params
        job = {part: value for part, value in params.items() if part not in _OF_THE_MOMENT}
        return {**job, "expires_in": options.expires_seconds, "args": call[0], "kwargs": call[1]}


class SyncSchedules(Schedules):
    """The methods of PgQueue."""

    if TYPE_CHECKING:

        def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T: ...

    def schedules(self) -> list[Schedule]:
        """Every schedule, those of the code and those made at run time."""
        return self.run(ops.schedules())

    def add_schedule(
        self,
        name: str,
        task: str | BaseTask[..., Any],
        cron: str | None = None,
        *,
        every: float | timedelta | None = None,
        tz: str | ZoneInfo = "UTC",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        missed: str = "once",
        grace: float | timedelta = GRACE,
        overlap: bool = True,
        using: Any = None,
        **options: Any,
    ) -> bool:
        """A schedule made at run time, for a task or its name; see `schedule`. `options` are those of the task's jobs.

        An existing one of that name becomes this one; False when it already is. ConfigurationError when it comes from code.
        """
        given = {
            "cron": cron,
            "every": every,
            "tz": tz,
            "missed": missed,
            "grace": grace,
            "overlap": overlap,
            **options,
        }
        definition = self._new(name, task, args, kwargs or {}, **given)
        return self.run(ops.add(definition, channel=self.channel), using)

    def change_schedule(self, name: str, *, using: Any = None, **changes: Any) -> None:
        """Another cron, every, tz, missed, grace or overlap; where it comes from code, until the code says something new."""
        self.run(ops.change(name, check_changes(changes), channel=self.channel), using, atomic=True)

    def remove_schedule(self, name: str, *, using: Any = None) -> None:
        """Delete one that was made at run time, or that no code has any more; jobs that it made stay."""
        self.run(ops.remove(name), using)

    def pause_schedule(self, name: str, *, using: Any = None) -> None:
        """No more ticks, on all workers, until it is resumed; jobs that it made stay."""
        self.run(ops.pause(name), using)

    def resume_schedule(self, name: str, *, using: Any = None) -> None:
        """Tick again from now on: the ticks of the pause do not come."""
        self.run(ops.resume(name, channel=self.channel), using)

    def run_schedule(self, name: str, *, using: Any = None) -> int | None:
        """Enqueue its job now, paused or not, and beside its ticks; returns the id.

        None when overlap is unwanted and the last job lives.
        """
        return self.run(ops.run(name, channel=self.channel), using, atomic=True)


class AsyncSchedules(Schedules):
    """The methods of AsyncPgQueue."""

    if TYPE_CHECKING:

        async def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T: ...

    async def schedules(self) -> list[Schedule]:
        """As PgQueue.schedules."""
        return await self.run(ops.schedules())

    async def add_schedule(
        self,
        name: str,
        task: str | BaseTask[..., Any],
        cron: str | None = None,
        *,
        every: float | timedelta | None = None,
        tz: str | ZoneInfo = "UTC",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        missed: str = "once",
        grace: float | timedelta = GRACE,
        overlap: bool = True,
        using: Any = None,
        **options: Any,
    ) -> bool:
        """As PgQueue.add_schedule."""
        given = {
            "cron": cron,
            "every": every,
            "tz": tz,
            "missed": missed,
            "grace": grace,
            "overlap": overlap,
            **options,
        }
        definition = self._new(name, task, args, kwargs or {}, **given)
        return await self.run(ops.add(definition, channel=self.channel), using)

    async def change_schedule(self, name: str, *, using: Any = None, **changes: Any) -> None:
        """As PgQueue.change_schedule."""
        await self.run(ops.change(name, check_changes(changes), channel=self.channel), using, atomic=True)

    async def remove_schedule(self, name: str, *, using: Any = None) -> None:
        """As PgQueue.remove_schedule."""
        await self.run(ops.remove(name), using)

    async def pause_schedule(self, name: str, *, using: Any = None) -> None:
        """As PgQueue.pause_schedule."""
        await self.run(ops.pause(name), using)

    async def resume_schedule(self, name: str, *, using: Any = None) -> None:
        """As PgQueue.resume_schedule."""
        await self.run(ops.resume(name, channel=self.channel), using)

    async def run_schedule(self, name: str, *, using: Any = None) -> int | None:
        """As PgQueue.run_schedule."""
        return await self.run(ops.run(name, channel=self.channel), using, atomic=True)

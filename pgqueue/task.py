"""Tasks: functions that can be enqueued, and the registry in which a worker looks their names up."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from pgqueue.config import shown, validate_count, validate_duration, validate_name, validate_priority, validate_seconds
from pgqueue.errors import ArgumentsDoNotBind, ConfigurationError, DuplicateTask, UnknownTask
from pgqueue.keys import CONFLICTS, CONTINUE, PARK, SKIP, Key, validate_key_option
from pgqueue.result import DEFAULT_KEEP
from pgqueue.retry import DEFAULT_MAX_ATTEMPTS, DEFAULT_POLICY, Policy
from pgqueue.rules import RetryRule, is_rule, stored_json

P = ParamSpec("P")
R = TypeVar("R")
RESERVED = "using"
THREAD, PROCESS = "thread", "process"
OF_THE_TASK = ("isolation", "memory_limit", "keep_result", "batch", "batch_wait", "payload")
MOST_BATCH = 1000
"""Jobs of one call: as many as a claim brings."""
LONGEST_WAIT = 3600.0
MOST_MEMORY = 2**62
LANE_KEYS = ("ordering_key", "concurrency_key", "fairness_key")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a job is enqueued with. Given at the decorator, changed for single calls with `task.options(…)`.

    `priority`: -100 to 100, higher runs first. `max_attempts`: the total number of runs. `delay`: seconds or a timedelta.
    `run_at`: an aware datetime. `timeout`: seconds after which an `async def` is cancelled and a plain function sees
    `current_job().cancelled`; a child process is killed then. `retry`: the policy for the time between attempts; for a task
    also ByException, or a function of the job and the exception. `headers`: a JSON object beside the arguments.
    `expires_in`: seconds or a timedelta from the enqueue, or from the due time of a job for later, after which it is not
    started any more.

    `ordering_key`: jobs of one key run one at a time, in the order in which they were enqueued; `on_dead="park"` stops the
    key when one of them is dead-lettered, until an operator decides. `concurrency_key`: at most `concurrency_limit` jobs of
    one key are in work at once, on all workers. `fairness_key`: jobs of different keys take turns. Each is text, or a
    function of the call's arguments that returns text, or None for no key; a job has one of the three at most.

    `unique_key`: at most one job of a key waits or runs in a queue; `on_conflict` says what a second one does: "skip" (its
    enqueue returns the id of the first), "replace", "merge", "merge_distinct", "supersede", "raise"; see docs/unique.md.
    `unique_for`: seconds or a timedelta in which no second one starts even if the first has ended. `delay_limit`: how long
    after its first enqueue a waiting job is due at the latest, however often it was replaced by a later one.

    Others belong to the task as the worker knows it, and not to single calls. `isolation`: "thread", or "process" for jobs
    that run in a child process, one at a time. `memory_limit`: bytes that a run in a child process may take beyond what
    the process had before. `keep_result`: keep what the function returns for so long (seconds or a timedelta; True means
    a day). `batch`: call the function with up to so many jobs at once (1 to 1000), a Batch; `batch_wait`: seconds or a
    timedelta, an hour at most, to wait for more after the first of them. `payload`: a callable whose signature the
    arguments of each job of a batch task are checked against. ConfigurationError names the option that is wrong.
    """

    queue: str = "default"
    priority: int = 0
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    retry: RetryRule = DEFAULT_POLICY
    timeout: float | None = None
    delay: float | timedelta | None = None
    run_at: datetime | None = None
    headers: Mapping[str, Any] | None = None
    expires_in: float | timedelta | None = None
    ordering_key: Key | None = None
    concurrency_key: Key | None = None
    concurrency_limit: int | None = None
    fairness_key: Key | None = None
    on_dead: str = CONTINUE
    unique_key: Key | None = None
    on_conflict: str = SKIP
    unique_for: float | timedelta | None = None
    delay_limit: float | timedelta | None = None
    isolation: str = THREAD
    memory_limit: int | None = None
    keep_result: bool | float | timedelta = False
    batch: int | None = None
    batch_wait: float | timedelta = 0.0
    payload: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        validate_name("queue", self.queue)
        validate_priority(self.priority)
        validate_count("max_attempts", self.max_attempts)
        if self.timeout is not None:
            validate_seconds("timeout", self.timeout, least=0.001)
        if not isinstance(self.retry, Policy) and not is_rule(self.retry):
            raise ConfigurationError(
                f"retry must be one of pgqueue's policies, such as Exponential(), or a function, not {self.retry!r}"
            )
        if self.delay is not None and self.run_at is not None:
            raise ConfigurationError("give delay or run_at, not both")
        if self.delay is not None:
            validate_seconds("delay", self.delay_seconds)
        if self.run_at is not None and (not isinstance(self.run_at, datetime) or self.run_at.utcoffset() is None):
            raise ConfigurationError(
                "run_at must be a datetime with a time zone: a naive one means another time elsewhere"
            )
        if self.headers is not None and not isinstance(self.headers, Mapping):
            raise ConfigurationError("headers must be a mapping")
        if self.expires_in is not None:
            validate_duration("expires_in", self.expires_in, least=0.001)
        self._check_isolation()
        self._check_batch()
        self._check_keys()
        self._check_unique()
        if self.keep_seconds is not None:
            validate_seconds("keep_result", self.keep_seconds, least=1)

    def _check_unique(self) -> None:
        validate_key_option("unique_key", self.unique_key)
        if self.on_conflict not in CONFLICTS:
            raise ConfigurationError(
                f"on_conflict must be one of {', '.join(CONFLICTS)}, not {shown(self.on_conflict)}"
            )
        for name in ("unique_for", "delay_limit"):
            given = getattr(self, name)
            if given is not None:
                validate_duration(name, given, least=0.001)
        if self.unique_key is None:
            for name, default in (("on_conflict", SKIP), ("unique_for", None), ("delay_limit", None)):
                if getattr(self, name) != default:
                    raise ConfigurationError(f"{name} needs a unique_key")

    def _check_keys(self) -> None:
        lanes = [name for name in LANE_KEYS if getattr(self, name) is not None]
        for name in lanes:
            validate_key_option(name, getattr(self, name))
        if len(lanes) > 1:
            raise ConfigurationError(
                f"give one of {', '.join(LANE_KEYS)}, not {' and '.join(lanes)}: a job stands in one line"
            )
        if self.concurrency_limit is not None:
            validate_count("concurrency_limit", self.concurrency_limit)
        if (self.concurrency_key is None) != (self.concurrency_limit is None):
            raise ConfigurationError("concurrency_key and concurrency_limit belong together: give both")
        if self.on_dead not in (CONTINUE, PARK):
            raise ConfigurationError(f'on_dead must be "{CONTINUE}" or "{PARK}", not {self.on_dead!r}')
        if self.on_dead == PARK and self.ordering_key is None:
            raise ConfigurationError(f'on_dead="{PARK}" stops a line of jobs: it needs an ordering_key')

    @property
    def has_keys(self) -> bool:
        """Whether its jobs may have keys."""
        return self.unique_key is not None or any(getattr(self, name) is not None for name in LANE_KEYS)

    def _check_isolation(self) -> None:
        if self.isolation not in (THREAD, PROCESS):
            raise ConfigurationError(f'isolation must be "{THREAD}" or "{PROCESS}", not {self.isolation!r}')
        if self.memory_limit is None:
            return
        validate_count("memory_limit", self.memory_limit, most=MOST_MEMORY)
        if self.isolation != PROCESS:
            raise ConfigurationError(
                f'memory_limit needs isolation="{PROCESS}": threads share the memory of their process'
            )

    def _check_batch(self) -> None:
        if self.batch is None:
            for name in ("batch_wait", "payload"):
                if getattr(self, name):
                    raise ConfigurationError(f"{name} belongs to a batch task: give batch=… too")
            return
        validate_count("batch", self.batch, most=MOST_BATCH)
        if not 0 <= self.wait_seconds <= LONGEST_WAIT:
            raise ConfigurationError(f"batch_wait must be between 0 seconds and an hour, not {shown(self.batch_wait)}")
        if self.payload is not None and not callable(self.payload):
            raise ConfigurationError(
                f"payload must be a callable, whose signature is that of a job, not {shown(self.payload)}"
            )

    @property
    def wait_seconds(self) -> float:
        """How long a batch waits for more after its first job, in seconds."""
        if isinstance(self.batch_wait, timedelta):
            return self.batch_wait.total_seconds()
        return validate_seconds("batch_wait", self.batch_wait)

    @property
    def batch_fill(self) -> int:
        """How many jobs a batch waits for: no more than a key that all of them share lets run at once."""
        most = self.batch or 1
        if isinstance(self.ordering_key, str):
            return 1
        if isinstance(self.concurrency_key, str) and self.concurrency_limit is not None:
            return min(most, self.concurrency_limit)
        return most

    @property
    def delay_seconds(self) -> float | None:
        """The delay in seconds, whichever way it was given."""
        return in_seconds(self.delay)

    @property
    def keep_seconds(self) -> float | None:
        """How long results are kept, in seconds; None where they are not."""
        if isinstance(self.keep_result, bool):
            return DEFAULT_KEEP if self.keep_result else None
        return in_seconds(self.keep_result)

    @property
    def expires_seconds(self) -> float | None:
        """The same for `expires_in`."""
        return in_seconds(self.expires_in)

    def changed(self, changes: Mapping[str, Any]) -> TaskOptions:
        """These options with `changes`; ConfigurationError names an unknown one and a near match."""
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
                raise ConfigurationError(f"unknown task option {name!r}{hint}")
        return dataclasses.replace(self, **changes)

    def for_call(self, changes: Mapping[str, Any]) -> TaskOptions:
        """The same for single calls; ConfigurationError for what belongs to the task and is not stored with a job."""
        for name in OF_THE_TASK:
            if name in changes:
                raise ConfigurationError(
                    f"{name} belongs to the task, not to a call: give it where the task is defined"
                )
        if is_rule(changes.get("retry")):
            raise ConfigurationError(
                "a policy per exception belongs to the task, not to a call: exceptions are classes of the worker's process"
            )
        return self.changed(changes)


def in_seconds(given: float | timedelta | None) -> float | None:
    """A duration in seconds, whichever way it was given."""
    return given.total_seconds() if isinstance(given, timedelta) else given


class BaseTask(Generic[P, R]):
    """A function with a name and options; calling it calls the function.

    `rule`: what decides about its failures here; None where that is the policy stored with the job.
    """

    chain: Any = None  # the middleware of its application
    using: Any = None  # a caller's connection, of a copy that was made for it

    def __init__(self, function: Callable[P, R], name: str, options: TaskOptions) -> None:
        self.function = function
        self.name = name
        self.defaults = options
        self.is_async = inspect.iscoroutinefunction(function)
        self.keeps = options.keep_seconds  # asked for at the end of every run
        self.envelope: Any = None  # what the client keeps of the last enqueue with these options
        self.rule = None if isinstance(options.retry, Policy) else options.retry
        self.retry_json = stored_json(options.retry)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(f"task {name} is a generator, so a call would run nothing: make it a function")
        self._signature = inspect.signature(function) if options.batch is None else _signature_of_jobs(self)
        if RESERVED in self._signature.parameters:
            raise ConfigurationError(
                f"task {name}: a parameter may not be called {RESERVED!r}, enqueue needs that word"
            )
        self._arity = _plain_arity(self._signature)
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now; nothing is enqueued."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on queue {self.defaults.queue!r}>"

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """ArgumentsDoNotBind unless the function can be called with these."""
        least, most = self._arity
        if not kwargs and least <= len(args) <= most:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentsDoNotBind(f"task {self.name}{self._signature}: {error}") from None


def _signature_of_jobs(task: BaseTask[..., Any]) -> inspect.Signature:
    """What the arguments of one job of a batch task are checked against; ConfigurationError when the function cannot be
    called with a batch."""
    handler = inspect.signature(task.function)
    try:
        handler.bind(())
    except TypeError:
        raise ConfigurationError(
            f"task {task.name}{handler}: a batch handler is called with one argument, the jobs of the batch"
        ) from None
    payload = task.defaults.payload
    if payload is None:
        return inspect.signature(_anything)
    try:
        return inspect.signature(payload)
    except (TypeError, ValueError):
        raise ConfigurationError(f"task {task.name}: payload {shown(payload)} has no signature to be read") from None


def _anything(*args: Any, **kwargs: Any) -> None: ...


def _plain_arity(signature: inspect.Signature) -> tuple[int, int]:
    """How many positional arguments bind for sure; an empty range where only `bind` can tell."""
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if not kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        return (1, 0)
    required = sum(parameter.default is inspect.Parameter.empty for parameter in signature.parameters.values())
    return (required, len(signature.parameters))


def split_call(call: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """One element of `enqueue_many`: a tuple or list of positional arguments, or a mapping of keywords."""
    if isinstance(call, (tuple, list)):
        return call, {}
    if isinstance(call, Mapping):
        return (), call
    raise ConfigurationError(
        f"enqueue_many takes tuples of positional arguments or mappings of keywords, not {type(call).__name__}"
    )


def task_name(function: Callable[..., Any]) -> str:
    """``module.qualname``; a script that runs as ``__main__`` gets the name under which a worker would import it."""
    return f"{import_name(function.__module__)}.{function.__qualname__}"


def import_name(module: str) -> str:
    """The name under which another process imports this module: what runs as ``__main__`` here has another one there."""
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec else Path(file).stem if file else "__main__"


class Registry(Mapping[str, BaseTask[..., Any]]):
    """Tasks by name, found also by their aliases. A worker runs nothing that is not in here: names from the database are
    looked up, never imported."""

    def __init__(self) -> None:
        self._tasks: dict[str, BaseTask[..., Any]] = {}
        self._aliases: dict[str, BaseTask[..., Any]] = {}

    def add(self, task: BaseTask[..., Any], aliases: Sequence[str] = ()) -> None:
        """Register, with the names that it had before; DuplicateTask when another function has one of these names (the same
        one again, after a reload, replaces it)."""
        if isinstance(aliases, str) or not isinstance(aliases, Sequence):
            raise ConfigurationError(f"aliases must be a list of names, not {shown(aliases)}")
        for name in (task.name, *aliases):
            validate_name("task", name)
            known = self.get(name)
            if known is not None and _place(known.function) != _place(task.function):
                raise DuplicateTask(f"two tasks are named {name!r}: give one of them name=…")
        if task.name in aliases:
            raise ConfigurationError(f"{task.name!r} is the name of the task: leave it out of its aliases")
        self._aliases = {name: other for name, other in self._aliases.items() if other.name != task.name}
        self._tasks[task.name] = task
        self._aliases.update(dict.fromkeys(aliases, task))

    def find(self, name: str) -> BaseTask[..., Any]:
        """The task of that name or alias; UnknownTask names near matches."""
        try:
            return self._tasks[name]
        except KeyError:
            if (renamed := self._aliases.get(name)) is not None:
                return renamed
            near = difflib.get_close_matches(name, self._tasks, n=3)
            hint = f"; similar: {', '.join(near)}" if near else ""
            raise UnknownTask(f"no task named {name!r} is registered{hint}") from None

    def queues(self) -> list[str]:
        """The queues that registered tasks use."""
        return sorted({task.defaults.queue for task in self._tasks.values()})

    def __getitem__(self, name: str) -> BaseTask[..., Any]:
        task = self._tasks.get(name)
        return self._aliases[name] if task is None else task

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


Calls = Iterable[Sequence[Any] | Mapping[str, Any]]

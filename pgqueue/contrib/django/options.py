"""What the setting TASKS says of the queue, read once and answered with a suggestion where it is wrong."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence, Set
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from pgqueue.config import Settings, load_settings, shown, validate_name
from pgqueue.errors import ConfigurationError
from pgqueue.task import TaskOptions

DEFAULT = "default"
_OF_SETTINGS = tuple(field.name for field in dataclasses.fields(Settings) if field.name != "database_url")
KNOWN = ("database", "defaults", *_OF_SETTINGS)
_OF_THE_FRAMEWORK = {"queue": "queue_name", "run_at": "run_after"}
_OF_EACH_TASK = ("queue_name", "priority", "backend", "takes_context")
_OF_BATCHES = ("batch", "batch_wait", "payload")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """OPTIONS of one backend. `database`: the alias, None for what the routers say. `defaults`: of its tasks. `settings`: of
    the queue."""

    database: str | None
    defaults: TaskOptions
    settings: Settings


def read(params: Mapping[str, Any]) -> BackendOptions:
    """What one entry of TASKS says; ConfigurationError names what is wrong and a near match."""
    given = params.get("OPTIONS", {})
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"OPTIONS must be a dict, not a {type(given).__name__}")
    for name in given:
        if name not in KNOWN:
            raise ConfigurationError(_unknown(str(name)))
    check_queues(params.get("QUEUES", []))
    database = given.get("database")
    if database is not None and not isinstance(database, str):
        raise ConfigurationError(f"OPTIONS['database'] must be an alias of DATABASES, not {database!r}")
    chosen = load_settings({name: value for name, value in given.items() if name in _OF_SETTINGS})
    return BackendOptions(
        database=database,
        defaults=_defaults(given.get("defaults", {})),
        # Where the database is, Django knows: a URL in the environment would lead workers elsewhere.
        settings=dataclasses.replace(chosen, database_url=None),
    )


def check_task_options(given: Mapping[str, Any], base: TaskOptions | None = None) -> TaskOptions:
    """`base` with these changes; ConfigurationError for what is unknown, wrong, or has another name in the framework."""
    for name, instead in _OF_THE_FRAMEWORK.items():
        if name in given:
            raise ConfigurationError(f"Django's task framework calls {name!r} {instead!r}")
    for name in _OF_EACH_TASK:
        if name in given:
            raise ConfigurationError(f"{name!r} belongs to each task, as in @task({name}=…)")
    if "run_after" in given:
        raise ConfigurationError("'run_after' belongs to a call, as in .using(run_after=…)")
    for name in _OF_BATCHES:
        if name in given:
            raise ConfigurationError(
                f"{name!r} is for batch handlers, which are tasks of the queue: @queue().task(batch=…)"
            )
    return (base or TaskOptions()).changed(given)


def check_queues(given: Any) -> None:
    """ConfigurationError unless QUEUES is a list of names that queues can have."""
    if isinstance(given, str) or not isinstance(given, (Sequence, Set)):
        raise ConfigurationError(f"QUEUES must be a list of names of queues, not {shown(given)}")
    try:
        for name in given:
            validate_name("queue", name)
    except ConfigurationError as error:
        raise ConfigurationError(f"QUEUES: {error}") from error


def check_names(name: str, aliases: Any) -> None:
    """ConfigurationError unless a task can have this name, "" for that of its function, and these aliases."""
    if isinstance(aliases, str) or not isinstance(aliases, Sequence):
        raise ConfigurationError(f"aliases must be a list of names, not {shown(aliases)}")
    for one in ([] if name == "" else [name]) + list(aliases):
        validate_name("task", one)
    if name and name in aliases:
        raise ConfigurationError(f"{name!r} is the name of the task: leave it out of its aliases")


def task_settings() -> Mapping[str, Mapping[str, Any]]:
    """The setting TASKS, empty where there is none."""
    found = getattr(settings, "TASKS", None)
    return found if isinstance(found, Mapping) else {}


def is_ours(params: Mapping[str, Any]) -> bool:
    """Whether an entry of TASKS names our backend, or a subclass of it."""
    path = str(params.get("BACKEND", "")) if isinstance(params, Mapping) else ""
    try:
        found = import_string(path)
    except Exception:
        if path.startswith(f"{__package__}."):
            raise  # such as: there is no task framework here
        return False  # whoever uses the entry is told
    return bool(getattr(found, "is_pgqueue", False))


def our_aliases() -> list[str]:
    """The entries of TASKS that are ours, "default" first."""
    found = [alias for alias, params in task_settings().items() if is_ours(params)]
    return sorted(found, key=lambda alias: alias != DEFAULT)


def _defaults(given: Any) -> TaskOptions:
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"OPTIONS['defaults'] must be a dict of task options, not {given!r}")
    try:
        return check_task_options(given, TaskOptions(keep_result=True))
    except ConfigurationError as error:
        raise ConfigurationError(f"OPTIONS['defaults']: {error}") from error


def _unknown(name: str) -> str:
    if name.lower() in ("database_url", "dsn", "url"):
        return f"unknown option {name!r}: the database is one of DATABASES, give its alias as 'database'"
    near = difflib.get_close_matches(name.lower(), KNOWN, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KNOWN)}"
    in_defaults = [field.name for field in dataclasses.fields(TaskOptions)]
    if not near and (close := difflib.get_close_matches(name.lower(), in_defaults, n=1)):
        hint = f"options of tasks stand in 'defaults', such as {{'defaults': {{{close[0]!r}: …}}}}"
    return f"unknown option {name!r}: {hint}"

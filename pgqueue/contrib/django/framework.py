"""Django's task framework, whichever package holds it: django.tasks from 6.0 on, the backport django-tasks before it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import django
from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING:
    from django.dispatch import Signal
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist

    task_enqueued: Signal
    task_started: Signal
    task_finished: Signal

    def normalize_json(value: Any, /) -> Any: ...

else:
    PACKAGE = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    try:
        _root = import_module(PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise ImproperlyConfigured(
            "Django has its task framework from 6.0 on: before it, run `pip install django-tasks`"
        ) from error
    _base, _errors = import_module(f"{PACKAGE}.base"), import_module(f"{PACKAGE}.exceptions")
    _signals = import_module(f"{PACKAGE}.signals")
    BaseTaskBackend = import_module(f"{PACKAGE}.backends.base").BaseTaskBackend
    Task, TaskContext, TaskError = _base.Task, _base.TaskContext, _base.TaskError
    TaskResult, TaskResultStatus = _base.TaskResult, _base.TaskResultStatus
    InvalidTask = getattr(_errors, "InvalidTask", None) or _errors.InvalidTaskError
    TaskResultDoesNotExist = _errors.TaskResultDoesNotExist
    task_backends = _root.task_backends
    task_enqueued, task_started = _signals.task_enqueued, _signals.task_started
    task_finished = _signals.task_finished
    normalize_json = _base.normalize_json

__all__ = [
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "normalize_json",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]

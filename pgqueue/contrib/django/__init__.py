"""pgqueue in a Django application, see docs/django.md.

`PgQueueBackend` is the backend for the setting TASKS; `task` the decorator with the options that Django's task framework
lacks; `schedule` makes a task run by the clock; `queue` is the PgQueue behind a backend; `TaskResultDoesNotExist` is the
framework's, from whichever package holds it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.contrib.django.backend import PgQueueBackend
    from pgqueue.contrib.django.framework import TaskResultDoesNotExist
    from pgqueue.contrib.django.framework_task import PgQueueTask, schedule, task
    from pgqueue.contrib.django.queues import DjangoQueue, queue

__all__ = ["DjangoQueue", "PgQueueBackend", "PgQueueTask", "TaskResultDoesNotExist", "queue", "schedule", "task"]

# Imported at first use: Django imports this module before its registry of applications is filled.
_HOMES = {
    "DjangoQueue": "queues",
    "PgQueueBackend": "backend",
    "PgQueueTask": "framework_task",
    "TaskResultDoesNotExist": "framework",
    "queue": "queues",
    "schedule": "framework_task",
    "task": "framework_task",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

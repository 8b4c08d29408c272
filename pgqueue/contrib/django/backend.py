"""The backend for Django's task framework."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from django.utils import timezone

from pgqueue.contrib.django import checks, options
from pgqueue.contrib.django.framework import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)
from pgqueue.contrib.django.framework_task import PgQueueTask
from pgqueue.contrib.django.queues import DjangoQueue, queue
from pgqueue.contrib.django.results import result_of
from pgqueue.errors import ConfigurationError

P = ParamSpec("P")
R = TypeVar("R")


class PgQueueBackend(BaseTaskBackend):
    """Jobs in PostgreSQL, enqueued by the transaction that the application is in.

    OPTIONS: `database` (an alias of DATABASES; else what the routers say), `defaults` (options of tasks that do not say
    otherwise), and every setting of the queue but its URL: `schema`, `archive_days`, `notify` and so on.
    """

    is_pgqueue = True
    task_class = PgQueueTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        try:
            options.check_queues(params.get("QUEUES", []))
        except ConfigurationError:
            super().__init__(alias, {**params, "QUEUES": []})  # the system check says it
        else:
            super().__init__(alias, params)
        self._params = params

    @property
    def queue(self) -> DjangoQueue:
        """The PgQueue behind it, the same for all threads."""
        return queue(self.alias)

    def validate_task(self, task: Task[..., Any]) -> None:
        """InvalidTask for what cannot be run."""
        super().validate_task(task)
        if inspect.isgeneratorfunction(task.func) or inspect.isasyncgenfunction(task.func):
            raise InvalidTask("Task function is a generator: calling it would run nothing.")

    def enqueue(self, task: Task[P, R], args: Any, kwargs: Any) -> TaskResult[P, R]:
        """Enqueue a job, which exists once the transaction of the application commits, and never if it does not.

        TypeError and ValueError (PayloadError) for arguments that are not JSON, ArgumentsDoNotBind for those that the
        function does not take: before anything is sent. A call that makes no job of its own has the result of the first.
        """
        self.validate_task(task)
        positional: list[Any] = normalize_json(list(args))
        keywords: Mapping[str, Any] = normalize_json(dict(kwargs))
        job_id, is_new = self.queue.enqueue_task(task, positional, keywords)
        if not is_new:
            with suppress(TaskResultDoesNotExist):  # it has ended meanwhile, and nothing is kept of it
                first: Any = result_of(self.queue, str(job_id))
                return first  # type: ignore[no-any-return]
        result: TaskResult[P, R] = TaskResult(
            task=task,
            id=str(job_id),
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=positional,
            kwargs=dict(keywords),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        if is_new:
            task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """The result of a job; TaskResultDoesNotExist where nothing is known of it (any more)."""
        return result_of(self.queue, result_id)

    def check(self, **_kwargs: Any) -> list[Any]:
        """What is wrong with the settings."""
        return checks.settings_of(self.alias, self._params)

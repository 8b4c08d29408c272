"""From a job, wherever it lies, to the TaskResult of Django's framework."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pgqueue.contrib.django.framework import (
    InvalidTask,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
)
from pgqueue.contrib.django.running import UNKNOWN_WORKER, FrameworkTask
from pgqueue.contrib.django.times import as_django, claimed_at
from pgqueue.job import JobState
from pgqueue.ops.result import WholeJob, whole_job
from pgqueue.payload import decode_args, decode_kwargs

if TYPE_CHECKING:
    from pgqueue.contrib.django.queues import DjangoQueue

_WAITING = (JobState.READY, JobState.SCHEDULED, JobState.BLOCKED)
_LARGEST_ID = 2**63 - 1


class WorkerLost(Exception):
    """Stands in a result for the errors of attempts whose worker was lost; it is never raised."""


def result_of(app: DjangoQueue, result_id: str) -> TaskResult[..., Any]:
    """The result of that job; TaskResultDoesNotExist where nothing is known of it, or not the task."""
    job_id = int(result_id) if str(result_id).isascii() and str(result_id).isdecimal() else 0
    found = app.run(whole_job(job_id)) if 0 < job_id <= _LARGEST_ID else None
    if found is None:
        raise TaskResultDoesNotExist(result_id)
    task = app.tasks.get(found.task)
    if not isinstance(task, FrameworkTask):
        raise TaskResultDoesNotExist(f"{result_id} is of task {found.task!r}, which this process does not know")
    return _result(app, task, found)


def _result(app: DjangoQueue, task: FrameworkTask, job: WholeJob) -> TaskResult[..., Any]:
    status = _status(job.state)
    errors = list(_errors(job.errors_json))
    started, last = _began(job, [at for at, _ in errors])
    result: TaskResult[..., Any] = TaskResult(
        task=_as_enqueued(task.django_task, job),
        id=str(job.id),
        status=status,
        enqueued_at=as_django(job.created_at),
        started_at=as_django(started),
        last_attempted_at=as_django(last),
        finished_at=as_django(job.finished_at),
        args=decode_args(job.args_json),
        kwargs=decode_kwargs(job.kwargs_json),
        backend=app.alias,
        errors=[error for _, error in errors],
        worker_ids=_workers(job),
    )
    if status is TaskResultStatus.SUCCESSFUL and job.value_json is not None:
        object.__setattr__(result, "_return_value", decode_args(f"[{job.value_json}]")[0])
    return result


def _status(state: str) -> TaskResultStatus:
    if state in _WAITING:
        return TaskResultStatus.READY
    if state == JobState.RUNNING:
        return TaskResultStatus.RUNNING
    return TaskResultStatus.SUCCESSFUL if state == JobState.COMPLETED else TaskResultStatus.FAILED


def _began(job: WholeJob, failures: Iterable[datetime | None]) -> tuple[datetime | None, datetime | None]:
    """When the first and the last attempt began. The queue keeps that of a running one; for those that are over, what is
    known is when they had ended at the latest."""
    ends = [at for at in failures if at is not None]
    if job.attempt == 0 and not ends:
        return None, None
    last = claimed_at(job.token) if job.token is not None else job.finished_at or (ends[-1] if ends else job.created_at)
    first = last if job.attempt == 1 or not ends else ends[0]
    return first, last


def _errors(text: str | None) -> Iterator[tuple[datetime | None, TaskError]]:
    try:
        entries = json.loads(text or "[]")
    except ValueError:
        return
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        kind, message = str(entry.get("type") or "unknown"), str(entry.get("message") or "")
        trace = str(entry.get("traceback") or (f"{kind}: {message}" if message else kind))
        at = None
        with suppress(ValueError, TypeError):
            at = datetime.fromisoformat(entry["at"]) if "at" in entry else None
        yield at, TaskError(exception_class_path=_class_path(kind), traceback=f"{trace}\n")


def _class_path(kind: str) -> str:
    if kind == WorkerLost.__name__:
        return f"{WorkerLost.__module__}.{WorkerLost.__qualname__}"
    return kind if "." in kind else f"builtins.{kind}"


def _workers(job: WholeJob) -> list[str]:
    if job.attempt <= 0:
        return []
    return [*([UNKNOWN_WORKER] * (job.attempt - 1)), job.worker or UNKNOWN_WORKER]


def _as_enqueued(task: Any, job: WholeJob) -> Any:
    """The task as it was for this job, as far as the queue has kept it."""
    changes: dict[str, Any] = {}
    if task.queue_name != job.queue:
        changes["queue_name"] = job.queue
    if task.priority != job.priority:
        changes["priority"] = job.priority
    if job.run_at is not None and job.attempt == 0:
        changes["run_after"] = as_django(job.run_at)
    with suppress(InvalidTask):  # a queue that the settings do not name any more
        return task.using(**changes) if changes else task
    return task

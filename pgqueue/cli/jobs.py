"""pgqueue jobs and pgqueue cancel."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import UsageMistake
from pgqueue.cli.options import AsJson, Limit, Place, QueueName, TaskName, placed
from pgqueue.cli.output import decoded, note_hidden, without, write_json, write_table
from pgqueue.ops import result as result_ops
from pgqueue.ops.status import LiveJob
from pgqueue.result import Progress

Ids = Annotated[list[int], typer.Argument(metavar="ID", min=1, help="Ids of jobs.")]


class State(enum.StrEnum):
    """The states of live jobs."""

    READY = "ready"
    SCHEDULED = "scheduled"
    BLOCKED = "blocked"
    RUNNING = "running"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("jobs")(jobs)
    app.command("cancel")(cancel)


@placed
def jobs(
    place: Place,
    queue_name: QueueName = None,
    task: TaskName = None,
    state: Annotated[
        State | None, typer.Option("--state", metavar="STATE", help="Only ready, scheduled, blocked or running jobs.")
    ] = None,
    ids: Annotated[list[int] | None, typer.Option("--id", metavar="ID", help="Only this job; may be repeated.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
    with_args: Annotated[bool, typer.Option("--args", help="Include the arguments; with --json only.")] = False,
) -> int:
    """Show live jobs, oldest first. The arguments are left out unless asked for."""
    if with_args and not as_json:
        raise UsageMistake("--args needs --json")
    with queue(place) as pq:
        check_queue(pq, queue_name)
        found = pq.jobs(queue=queue_name, task=task, state=state, ids=ids or None, limit=limit)
        said = pq.run(result_ops.progress([job.id for job in found if job.state == State.RUNNING]))
    note_hidden(found)
    if as_json:
        write_json(_shown(job, said.get(job.id), with_args) for job in found)
        return 0
    write_table(
        ["id", "queue", "task", "state", "priority", "attempt", "lost", "due", "created", "progress", "last error"],
        [_row(job, said.get(job.id)) for job in found],
    )
    return 0


@placed
def cancel(place: Place, ids: Ids, as_json: AsJson = False) -> int:
    """Cancel live jobs: what waits ends at once, what runs is asked to stop. Exit status 1 if one is not live."""
    with queue(place) as pq:
        answer = pq.cancel(dict.fromkeys(ids))
    results = [(job_id, answer.get(job_id, "not live")) for job_id in dict.fromkeys(ids)]
    if as_json:
        write_json({"id": job_id, "result": result} for job_id, result in results)
    else:
        write_table(["id", "result"], results)
    return int(len(answer) < len(results))


def _row(job: LiveJob, said: Progress | None) -> tuple[Any, ...]:
    state = f"{job.state}, cancelling" if job.cancel_requested else job.state
    attempt = f"{job.attempt}/{job.max_attempts}"
    return (
        *(job.id, job.queue, job.task, state, job.priority, attempt, job.lost),
        *(job.run_at, job.created_at, _progress(said), _last_error(job)),
    )


def _progress(said: Progress | None) -> str | None:
    if said is None:
        return None
    percent = "" if said.percent is None else f"{said.percent:g} %"
    return f"{percent} {said.message}".strip()


def _shown(job: LiveJob, said: Progress | None, with_args: bool) -> Any:
    more: dict[str, Any] = {"errors": decoded(job.errors_json) or []}
    more["progress"] = None if said is None else dataclasses.asdict(said)
    if with_args:
        more |= {"args": decoded(job.args_json) or [], "kwargs": decoded(job.kwargs_json) or {}}
    return without(job, "args_json", "kwargs_json", "errors_json", "hidden", **more)


def _last_error(job: LiveJob) -> str | None:
    errors = decoded(job.errors_json)
    if not isinstance(errors, list) or not errors or not isinstance(errors[-1], dict):
        return None
    last = errors[-1]
    return ": ".join(str(last[key]) for key in ("type", "message") if last.get(key))

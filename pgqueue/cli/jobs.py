"""pgqueue jobs and pgqueue cancel."""

from __future__ import annotations

import dataclasses
import enum
from typing import Annotated, Any

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.options import AsJson, Limit, Place, QueueName, TaskName, Yes, placed
from pgqueue.cli.output import decoded, note_hidden, without, write, write_json, write_table
from pgqueue.cli.questions import confirm
from pgqueue.ops import result as result_ops
from pgqueue.ops.cancel import LiveSelection
from pgqueue.ops.status import LiveJob
from pgqueue.result import Progress

Ids = Annotated[list[int], typer.Argument(metavar="ID", min=1, help="Ids of jobs.")]
SomeIds = Annotated[list[int] | None, typer.Argument(metavar="ID", min=1, help="Ids of jobs.")]


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
        [
            *("id", "queue", "task", "state", "priority", "attempt", "lost", "due", "created", "key"),
            *("progress", "last error"),
        ],
        [_row(job, said.get(job.id)) for job in found],
    )
    return 0


@placed
def cancel(
    place: Place,
    ids: SomeIds = None,
    queue_name: QueueName = None,
    task: TaskName = None,
    ordering_key: Annotated[
        str | None, typer.Option("--ordering-key", metavar="KEY", help="Only jobs of this ordering key.")
    ] = None,
    concurrency_key: Annotated[
        str | None, typer.Option("--concurrency-key", metavar="KEY", help="Only jobs of this concurrency key.")
    ] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", metavar="KEY", help="Only the job of this unique key.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All live jobs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print how many wait and how many run.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> int:
    """Cancel live jobs: what waits ends at once, what runs is asked to stop.

    By id, with exit status 1 if one is not live; or all jobs of a queue, a task and a key.
    """
    keys = {"ordering_key": ordering_key, "concurrency_key": concurrency_key, "unique_key": unique_key}
    selection = {"queue": queue_name, "task": task, **keys}
    if ids:
        if everything or dry_run or any(value is not None for value in selection.values()):
            raise UsageMistake("give ids alone, or --queue, --task, keys or --all without ids")
        return _cancel_ids(place, ids, as_json)
    if not everything and all(value is None for value in selection.values()):
        raise UsageMistake(
            "which jobs? give ids, --queue, --task, --ordering-key, --concurrency-key, --unique-key or --all"
        )
    with usage():
        LiveSelection(**selection, everything=everything)
    return _cancel_all(place, {**selection, "everything": everything}, dry_run=dry_run, yes=yes, as_json=as_json)


def _cancel_ids(place: Place, ids: list[int], as_json: bool) -> int:
    with queue(place) as pq:
        answer = pq.cancel(dict.fromkeys(ids))
    results = [(job_id, answer.get(job_id, "not live")) for job_id in dict.fromkeys(ids)]
    if as_json:
        write_json({"id": job_id, "result": result} for job_id, result in results)
    else:
        write_table(["id", "result"], results)
    return int(len(answer) < len(results))


def _cancel_all(place: Place, selection: dict[str, Any], *, dry_run: bool, yes: bool, as_json: bool) -> int:
    with queue(place) as pq:
        check_queue(pq, selection["queue"])
        found = pq.count_live(**selection)
        if dry_run:
            say = f"{found.waiting} job(s) wait, {found.running} run"
            if as_json:
                write_json([found._asdict()])
            else:
                write(say)
            return 0
        if any(found):
            confirm(
                f"this would cancel {found.waiting} waiting job(s) and ask {found.running} running one(s) to stop", yes
            )
        done = pq.cancel_all(**selection)
    if as_json:
        write_json([done._asdict()])
    else:
        write(f"{done.cancelled} job(s) cancelled, {done.requested} running one(s) asked to stop")
    return 0


def _row(job: LiveJob, said: Progress | None) -> tuple[Any, ...]:
    state = f"{job.state}, cancelling" if job.cancel_requested else job.state
    attempt = f"{job.attempt}/{job.max_attempts}"
    return (
        *(job.id, job.queue, job.task, state, job.priority, attempt, job.lost),
        *(job.run_at, job.created_at, job.unique_key, _progress(said), _last_error(job)),
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

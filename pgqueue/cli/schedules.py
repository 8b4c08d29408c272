"""pgqueue schedules: list, add, change, pause, resume, run, remove."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from pgqueue.cli.application import application, known_app
from pgqueue.cli.database import queue
from pgqueue.cli.enqueue import parsed
from pgqueue.cli.errors import Refused, UsageMistake, usage
from pgqueue.cli.options import AppName, AsJson, Place, placed
from pgqueue.cli.output import write, write_json, write_table
from pgqueue.client import PgQueue
from pgqueue.config import validate_name
from pgqueue.errors import PayloadError
from pgqueue.failure import one_line
from pgqueue.ops.schedule import Schedule
from pgqueue.schedule import GRACE, rhythm
from pgqueue.task import TaskOptions

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the schedule.")]
Cron = Annotated[
    str | None,
    typer.Option("--cron", metavar="TEXT", help="Five fields, or six with the seconds first: '0 3 * * *'."),
]
Every = Annotated[float | None, typer.Option("--every", metavar="S", help="Seconds between ticks, instead of --cron.")]
Zone = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="The time zone of --cron; else UTC.")]
Missed = Annotated[
    str | None,
    typer.Option("--missed", metavar="POLICY", help="skip, once or all: for ticks that nobody could make in time."),
]
Grace = Annotated[
    float | None, typer.Option("--grace", metavar="S", help=f"Seconds after which a tick is missed; else {GRACE:g}.")
]
Overlap = Annotated[
    bool | None,
    typer.Option("--overlap/--no-overlap", help="With --no-overlap no job is made while the last one lives."),
]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What is enqueued at its times.")
    group.command("list")(list_)
    for command in (add, change, pause, resume, run, remove):
        group.command(command.__name__)(command)
    app.add_typer(group, name="schedules")


@placed
def list_(place: Place, as_json: AsJson = False) -> int:
    """Show all schedules."""
    with queue(place) as pq:
        found = pq.schedules()
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["name", "task", "queue", "when", "state", "next", "last", "job"],
        [(s.name, s.task, s.queue, _when(s), s.state, s.next_at, s.last_at, s.last_job_id) for s in found],
    )
    return 0


@placed
def add(
    place: Place,
    name: Name,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The name of the task.")],
    cron: Cron = None,
    every: Every = None,
    tz: Zone = None,
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="A list: the positional arguments.")] = "[]",
    kwargs: Annotated[str, typer.Option("--kwargs", metavar="JSON", help="An object: the keywords.")] = "{}",
    queue_name: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Not the task's own queue.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="-100 to 100, higher first.")] = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", metavar="N", help="Runs in all.")] = None,
    missed: Missed = None,
    grace: Grace = None,
    overlap: Overlap = None,
    app: AppName = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Without the application: task and arguments are not checked.")
    ] = False,
) -> int:
    """Make a schedule, or make the one of that name anew."""
    timing = _given(cron=cron, every=every, tz=tz, missed=missed, grace=grace, overlap=overlap)
    options = _given(queue=queue_name, priority=priority, max_attempts=max_attempts)
    call = (parsed("--args", args, list, "list"), parsed("--kwargs", kwargs, dict, "object"))
    with usage():
        validate_name("schedule", name)
        validate_name("task", task)
        rhythm(**timing)
        TaskOptions().changed(options)
    chosen = known_app(app)
    if not chosen and not unchecked:
        raise UsageMistake("give --app module:attribute, so that task and arguments can be checked, or --unchecked")
    try:
        if unchecked or not chosen:
            with queue(place) as pq:
                new = pq.add_schedule(name, task, args=call[0], kwargs=call[1], **timing, **options)
        else:
            new = _checked(place, chosen, name, task, call, {**timing, **options})
    except PayloadError as error:
        raise UsageMistake(f"--{error}") from None
    write(f"schedule {one_line(name)} {'is made' if new else 'is there already'}")
    return 0


@placed
def change(
    place: Place,
    name: Name,
    cron: Cron = None,
    every: Every = None,
    tz: Zone = None,
    missed: Missed = None,
    grace: Grace = None,
    overlap: Overlap = None,
) -> int:
    """Change when a schedule ticks. One of the code keeps it until the code says something new."""
    changes = _given(cron=cron, every=every, tz=tz, missed=missed, grace=grace, overlap=overlap)
    if not changes:
        raise UsageMistake("change what? give --cron, --every, --tz, --missed, --grace or --no-overlap")
    with queue(place) as pq, usage():
        pq.change_schedule(name, **changes)
    write(f"schedule {one_line(name)} is changed")
    return 0


@placed
def pause(place: Place, name: Name) -> int:
    """Stop a schedule on all workers; jobs that it made stay."""
    with queue(place) as pq:
        pq.pause_schedule(name)
    write(f"schedule {one_line(name)} is paused")
    return 0


@placed
def resume(place: Place, name: Name) -> int:
    """Let a schedule tick again, from now on."""
    with queue(place) as pq:
        pq.resume_schedule(name)
    write(f"schedule {one_line(name)} is not paused")
    return 0


@placed
def run(place: Place, name: Name) -> int:
    """Enqueue the job of a schedule now, beside its ticks, and print its id."""
    with queue(place) as pq:
        job_id = pq.run_schedule(name)
    if job_id is None:
        raise Refused(f"schedule {name!r} makes no job while its last one lives: nothing was enqueued")
    write(str(job_id))
    return 0


@placed
def remove(place: Place, name: Name) -> int:
    """Delete a schedule that no live worker has in its code; jobs that it made stay."""
    with queue(place) as pq:
        pq.remove_schedule(name)
    write(f"schedule {one_line(name)} is removed")
    return 0


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _checked(
    place: Place, app: str, name: str, task: str, call: tuple[list[Any], dict[str, Any]], given: dict[str, Any]
) -> bool:
    """By an application of either colour."""
    with application(place, app) as core:
        known = core.tasks.find(task)
        with PgQueue(**dataclasses.asdict(core.settings)) as pq:
            pq.tasks.add(known)
            return pq.add_schedule(name, known, args=call[0], kwargs=call[1], **given)


def _when(schedule: Schedule) -> str:
    if schedule.every is not None:
        return f"every {schedule.every:g} s"
    return f"{schedule.cron} {schedule.tz}"

"""pgqueue pause, pgqueue resume and pgqueue ageing."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.options import Place, placed
from pgqueue.cli.output import cell, write
from pgqueue.config import validate_name
from pgqueue.failure import one_line
from pgqueue.ops.ageing import LEAST
from pgqueue.retry import seconds as in_seconds

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of the queue.")]
OneTask = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only the jobs of this task.")]
Force = Annotated[bool, typer.Option("--force", help="Also a queue that nobody has used yet.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("pause")(pause)
    app.command("resume")(resume)
    app.command("ageing")(ageing)


@placed
def pause(
    place: Place,
    name: Name,
    task: OneTask = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", help="The pause ends by itself after so many seconds.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="The pause ends by itself then: 2030-01-31T18:00+00:00."),
    ] = None,
    force: Force = False,
) -> int:
    """Stop claims from a queue, or of one task of it, on all workers; what runs goes on."""
    with usage():
        validate_name("queue", name)
        if task is not None:
            validate_name("task", task)
        if seconds is not None:
            in_seconds("--seconds", seconds)
    end = None if until is None else _time(until)
    if end is not None and seconds is not None:
        raise UsageMistake("give --seconds or --until, not both")
    with queue(place) as pq:
        if not force:
            check_queue(pq, name, advice="; --force pauses it before its first use")
        pq.pause(name, task=task, seconds=seconds, until=end)
    term = f" until {cell(end)}" if end is not None else "" if seconds is None else f" for {seconds:g} s"
    write(f"{_what(name, task)} is paused{term}")
    return 0


@placed
def resume(place: Place, name: Name, task: OneTask = None) -> int:
    """Let claims from a queue, or of one task of it, go on."""
    with queue(place) as pq:
        check_queue(pq, name)
        pq.resume(name, task=task)
    write(f"{_what(name, task)} is not paused")
    return 0


@placed
def ageing(
    place: Place,
    name: Name,
    seconds: Annotated[float, typer.Argument(metavar="SECONDS", help="In line for one step of priority; 0: never.")],
    force: Force = False,
) -> int:
    """Let jobs that wait move up by one priority every so many seconds, up to the highest that is in line."""
    with usage():
        validate_name("queue", name)
        in_seconds("SECONDS", seconds)
        if 0 < seconds < LEAST:
            raise UsageMistake(f"SECONDS must be 0, or at least {LEAST:g}")
    with queue(place) as pq:
        if not force:
            check_queue(pq, name, advice="; --force sets it before its first use")
        pq.set_queue(name, ageing=seconds or None)
    term = f"move up by one priority every {seconds:g} s" if seconds else "keep their priority"
    write(f"jobs that wait in queue {one_line(name)} {term}")
    return 0


def _what(name: str, task: str | None) -> str:
    return f"queue {one_line(name)}" if task is None else f"task {one_line(task)} of queue {one_line(name)}"


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise UsageMistake("--until must be a time such as 2030-01-31T18:00+00:00") from None
    if time.utcoffset() is None:
        raise UsageMistake("--until must end in a time zone, such as Z or +02:00")
    return time

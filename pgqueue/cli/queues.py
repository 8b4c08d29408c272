"""pgqueue pause and pgqueue resume."""

from __future__ import annotations

from typing import Annotated

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import usage
from pgqueue.cli.options import Place, placed
from pgqueue.cli.output import write
from pgqueue.config import validate_name
from pgqueue.failure import one_line

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of the queue.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("pause")(pause)
    app.command("resume")(resume)


@placed
def pause(
    place: Place,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Also a queue that nobody has used yet.")] = False,
) -> int:
    """Stop claims from a queue on all workers; what runs goes on."""
    with usage():
        validate_name("queue", name)
    with queue(place) as pq:
        if not force:
            check_queue(pq, name, advice="; --force pauses it before its first use")
        pq.pause(name)
    write(f"queue {one_line(name)} is paused")
    return 0


@placed
def resume(place: Place, name: Name) -> int:
    """Let claims from a queue go on."""
    with queue(place) as pq:
        check_queue(pq, name)
        pq.resume(name)
    write(f"queue {one_line(name)} is not paused")
    return 0

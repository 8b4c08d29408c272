"""pgqueue lanes, unpark and limit-key."""

from __future__ import annotations

from typing import Annotated

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import usage
from pgqueue.cli.options import AsJson, Limit, Place, placed
from pgqueue.cli.output import write, write_json, write_table
from pgqueue.config import validate_name
from pgqueue.failure import one_line

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The name of the queue.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key, as it was given where the jobs were enqueued.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("lanes")(lanes)
    app.command("unpark")(unpark)
    app.command("limit-key")(limit_key)


@placed
def lanes(place: Place, name: Name, limit: Limit = 50, as_json: AsJson = False) -> int:
    """Show the keys of a queue: how many jobs are admitted and how many wait, and which are parked."""
    with usage():
        validate_name("queue", name)
    with queue(place) as pq:
        check_queue(pq, name)
        found = pq.lanes(name, limit=limit)
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["kind", "key", "admitted", "blocked", "limit", "parked since", "by dead letter"],
        [(row.kind, row.key, row.admitted, row.blocked, row.width, row.parked_at, row.parked_by) for row in found],
    )
    return 0


@placed
def unpark(place: Place, name: Name, key: Key) -> int:
    """Let the jobs of a parked ordering key go on. Exit status 1 if it is not parked."""
    with usage():
        validate_name("queue", name)
    with queue(place) as pq:
        resumed = pq.unpark(name, key)
    write(f"ordering key {one_line(key)} of queue {one_line(name)} {'goes on' if resumed else 'is not parked'}")
    return 0 if resumed else 1


@placed
def limit_key(
    place: Place,
    name: Name,
    key: Key,
    number: Annotated[
        int,
        typer.Argument(metavar="LIMIT", min=0, help="Jobs at once, on all workers; 0: what the jobs themselves say."),
    ],
) -> int:
    """Say how many jobs of one concurrency key may be in work at once, from now on."""
    with usage():
        validate_name("queue", name)
    with queue(place) as pq, usage():
        pq.limit_key(name, key, number or None)
    said = f"is limited to {number}" if number else "has the limit that its jobs say"
    write(f"concurrency key {one_line(key)} of queue {one_line(name)} {said}")
    return 0

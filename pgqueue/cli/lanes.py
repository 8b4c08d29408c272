"""pgqueue lanes, unpark and limit-key."""

from __future__ import annotations

from typing import Annotated

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.limits import Burst, Per, Rate, pace
from pgqueue.cli.options import AsJson, Limit, Place, placed
from pgqueue.cli.output import write, write_json, write_table
from pgqueue.config import validate_name
from pgqueue.failure import one_line
from pgqueue.limit import rate_of
from pgqueue.ops.admission import KINDS

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
        ["kind", "key", "admitted", "blocked", "limit", "rate", "parked since", "by dead letter"],
        [
            (
                row.kind,
                row.key,
                row.admitted,
                row.blocked,
                row.width,
                None if row.rate is None else pace(row.rate, row.burst),
                row.parked_at,
                row.parked_by,
            )
            for row in found
        ],
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
        int | None,
        typer.Argument(metavar="[LIMIT]", min=0, help="Jobs at once, on all workers; 0: what the jobs themselves say."),
    ] = None,
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help="concurrency, ordering or fairness; the last two take a rate.")
    ] = "concurrency",
    rate: Rate = None,
    per: Per = 1.0,
    burst: Burst = None,
) -> int:
    """Say how many jobs of one key may be in work at once, and how often they are admitted, from now on.

    Give LIMIT, --rate or both: what is left out is not limited by this any more.
    """
    if number is None and rate is None:
        raise UsageMistake("limited to what? give LIMIT, --rate or both; LIMIT 0 takes back what was said before")
    if kind not in KINDS.values():
        raise UsageMistake(f"--kind must be one of {', '.join(KINDS.values())}")
    with usage():
        validate_name("queue", name)
        said = rate_of(rate, per=per, burst=burst)
    with queue(place) as pq, usage():
        pq.limit_key(name, limit=number or None, rate=rate, per=per, burst=burst, **{f"{kind}_key": key})
    parts = [f"is limited to {number}"] if number else []
    parts += [] if said is None else [f"is admitted {pace(said.rate, said.burst)}"]
    write(
        f"{kind} key {one_line(key)} of queue {one_line(name)} {' and '.join(parts) or 'has the limit that its jobs say'}"
    )
    return 0

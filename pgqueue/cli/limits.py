"""pgqueue limit, pgqueue unlimit and pgqueue limits."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import usage
from pgqueue.cli.options import AsJson, Place, placed
from pgqueue.cli.output import write, write_json, write_table
from pgqueue.cli.queues import Force, Name
from pgqueue.config import validate_name
from pgqueue.failure import one_line
from pgqueue.limit import Limit, limit_of
from pgqueue.ops.limit import QueueLimit

Running = Annotated[int | None, typer.Option("--running", metavar="N", help="Jobs that run at once, on all workers.")]
Rate = Annotated[float | None, typer.Option("--rate", metavar="R", help="Starts in the time of --per, on all workers.")]
Per = Annotated[float, typer.Option("--per", metavar="S", help="The time of --rate, in seconds.")]
Burst = Annotated[
    int | None,
    typer.Option(
        "--burst", metavar="N", help="Starts at once after a rest; what --rate brings in a second, unless given."
    ),
]
_UNITS = ((1.0, "a second"), (60.0, "a minute"), (3600.0, "an hour"))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("limit")(limit)
    app.command("unlimit")(unlimit)
    app.command("limits")(limits)


@placed
def limit(
    place: Place,
    name: Name,
    running: Running = None,
    rate: Rate = None,
    per: Per = 1.0,
    burst: Burst = None,
    force: Force = False,
) -> int:
    """Limit how many jobs of a queue run at once and how often they start, on all workers; what runs goes on.

    What is not given is not limited.
    """
    with usage():
        validate_name("queue", name)
        said = limit_of(running, rate=rate, per=per, burst=burst)
    with queue(place) as pq:
        if not force:
            check_queue(pq, name, advice="; --force limits it before its first use")
        pq.limit_queue(name, running=running, rate=rate, per=per, burst=burst)
    write(f"queue {one_line(name)} is limited to {in_words(said)}")
    return 0


@placed
def unlimit(place: Place, name: Name) -> int:
    """Take the limits of a queue back."""
    with queue(place) as pq:
        check_queue(pq, name)
        pq.unlimit_queue(name)
    write(f"queue {one_line(name)} is not limited")
    return 0


@placed
def limits(place: Place, as_json: AsJson = False) -> int:
    """Show every queue that is limited, and how many of its jobs may start now as far as its rate goes."""
    with queue(place) as pq:
        found = pq.limits()
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["queue", "running", "rate", "may start now", "in code"],
        [
            (
                row.queue,
                row.running,
                None if row.rate is None else pace(row.rate, row.burst),
                None if row.tokens is None else int(row.tokens),
                row.in_code,
            )
            for row in found
        ],
    )
    return 0


def in_words(limit: Limit | QueueLimit) -> str:
    """A limit of a queue as a part of a sentence."""
    parts = [] if limit.running is None else [f"{limit.running} at once"]
    if limit.rate is not None:
        parts.append(pace(limit.rate, limit.burst))
    return " and ".join(parts)


def pace(rate: float, burst: int | None) -> str:
    """A rate as people say it: a whole number, if it is one in some unit, and one at least."""
    said = [(rate * seconds, unit) for seconds, unit in _UNITS if rate * seconds >= 1] or [(rate * 86400, "a day")]
    number, unit = next((one for one in said if math.isclose(one[0], round(one[0]))), said[0])
    return f"{number:.6g} {unit} (burst {burst})"

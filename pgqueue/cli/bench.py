"""`pgqueue bench`: the benchmark of pgqueue itself, without peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pgqueue.cli.errors import UsageMistake
from pgqueue.cli.options import AsJson, Place, placed
from pgqueue.cli.output import write

Only = Annotated[str, typer.Option("--only", metavar="A,B", help="Only these measurements.")]
Rounds = Annotated[int, typer.Option("--rounds", metavar="N", min=1, max=100, help="How often each case runs.")]
Scale = Annotated[float, typer.Option("--scale", metavar="X", help="Multiplies numbers of jobs.")]
Seconds = Annotated[float, typer.Option("--seconds", metavar="S", help="The length of timed measurements.")]
Output = Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Where results.jsonl and results.md go.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench")(bench)


@placed
def bench(
    place: Place,
    only: Only = "",
    rounds: Rounds = 3,
    scale: Scale = 1.0,
    seconds: Seconds = 10.0,
    output: Output = None,
    as_json: AsJson = False,
) -> int:
    """Measure pgqueue on a private PostgreSQL of its own, or on the server of --database-url.

    Every case runs several rounds in turn with the others; the table shows medians, spreads and ratios. Exit status 1 says
    that a case did not bring a figure. On a server of yours, it makes databases of its own and drops them.
    """
    from pgqueue.bench import main, suite

    known = suite.measurements(suite.cases())
    chosen = [name for name in only.split(",") if name] or known
    if unknown := [name for name in chosen if name not in known]:
        raise UsageMistake(f"there is no measurement {unknown[0]!r}; known are {', '.join(known)}")
    if not (0 < scale <= 100 and 0.5 <= seconds <= 3600):
        raise UsageMistake("--scale must be above 0 and at most 100, --seconds between 0.5 and 3600")
    plan = main.Plan(
        cases=[case for case in suite.cases() if case.measurement in chosen],
        comparisons=suite.comparisons(),
        rounds=rounds,
        scale=scale,
        seconds=seconds,
        output=output,
        database_url=place.database_url,
        quiet=place.quiet,
    )
    outcome = main.perform(plan)
    write(json.dumps(outcome.as_json(), ensure_ascii=False, indent=2) if as_json else outcome.report)
    return 1 if outcome.run.troubles else 0

"""Run cases in turn, round by round, and keep going when one of them fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pgqueue.bench.errors import Skipped
from pgqueue.bench.stage import Stage
from pgqueue.bench.values import Case, Metrics, Result


@dataclass(slots=True)
class Run:
    """What a run brought: results in the order of the cases, and a line for everything that brought none."""

    results: list[Result] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)


def take_turns(
    stage: Stage,
    cases: Sequence[Case],
    rounds: int,
    console: Console,
    seen: Callable[[Case, int, Metrics], None] = lambda case, number, metrics: None,
) -> Run:
    """Measurement by measurement: every case once, then every case again, `rounds` times. Progress goes to `console`."""
    run = Run(results=[Result(case) for case in cases])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    plan = [
        (number, result)
        for name in dict.fromkeys(case.measurement for case in cases)
        for number in range(rounds)
        for result in run.results
        if result.case.measurement == name and number < (result.case.rounds or rounds)
    ]
    failed: set[int] = set()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(plan))
        for number, result in plan:
            progress.update(bar, description=result.case.title)
            if id(result) not in failed and not _once(stage, result, number, run, console, seen):
                failed.add(id(result))
            progress.advance(bar)
    run.results = [result for result in run.results if result.figures]
    return run


def _once(
    stage: Stage,
    result: Result,
    number: int,
    run: Run,
    console: Console,
    seen: Callable[[Case, int, Metrics], None],
) -> bool:
    case = result.case
    began = time.monotonic()
    try:
        metrics = case.run(stage)
    except Skipped as reason:
        run.troubles.append(f"{case.title}: skipped, {reason}")
    except Exception as error:  # noqa: BLE001 - one broken case must not cost the others their results
        run.troubles.append(f"{case.title}: {type(error).__name__}: {error}")
    else:
        result.add(metrics)
        seen(case, number, metrics)
        shown = "  ".join(f"{value:,.4g} {name}" for name, value in metrics.items())
        console.print(f"{case.title}: {shown}  ({time.monotonic() - began:.1f} s)", highlight=False, soft_wrap=True)
        return True
    console.print(run.troubles[-1], highlight=False, markup=False, soft_wrap=True)
    return False

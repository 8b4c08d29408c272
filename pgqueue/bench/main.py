"""One whole run: a stage, the cases in turn, the report. `pgqueue bench` and `python -m benchmarks` both end here."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pgqueue.bench import stage as stages
from pgqueue.bench.report import Lines, machine, markdown
from pgqueue.bench.turns import Run, take_turns
from pgqueue.bench.values import Case, Comparison, Verdict, compare
from pgqueue.config import Settings
from pgqueue.worker.processes import stop_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run. `settings`: what to print of other systems, by name."""

    cases: Sequence[Case]
    comparisons: Sequence[Comparison]
    rounds: int = 3
    scale: float = 1.0
    seconds: float = 10.0
    output: Path | None = None
    database_url: str | None = None
    quiet: bool = False
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    troubles: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run brought."""

    run: Run
    verdicts: Sequence[Verdict]
    settings: Mapping[str, Mapping[str, str]]
    report: str

    def as_json(self) -> list[dict[str, Any]]:
        """One object per case, one per target."""
        cases = [
            {
                "measurement": result.case.measurement,
                "system": result.case.system,
                "variant": result.case.variant,
                "figures": result.figures,
            }
            for result in self.run.results
        ]
        targets = [
            {**dataclasses.asdict(verdict.comparison), "ratio": verdict.ratio, "reached": verdict.reached}
            for verdict in self.verdicts
        ]
        return [*cases, *targets]


def perform(plan: Plan) -> Outcome:
    """Run the plan. Progress goes to stderr; with `output`, results.jsonl grows there as it goes, results.md at the end."""
    console = Console(stderr=True, quiet=plan.quiet)
    _forget_configuration()
    _end_on_signals()
    with stages.opened(plan.database_url, scale=plan.scale, seconds=plan.seconds) as stage:
        sizes = {"rounds": str(plan.rounds), "scale": f"{plan.scale:g}", "seconds": f"{plan.seconds:g}"}
        settings = {"machine": machine(), "run": sizes, "PostgreSQL": stage.settings(), **plan.settings}
        for name, values in settings.items():
            console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in values.items()), highlight=False)
        lines = Lines(plan.output / "results.jsonl" if plan.output else None, settings)
        run = take_turns(stage, plan.cases, plan.rounds, console, lines.add)
    run.troubles[:0] = plan.troubles
    verdicts = compare(run.results, plan.comparisons)
    report = markdown(run.results, verdicts, settings, run.troubles)
    if plan.output:
        (plan.output / "results.md").write_text(report)
    return Outcome(run=run, verdicts=verdicts, settings=settings, report=report)


def _forget_configuration() -> None:
    """Settings of an application in the environment are not those of the benchmark, in this process and in its workers."""
    for setting in dataclasses.fields(Settings):
        os.environ.pop(f"PGQUEUE_{setting.name.upper()}", None)


def _end_on_signals() -> None:
    """SIGTERM and SIGHUP unwind the run as Ctrl-C does, so that no server and no worker stays behind."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in stop_signals():
        signal.signal(number, _interrupted)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt

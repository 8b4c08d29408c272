"""What is written down: JSON lines as they come, and a table in Markdown of medians, spreads and ratios."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pgqueue.bench.growth import FAR_OVER_NEAR
from pgqueue.bench.values import Case, Metrics, Result, Verdict

DRIVERS = ("pgqueue", "psycopg", "psycopg-binary", "orjson")


def machine() -> dict[str, str]:
    """The machine and the programs, without a name or a path of either."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": str(cores),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: found for name in DRIVERS if (found := installed(name))},
    }


def installed(distribution: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


class Lines:
    """A file of JSON lines; the first says under which settings the others were measured. None: nothing is written."""

    def __init__(self, path: Path | None, settings: Mapping[str, Mapping[str, str]]) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": settings, "arguments": sys.argv[1:]}) + "\n")

    def add(self, case: Case, number: int, metrics: Metrics) -> None:
        """One run of one case."""
        if self._path is None:
            return
        line = {
            "measurement": case.measurement,
            "system": case.system,
            "variant": case.variant,
            "round": number + 1,
            "metrics": dict(metrics),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def markdown(
    results: Sequence[Result],
    verdicts: Sequence[Verdict],
    settings: Mapping[str, Mapping[str, str]],
    troubles: Sequence[str],
) -> str:
    """The whole report."""
    parts = ["# Results", "", *_settings(settings), ""]
    if verdicts:
        parts += ["## Targets", "", *_targets(verdicts), ""]
    for name in dict.fromkeys(result.case.measurement for result in results):
        chosen = [result for result in results if result.case.measurement == name]
        parts += [f"## {name}", "", *(_curves(chosen) if chosen[0].case.curve else _figures(chosen)), ""]
    if troubles:
        parts += ["## Not measured", "", *(f"- {' '.join(trouble.split())[:300]}" for trouble in troubles), ""]
    return "\n".join(parts)


def _settings(settings: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for name, values in settings.items():
        yield f"- {name}: " + ", ".join(f"{key} {value}" for key, value in values.items())


def _targets(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "| measure | ratio | spread | must | goal | |"
    yield "|---|---:|---:|---:|---:|---|"
    for verdict in verdicts:
        wanted = verdict.comparison
        sign = "≤" if wanted.at_most else "≥"
        yield (
            f"| {wanted.label} | {number(verdict.ratio)} | {number(verdict.low)} … {number(verdict.high)} "
            f"| {f'{sign} {wanted.must:g}' if wanted.must else '–'} | {sign} {wanted.goal:g} | {verdict.reached} |"
        )


def _figures(results: Sequence[Result]) -> Iterator[str]:
    yield "| system | variant | figure | median | spread | rounds |"
    yield "|---|---|---|---:|---:|---:|"
    for result in results:
        for metric, values in result.figures.items():
            spread = f"{number(min(values))} … {number(max(values))}" if len(values) > 1 else ""
            median = number(statistics.median(values))
            yield f"| {result.case.system} | {result.case.variant} | {metric} | {median} | {spread} | {len(values)} |"


def _curves(results: Sequence[Result]) -> Iterator[str]:
    yield "| growing | µs per claimed job at size | far / near |"
    yield "|---|---|---:|"
    for result in results:
        medians = {name: statistics.median(values) for name, values in result.figures.items()}
        ratio = medians.pop(FAR_OVER_NEAR)
        points = " · ".join(f"{int(size):,}: {number(cost)}" for size, cost in medians.items())
        yield f"| {result.case.variant} | {points} | {number(ratio)} |"


def number(value: float) -> str:
    """Three significant digits, thousands with commas."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"

"""The plots: growth curves over a logarithmic axis, and bars of the rates. matplotlib comes with the extra `bench`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pgqueue.bench.growth import FAR_OVER_NEAR
from pgqueue.bench.values import Result

BARS = {
    "drain": "jobs/s",
    "life-cycle": "jobs/s",
    "enqueue": "jobs/s",
    "claimers": "jobs/s",
    "latency": "p50 ms",
    "snapshot": "last / first tenth",
}


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write the PNG files for whatever was measured; their paths. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for name, metric in BARS.items():
        chosen = [result for result in results if result.case.measurement == name and metric in result.figures]
        if chosen:
            made.append(_bars(plt, chosen, metric, folder / f"{name}.png"))
    curves = [result for result in results if result.case.curve]
    if curves:
        made.append(_curves(plt, curves, folder / "growth.png"))
    return made


def _bars(plt: Any, results: Sequence[Result], metric: str, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.32 * len(results)))
    labels = [f"{result.case.system}: {result.case.variant}" for result in results]
    values = [statistics.median(result.figures[metric]) for result in results]
    spread = [
        [value - min(result.figures[metric]) for value, result in zip(values, results, strict=True)],
        [max(result.figures[metric]) - value for value, result in zip(values, results, strict=True)],
    ]
    colours = {"pgqueue": "#2f6690", "floor": "#a3a3a3"}
    axes.barh(labels, values, xerr=spread, color=[colours.get(result.case.system, "#d98f4e") for result in results])
    axes.invert_yaxis()
    axes.set_xlabel(f"{metric}, median and spread")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _curves(plt: Any, results: Sequence[Result], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(9, 5))
    for result in results:
        points = {name: statistics.median(values) for name, values in result.figures.items() if name != FAR_OVER_NEAR}
        if result.case.variant != "payload bytes":
            axes.plot(
                [max(1, int(size)) for size in points], list(points.values()), marker="o", label=result.case.variant
            )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("how many of them there are")
    axes.set_ylabel("µs per claimed job, batches of 100")
    axes.legend()
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path

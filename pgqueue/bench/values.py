"""The values of a benchmark: a case that can be run, what its runs brought, and what is compared with what."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pgqueue.bench.stage import Stage

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to run: `system` (pgqueue or a peer) under `measurement`, in the configuration that `variant` names.

    `run` returns one or more figures by name. `curve`: the names are sizes, and the figure is a cost at that size.
    `rounds`: at most so many runs, where one run already repeats inside.
    """

    measurement: str
    system: str
    variant: str
    run: Callable[[Stage], Metrics]
    curve: bool = False
    rounds: int | None = None

    @property
    def title(self) -> str:
        """For progress and messages."""
        return f"{self.measurement}: {self.system}, {self.variant}"


@dataclass(slots=True)
class Result:
    """The figures of one case, one list entry per round."""

    case: Case
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, metrics: Metrics) -> None:
        """Take one round's figures."""
        for name, value in metrics.items():
            self.figures.setdefault(name, []).append(value)


@dataclass(frozen=True, slots=True)
class Key:
    """Which figure is meant."""

    measurement: str
    system: str
    variant: str
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A target: `over` divided by `under` (or `over` alone) is at least, or at most, `must`."""

    label: str
    over: Key
    under: Key | None
    must: float
    goal: float
    at_most: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A comparison with its ratio: the median over the rounds, and its smallest and largest value."""

    comparison: Comparison
    ratio: float
    low: float
    high: float

    @property
    def reached(self) -> str:
        """In one word: what of the target is reached."""
        if self._within(self.comparison.goal):
            return "goal"
        if not self.comparison.must:
            return "below the goal"
        return "must" if self._within(self.comparison.must) else "missed"

    def _within(self, bound: float) -> bool:
        return self.ratio <= bound if self.comparison.at_most else self.ratio >= bound


def compare(results: Iterable[Result], comparisons: Sequence[Comparison]) -> list[Verdict]:
    """The verdicts of all comparisons whose figures are there. Ratios are formed round by round, then the median taken:
    what slowed a whole round down does not show in them."""
    found = {
        Key(result.case.measurement, result.case.system, result.case.variant, metric): values
        for result in results
        for metric, values in result.figures.items()
    }
    verdicts = []
    for comparison in comparisons:
        over = found.get(comparison.over)
        under = found.get(comparison.under) if comparison.under else [1.0] * len(over or ())
        if over and under:
            ratios = _ratios(over, under)
            verdicts.append(
                Verdict(comparison=comparison, ratio=statistics.median(ratios), low=min(ratios), high=max(ratios))
            )
    return verdicts


def _ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    if len(over) != len(under):
        return [statistics.median(over) / statistics.median(under)]
    return [a / b for a, b in zip(over, under, strict=True)]

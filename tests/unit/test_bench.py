"""The arithmetic of the benchmark, without a database."""

from __future__ import annotations

import pytest

from benchmarks.roster import ALL
from pgqueue.bench import suite
from pgqueue.bench.latency import percentiles
from pgqueue.bench.report import number
from pgqueue.bench.values import Case, Comparison, Key, Result, compare

FAST, SLOW = Key("drain", "pgqueue", "plain", "jobs/s"), Key("drain", "other", "plain", "jobs/s")


def result(key: Key, *values: float) -> Result:
    case = Case(measurement=key.measurement, system=key.system, variant=key.variant, run=lambda stage: {})
    return Result(case, {key.metric: list(values)})


def ratio(over: Key, under: Key | None, *, at_most: bool = False, must: float = 2.0) -> Comparison:
    return Comparison(label="", over=over, under=under, must=must, goal=must + (-1 if at_most else 1), at_most=at_most)


def test_ratios_are_formed_round_by_round() -> None:
    results = [result(FAST, 200, 20, 210), result(SLOW, 100, 10, 100)]
    (verdict,) = compare(results, [ratio(FAST, SLOW)])
    assert (verdict.ratio, verdict.low, verdict.high) == (2.0, 2.0, 2.1)
    assert verdict.reached == "must"


@pytest.mark.parametrize(("value", "word"), [(0.5, "goal"), (1.5, "must"), (2.5, "missed")])
def test_a_target_that_is_a_limit_is_reached_from_below(value: float, word: str) -> None:
    (verdict,) = compare([result(FAST, value)], [ratio(FAST, None, at_most=True)])
    assert verdict.reached == word


def test_a_comparison_without_figures_is_left_out() -> None:
    assert compare([result(FAST, 1)], [ratio(FAST, SLOW)]) == []


def test_every_target_of_ours_names_a_case_that_exists() -> None:
    known = {(case.measurement, case.system, case.variant) for case in suite.cases()}
    for comparison in suite.comparisons():
        for key in (comparison.over, comparison.under):
            assert key is None or (key.measurement, key.system, key.variant) in known


def test_no_two_cases_share_their_name() -> None:
    names = [(case.measurement, case.system, case.variant) for case in suite.cases()]
    assert len(names) == len(set(names))


def test_the_adapters_load_without_their_peers_and_have_names_of_their_own() -> None:
    names = [peer.name for peer in ALL]
    assert len(names) == len(set(names)) >= 10


def test_percentiles_of_a_hundred_waits() -> None:
    found = percentiles([float(wait) for wait in range(1, 101)])
    assert (found["p50 ms"], found["p99 ms"], found["max ms"]) == (51.0, 100.0, 100.0)


@pytest.mark.parametrize(("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (12345.6, "12,346")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text

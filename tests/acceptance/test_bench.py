"""A short run of `pgqueue bench`. Only ratios of figures of this very run are looked at, with wide margins:
they say that the shape of the product is kept, on any machine and however busy it is."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.command_line import CommandLine

Figures = dict[tuple[str, str], dict[str, list[float]]]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory, server_url: str) -> Figures:
    """What one run brought, by measurement and variant."""
    program = CommandLine(tmp_path_factory.mktemp("bench"), None)
    words = ("--only", "life-cycle,hint,statements,footprint", "--scale", "0.02", "--rounds", "3", "--quiet")
    cases = [one for one in program.json("bench", *words, "--database-url", server_url) if "measurement" in one]
    return {(one["measurement"], one["variant"]): one["figures"] for one in cases}


def median(figures: Figures, measurement: str, variant: str, metric: str) -> float:
    return statistics.median(figures[measurement, variant][metric])


def test_the_low_water_hint_saves_the_way_over_dead_rows_under_an_old_snapshot(figures: Figures) -> None:
    assert median(figures, "hint", "claims behind dead rows", "without / with") > 1.3


def test_batches_are_several_times_faster_than_single_jobs(figures: Figures) -> None:
    single = median(figures, "life-cycle", "batches of 1, archive", "jobs/s")
    assert median(figures, "life-cycle", "batches of 100, archive", "jobs/s") > 2 * single


@pytest.mark.parametrize("archive", ["archive", "no archive"])
def test_claims_stay_on_their_page(figures: Figures, archive: str) -> None:
    assert median(figures, "footprint", archive, "HOT %") >= 95


def test_a_worker_settles_and_claims_in_batches(figures: Figures) -> None:
    # One claim and one settle a job would be 2,000.
    assert median(figures, "statements", "a worker that drains", "statements/1000 jobs") < 300


def test_a_measurement_that_does_not_exist_is_a_mistake_of_usage(tmp_path: Path) -> None:
    sentence = CommandLine(tmp_path, None).sentence(2, "bench", "--only", "speed")
    assert "life-cycle" in sentence


def test_results_are_written_as_lines_and_as_a_table(tmp_path: Path, server_url: str) -> None:
    program = CommandLine(tmp_path, None)
    words = ("--only", "footprint", "--scale", "0.01", "--rounds", "1", "--output", "out", "--quiet")
    printed = program.good("bench", *words, "--database-url", server_url)
    table = (tmp_path / "out" / "results.md").read_text()
    assert table.strip() == printed.strip()
    assert "WAL bytes/job" in table
    lines: list[Any] = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert len(lines) == 3  # the settings, and one line for each case

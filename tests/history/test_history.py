"""A seeded run of everything at once, on a server of its own; and faults planted into workers, each of which is found."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.history.checker import Rule
from tests.history.planted import PLANTS
from tests.history.run import Report, RunOptions, able, run
from tests.history.server import PrivateServer

RUN_SECONDS = float(os.environ.get("PGQUEUE_HISTORY_SECONDS", "60"))
SEED = int(os.environ.get("PGQUEUE_HISTORY_SEED", "7"))
FRESH = 20.0
"""Five seconds is the promise; this is a bound for a machine that does other things meanwhile."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RUN_SECONDS + 480)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    with PrivateServer(tmp_path_factory.mktemp("history") / "postgres") as started:
        yield started


def shown(report: Report) -> Report:
    """Printed, so that pytest shows it where the test fails."""
    print(f"\n{report}")
    return report


def test_no_promise_is_broken_while_everything_goes_wrong(server: PrivateServer, tmp_path: Path) -> None:
    options = RunOptions(seed=SEED, seconds=RUN_SECONDS, rate=60.0, drain=240.0, fresh=FRESH)
    report = shown(run(options, server, tmp_path))
    assert report.violations == []
    # A run in which nothing happened shows nothing.
    if RUN_SECONDS >= 60:
        assert {strike.name for strike in report.strikes} >= {*able(None)[0]} - {"redrive"}
        keys = "admission in order", "admission within a limit", "parked"
        for what in ("archived completed", "rescue", "retry", "dead letter", *keys):
            assert report.seen[what] > 0, what
    assert report.verdicts["committed"] > 100


MIXED = RunOptions(
    seconds=10.0,
    rate=30.0,
    drain=30.0,
    weights={"quick": 40, "slow": 20, "flaky": 20, "hopeless": 10},
)
FRAGILE = RunOptions(seconds=10.0, rate=15.0, drain=30.0, weights={"fragile": 1})
LONG = RunOptions(seconds=14.0, rate=12.0, drain=30.0, weights={"long": 4, "slow": 1})
KEYED = dataclasses.replace(MIXED, keyed=1.0)
LIMITED = RunOptions(seconds=15.0, rate=60.0, drain=60.0, keyed=1.0, weights={"quick": 1, "slow": 1})
FINDERS = {
    "settle without the token": (LONG, "stall", Rule.OWNER_SETTLES),
    "acknowledged before run": (MIXED, "drop", Rule.OWNER_SETTLES),
    "rescue without the maximum": (FRAGILE, "kill", Rule.ATTEMPTS),
    "deleted instead of retried": (MIXED, "drop", Rule.NOT_LOST),
    "admission without the lock": (LIMITED, "drop", Rule.WITHIN_LIMIT),
    "settle without an admission row": (dataclasses.replace(KEYED, drain=12.0), "drop", Rule.LIVES_ON),
    "retries hold no slot": (KEYED, "drop", Rule.ONE_AT_A_TIME),
    "dead loop": (dataclasses.replace(MIXED, seconds=4.0, drain=10.0), "drop", Rule.LIVES_ON),
}


@pytest.mark.parametrize("planted", PLANTS)
def test_a_planted_fault_is_found(planted: str, server: PrivateServer, tmp_path: Path) -> None:
    options, strike, rule = FINDERS[planted]
    for seed in range(SEED, SEED + 4):  # what only a race shows may not happen in a few seconds of a busy machine
        folder = tmp_path / str(seed)
        folder.mkdir()
        report = run(dataclasses.replace(options, seed=seed, planted=planted, strikes=[strike]), server, folder)
        found = [violation for violation in report.violations if violation.rule is rule]
        if found:
            break
    print(f"\n{planted}: {len(found)} times, of {len(report.violations)} violations; the first:")
    print(found[0] if found else report)
    assert found
    assert found[0].events or rule is Rule.LIVES_ON

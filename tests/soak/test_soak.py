"""A short soak, on a server of its own; `python -m tests.soak` is the long one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.processes import Server
from tests.soak.run import KINDS, SoakOptions, run

SECONDS = float(os.environ.get("PGQUEUE_SOAK_SECONDS", "20"))
RATE = float(os.environ.get("PGQUEUE_SOAK_RATE", "5000"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 480)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("soak") / "postgres") as started:
        yield started


def test_many_jobs_a_second_survive_every_fault_and_nothing_grows(server: Server, tmp_path: Path) -> None:
    report = run(SoakOptions(seconds=SECONDS, rate=RATE, lease=2.0), server, tmp_path)
    print(f"\n{report}")
    assert report.complaints == []
    # A run in which nothing happened shows nothing.
    assert report.checked.committed > SECONDS * RATE / 20
    assert report.checked.rolled_back > 0
    if SECONDS >= 20:
        assert {strike.name for strike in report.strikes} == set(KINDS)

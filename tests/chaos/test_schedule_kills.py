"""Six processes with one schedule that ticks every second, which are killed and frozen or have wrong clocks."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.chaos.processes import Workers, workers
from tests.chaos.test_clocks import Clock
from tests.waiting import wait_until
from tests.workers import count

PATIENCE = 90.0
TICKS = """
    SELECT (headers->>'scheduled_for')::timestamptz AS tick FROM {table} WHERE headers->>'schedule' = 'every second'
"""
ALL = " UNION ALL ".join(TICKS.format(table=f"pgqueue.{table}") for table in ("archive", "job", "dead_letter"))
DELAYS = """
    SELECT extract(epoch FROM created_at - (headers->>'scheduled_for')::timestamptz)::float8 FROM pgqueue.archive
"""


@pytest.fixture
def fleet(database: str, tmp_path: Path) -> Iterator[Workers]:
    with workers(database, tmp_path) as started:
        started.app = "tests.chaos.schedule_app:pq"
        yield started


def ticks(admin: psycopg.Connection[Any]) -> list[datetime]:
    return [tick for (tick,) in admin.execute(f"SELECT tick FROM ({ALL}) AS made ORDER BY tick".encode()).fetchall()]


def assert_each_second_once(found: list[datetime]) -> None:
    assert len(found) == len(set(found)), "a tick made two jobs"
    assert {later - earlier for earlier, later in itertools.pairwise(found)} == {timedelta(seconds=1)}


@pytest.mark.slow
def test_every_tick_makes_one_job_while_its_workers_are_killed(
    pq: pgqueue.PgQueue, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    kills, seen = 0, 0
    fleet.keep(6)
    wait_until(lambda: ticks(admin), PATIENCE, "it ticks")

    def enough() -> bool:
        nonlocal kills, seen
        found = len(ticks(admin))
        if found > seen:  # not oftener than ticks come: a busy machine needs longer to start a worker than to kill one
            seen = found
            victim = fleet.alive()[0]
            if kills % 3 == 2:
                victim.send_signal(signal.SIGSTOP)  # whatever it was doing: nobody waits for it
                fleet.processes.remove(victim)
                fleet.processes.append(victim)
            else:
                victim.kill()
                victim.wait()
            kills += 1
        fleet.keep(6)
        return kills >= 12

    wait_until(enough, PATIENCE, "12 faults, and a tick before each")
    for process in fleet.alive():
        process.kill()
    pq.pause_schedule("every second")
    assert_each_second_once(ticks(admin))


@pytest.mark.slow
def test_wrong_clocks_make_no_tick_early_late_or_twice(
    fleet: Workers, admin: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, skew in enumerate(("+2", "-2", "+10m")):
        clock = Clock(tmp_path / f"clock{number}", monkeypatch)
        clock.set(skew)
        clock.start(fleet)
    wait_until(lambda: count(admin, "archive") >= 12, PATIENCE, "twelve ticks are done")
    assert_each_second_once(ticks(admin))
    late = [seconds for (seconds,) in admin.execute(DELAYS).fetchall()]
    assert 0 <= min(late) < 1
    assert max(late) < 10

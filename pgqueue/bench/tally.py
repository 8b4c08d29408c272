"""What a worker's process tells the benchmark: how many jobs it has started, and when.

Kept in memory and written by a thread every few milliseconds, so that the handler costs a list append. Used by the peers'
workers as well. CLOCK_MONOTONIC is one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from pgqueue.bench.errors import Miscount

VARIABLE = "PGQUEUE_BENCH_TALLY"
EVERY, SELDOM = 0.01, 0.3

_marks: list[float] = []
_stamps: list[tuple[int, float]] = []
_lock = threading.Lock()
_writer: list[int] = []


def count() -> None:
    """One more job has started."""
    _marks.append(monotonic())
    if not _writer:
        _begin()


def stamp(number: int) -> None:
    """Job `number` has started now."""
    _stamps.append((number, monotonic()))
    _marks.append(0.0)
    if not _writer:
        _begin()


def _begin() -> None:
    with _lock:
        if not _writer:
            _writer.append(os.getpid())
            threading.Thread(target=_write_for_ever, name="bench tally", daemon=True).start()


def _write_for_ever() -> None:
    folder = Path(os.environ[VARIABLE])
    written = quiet = 0
    while True:
        quiet += 1
        if len(_marks) != written:
            written, quiet = len(_marks), 0
            tenths = [_marks[min(written - 1, part * written // 10)] for part in range(11)]
            report = {"count": written, "tenths": tenths, "stamps": _stamps[:written] if _stamps else []}
            unfinished = folder / f".{os.getpid()}"
            unfinished.write_text(json.dumps(report))
            unfinished.rename(folder / f"{os.getpid()}.json")
        time.sleep(SELDOM if _stamps or quiet > 100 else EVERY)  # an idle worker is not to be kept busy by this


class Tally:
    """The benchmark's end of it: the reports of all processes that write into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reports(self) -> Iterator[dict[str, Any]]:
        """The latest report of every process."""
        for path in self.folder.glob("*.json"):
            yield json.loads(path.read_text())

    def total(self) -> int:
        """Jobs started so far."""
        return sum(report["count"] for report in self.reports())

    def first(self) -> float:
        """When the first job started."""
        return float(min(report["tenths"][0] for report in self.reports()))

    def tenths(self) -> list[float]:
        """When each tenth of the jobs had started; of the process that had the most."""
        return list(max(self.reports(), key=lambda report: report["count"])["tenths"])

    def stamps(self) -> dict[int, float]:
        """When each numbered job started first."""
        earliest: dict[int, float] = {}
        for report in self.reports():
            for number, at in report["stamps"]:
                earliest[number] = min(at, earliest.get(number, at))
        return earliest

    def wait(self, number: int, program: Any, patience: float) -> None:
        """Until `number` jobs have started. Miscount when none has started for `patience` seconds, or the worker is gone."""
        seen, moved = self.total(), time.monotonic()
        while seen < number:
            if program.ended():
                raise Miscount(f"the worker ended after {seen} of {number} jobs: {program.last_words()}")
            if time.monotonic() - moved > patience:
                raise Miscount(f"{seen} of {number} jobs have started, then none any more: {program.last_words()}")
            time.sleep(EVERY)
            before, seen = seen, self.total()
            if seen != before:
                moved = time.monotonic()

    def check(self, number: int) -> None:
        """Miscount unless exactly `number` jobs have started."""
        seen = self.total()
        if seen != number:
            raise Miscount(f"{number} jobs were enqueued and {seen} were executed")

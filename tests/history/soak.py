"""The soak: what must stay flat over a long run is sampled, and its last third compared with the one before."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.history.server import rows

EVERY = 1.0
MARGINS = {"memory": (1.15, 8e6), "sessions": (1.2, 8.0), "dead rows": (1.5, 20_000.0), "table bytes": (1.5, 16e6)}
"""How much more the last third may show than the middle one: a factor, and a constant on top."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one thing."""

    what: str
    value: float


def grown(samples: Sequence[Sample], margins: Mapping[str, tuple[float, float]] = MARGINS) -> list[str]:
    """What has grown: a sentence each. The first third is warming up."""
    complaints = []
    for what, (factor, constant) in margins.items():
        middle, last = thirds(samples, what)
        if last > middle * factor + constant:
            complaints.append(f"{what} grow: {middle:,.0f} in the middle third of the run, {last:,.0f} in the last")
    return complaints


def thirds(samples: Sequence[Sample], what: str) -> tuple[float, float]:
    """The medians of the middle and of the last third; zeros where there are too few samples."""
    values = [sample.value for sample in samples if sample.what == what]
    third = len(values) // 3
    if third < 3:
        return 0.0, 0.0
    return statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])


class Sampler(threading.Thread):
    """Samples the worker whose pid `pid` says (0: none runs now) and the database at `url`, once a second until stopped."""

    def __init__(self, url: str, pid: Callable[[], int]) -> None:
        super().__init__(name="sampler", daemon=True)
        self.url = url
        self.pid = pid
        self.samples: list[Sample] = []
        self.stopping = threading.Event()

    def run(self) -> None:
        """Until stopped."""
        while not self.stopping.wait(EVERY):
            self._look()

    def _look(self) -> None:
        found = rows(
            self.url,
            "SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()),"
            " (SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE relid IN ('pgqueue.job'::regclass,"
            "  'pgqueue.lease'::regclass)),"
            " pg_total_relation_size('pgqueue.job') + pg_total_relation_size('pgqueue.lease')",
        )
        for number in found or ():
            for what, value in zip(("sessions", "dead rows", "table bytes"), number, strict=True):
                self.samples.append(Sample(what, float(value or 0)))
        pages = _pages(self.pid())
        if pages:
            self.samples.append(Sample("memory", float(pages * os.sysconf("SC_PAGE_SIZE"))))


def _pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0

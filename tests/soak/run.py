"""One soak: a producer at a wanted rate, workers, and a nemesis; then everything drains, and the sums must agree.

python -m tests.soak --seconds 600 --rate 50000 --seed 7
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from tests.chaos.proxy import Proxy
from tests.history.fleet import Fleet, FleetOptions
from tests.history.nemesis import SECONDS, Nemesis, Strike
from tests.history.server import rows
from tests.history.soak import Sample, grown, thirds
from tests.soak import marks, processes, sampling
from tests.waiting import wait_until

KINDS = ("kill", "freeze", "terminate", "restart", "crash")
PATIENCE = 120.0
BACKLOG = 15.0
"""Seconds of production that may wait before the producer is held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """`rate`: committed jobs a second. `lease`: of the workers. `drain`: seconds until all work has ended, once the faults
    have."""

    seed: int = 7
    seconds: float = 600.0
    rate: float = 50_000.0
    workers: int = 2
    concurrency: int = 10
    lease: float = 5.0
    strikes: Collection[str] = KINDS
    drain: float = 300.0


@dataclass(slots=True)
class Report:
    """What a run has shown. `complaints`: a sentence for everything that is wrong."""

    options: SoakOptions
    strikes: list[Strike] = field(default_factory=list)
    checked: marks.Checked = field(default_factory=marks.Checked)
    samples: list[Sample] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    held_back: float = 0.0
    seconds: float = 0.0
    drained_after: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Committed jobs a second, over the time of the run."""
        return self.checked.committed / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        options, checked = self.options, self.checked
        counted = Counter(strike.name for strike in self.strikes)
        unsure = f"{checked.unknown:,} without an answer"
        lines = [
            f"seed {options.seed}, {self.seconds:.0f} s, {options.workers} workers, lease {options.lease:g} s",
            f"rate: {self.rate:,.0f} jobs a second were committed, {options.rate:,.0f} were wanted",
            f"the producer was held back for {self.held_back:.0%} of the time",
            "strikes: " + (", ".join(f"{name} {number}" for name, number in sorted(counted.items())) or "none"),
            f"jobs: {checked.committed:,} committed, {checked.rolled_back:,} rolled back, {unsure}",
            f"ran more than once: {checked.again:,}, {checked.extra:,} runs too many",
            f"drained {self.drained_after:.1f} s after the end of the faults",
        ]
        for what in [*sampling.margins(options.workers, options.rate), sampling.BYTES, sampling.LIVE]:
            middle, last = thirds(self.samples, what)
            peak = self.peaks.get(what, 0.0)
            lines.append(f"{what}: {middle:,.0f} in the middle third, {last:,.0f} in the last, {peak:,.0f} at most")
        lines += [f"{len(self.complaints)} complaints", *self.complaints]
        return "\n".join(lines)


def schedule(options: SoakOptions) -> list[Strike]:
    """The strikes of a run: all kinds in turn, in a new order each time, with quiet between them in which work goes on."""
    dice = random.Random(f"soak of {options.seed}")
    quiet = min(15.0, max(1.0, options.seconds / 30))
    strikes: list[Strike] = []
    at = min(3.0, options.seconds / 10)
    while options.strikes:
        for name in dice.sample(sorted(options.strikes), len(options.strikes)):
            lasts = options.lease * dice.uniform(1.3, 1.8) if name == "freeze" else SECONDS[name]
            if at + lasts > options.seconds:
                return strikes
            strikes.append(Strike(at, name, lasts, dice.getrandbits(30)))
            at += lasts + quiet * dice.uniform(0.5, 1.5)
    return strikes


def explained(strikes: Sequence[Strike], options: SoakOptions) -> int:
    """How many jobs the faults may have made to run again: all that a worker held when it was killed or frozen, and all that
    every worker held when the server went away, for longer than a lease or with claims that it forgot."""
    each = marks.held_at_most(options.concurrency)
    workers = {"kill": 1, "freeze": 1, "restart": options.workers, "crash": options.workers}
    return sum(workers.get(strike.name, 0) * each for strike in strikes)


def run(options: SoakOptions, server: processes.Server, path: Path) -> Report:
    """One run in a new database of this server; the logs of its processes lie in `path` afterwards."""
    folder = processes.Folder(path=path)
    numbers = int(options.seconds * options.rate * 1.5) + 10_000
    with folder.marks.open("wb") as file:
        file.truncate(numbers)
    url = server.new_database()
    made = FleetOptions(workers=options.workers, concurrency=options.concurrency, lease=options.lease)
    report = Report(options)
    with processes.fleet(url, folder, made) as (fleet, unused):
        _Stage(report, server, url, folder, fleet, unused).play(numbers)
    return report


class _Stage:
    """The parts of one run, in their order."""

    def __init__(
        self,
        report: Report,
        server: processes.Server,
        url: str,
        folder: processes.Folder,
        fleet: Fleet,
        unused: Proxy,
    ) -> None:
        self.report = report
        self.options = report.options
        self.server = server
        self.url = url
        self.folder = folder
        self.fleet = fleet
        # The first worker is never killed: its memory is that of the whole run.
        self.nemesis = Nemesis(schedule(self.options), fleet, unused, server, url, spare=0)
        every, enough = min(2.0, self.options.seconds / 40), self.options.rate * BACKLOG
        self.sampler = sampling.Sampler(url, fleet.posts, every, folder.hold, enough)

    def play(self, numbers: int) -> None:
        """All of it."""
        options = self.options
        self.fleet.start()
        wait_until(lambda: all(post.up for post in self.fleet.posts), PATIENCE, "all workers are up")
        with processes.producer(
            self.url, self.folder, rate=options.rate, numbers=numbers, seed=options.seed
        ) as producer:
            self._trouble(producer)
        self._recover()
        self.fleet.stop()
        self.report.complaints += self.fleet.complaints + self.nemesis.complaints
        self._count()

    def _trouble(self, producer: Popen[bytes]) -> None:
        """Producer and nemesis, for the time of the run."""
        began = time.monotonic()
        self.sampler.start()
        self.nemesis.start()
        end = began + self.options.seconds
        # On a slow machine strikes take longer than they were meant to; each of them happens all the same.
        while time.monotonic() < end or (self.nemesis.is_alive() and time.monotonic() < end + PATIENCE):
            if producer.poll() is not None:
                break
            time.sleep(0.2)
        self.report.seconds = time.monotonic() - began
        self.sampler.stopping.set()
        self.sampler.join(PATIENCE)
        self.nemesis.stopping.set()
        self.nemesis.join(PATIENCE)
        self.server.start()
        self.folder.hold.unlink(missing_ok=True)
        processes.end_producer(producer, self.folder)
        if self.nemesis.error is not None:
            raise RuntimeError("the nemesis of the run has failed") from self.nemesis.error
        self.report.strikes = self.nemesis.done
        self.report.samples = self.sampler.samples
        self.report.peaks = self.sampler.peaks()
        self.report.held_back = self.sampler.held_back / max(1, self.sampler.looks)

    def _recover(self) -> None:
        """Wait until no job is left."""
        began = time.monotonic()
        try:
            wait_until(
                lambda: rows(self.url, "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM pgqueue.job)"),
                self.options.drain,
                "everything has drained",
            )
        except AssertionError as error:
            left = rows(self.url, "SELECT count(*) FROM pgqueue.job")
            self.report.complaints.append(f"{error}: {left} jobs are live")
        self.report.drained_after = time.monotonic() - began

    def _count(self) -> None:
        """The marks against the journal, and what the tables say."""
        for (dead,) in rows(self.url, "SELECT count(*) FROM pgqueue.dead_letter") or [(-1,)]:
            if dead:
                self.report.complaints.append(f"{dead:,} jobs are dead letters, none should be")
        batches = marks.journal(self.folder.journal)
        found = self.folder.marks.read_bytes()
        self.report.checked = marks.check(batches, found, explained=explained(self.report.strikes, self.options))
        self.report.complaints += self.report.checked.complaints
        self.report.complaints += grown(self.report.samples, sampling.margins(self.options.workers, self.report.rate))
        self.report.complaints += sampling.bloated(self.report.peaks)


def main(words: Sequence[str] | None = None) -> int:
    """The command; status 1 where something was lost or has grown."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Many jobs a second, for long.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long jobs are enqueued and faults happen")
    parser.add_argument("--rate", type=float, default=50_000.0, help="committed jobs a second")
    parser.add_argument("--seed", type=int, default=7, help="the same seed makes the same choices")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strikes", default=",".join(KINDS), help="only these faults, with commas between")
    parser.add_argument("--logs", type=Path, help="an existing folder in which the logs, marks and journal stay")
    given = parser.parse_args(words)
    strikes = [name.strip() for name in given.strikes.split(",") if name.strip()]
    if unknown := set(strikes) - set(KINDS):
        parser.error(f"no such strike: {', '.join(sorted(unknown))}")
    options = SoakOptions(
        seed=given.seed, seconds=given.seconds, rate=given.rate, workers=given.workers, strikes=strikes
    )
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # that connections break is what we are here for
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-soak-")))
        path.chmod(0o711)  # passable, for the account that runs the server of root
        server = stack.enter_context(processes.Server(path / "postgres"))
        report = run(options, server, given.logs or path)
    print(report)
    return 1 if report.complaints else 0

"""One run: workers, producers and the nemesis for some time; then everything must drain, and the checker reads the history.

python -m tests.history --seconds 600 --seed 7 --rate 500
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psycopg

from tests.chaos.proxy import Proxy, target_of
from tests.history import record
from tests.history.app import WEIGHTS
from tests.history.checker import Checked, History, Rule, Verdict, Violation, check
from tests.history.fleet import Fleet, FleetOptions, fleet
from tests.history.lane_checker import check_lanes
from tests.history.lane_record import lanes
from tests.history.liveness import Liveness
from tests.history.nemesis import SECONDS, Nemesis, Strike, faketime, schedule
from tests.history.planted import PLANTS
from tests.history.producers import Producer
from tests.history.server import PrivateServer, rows
from tests.history.soak import MARGINS, Sample, Sampler, grown, thirds
from tests.waiting import wait_until

PRODUCERS = 3
PATIENCE = 90.0
SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """`rate`: jobs enqueued a second. `strikes`: the names of the faults, None for all that this machine can do. `drain`,
    `fresh`: seconds until all work has ended, and until a fresh job has started, once the faults have. `planted`: a fault
    that the workers carry. `keyed`: the share of transactions whose jobs have a key. `soak`: sample what must stay flat;
    the first worker is not killed then."""

    seed: int = 1
    seconds: float = 60.0
    rate: float = 100.0
    workers: int = 3
    strikes: Collection[str] | None = None
    weights: Mapping[str, int] = field(default_factory=lambda: WEIGHTS)
    keyed: float = 0.4
    drain: float = 120.0
    fresh: float = 5.0
    planted: str = ""
    soak: bool = False


@dataclass(slots=True)
class Report:
    """What a run has shown."""

    options: RunOptions
    left_out: list[str]
    strikes: list[Strike] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    drained_after: float = 0.0

    def __str__(self) -> str:
        options = self.options
        lines = [
            f"seed {options.seed}, {options.seconds:g} s, {options.rate:g} jobs a second, {options.workers} workers"
        ]
        lines += [f"left out on this machine: {', '.join(self.left_out)}"] if self.left_out else []
        lines += ["strikes: " + _counted(Counter(strike.name for strike in self.strikes))]
        lines += ["transactions' jobs: " + _counted(self.verdicts), "seen: " + _counted(self.seen)]
        lines += [f"drained {self.drained_after:.1f} s after the last fault"]
        for what in MARGINS if options.soak else ():
            middle, last = thirds(self.samples, what)
            lines.append(f"{what}: {middle:,.0f} in the middle third, {last:,.0f} in the last")
        lines += [f"{len(self.violations)} violations: " + _counted(Counter(v.rule.name for v in self.violations))]
        lines += [str(violation) for violation in self.violations[:SHOWN]]
        if self.violations:
            lines += [f"the schedule of seed {options.seed}:", *(str(strike) for strike in self.strikes)]
        return "\n".join(lines)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counter.items())) or "none"


def able(wanted: Collection[str] | None) -> tuple[list[str], list[str]]:
    """The strikes of these (None: of all) that this machine can do, and those that it cannot."""
    names = sorted(SECONDS if wanted is None else wanted)
    lacking = [name for name in names if name == "skew" and faketime() is None]
    return [name for name in names if name not in lacking], lacking


def run(options: RunOptions, server: PrivateServer, folder: Path) -> Report:
    """One run in a new database of this server; logs of the workers lie in `folder` afterwards."""
    names, lacking = able(options.strikes)
    report = Report(options, [f"{name} (no libfaketime)" for name in lacking])
    url = server.new_database()
    made = FleetOptions(workers=options.workers, planted=options.planted, faketime=faketime())
    with fleet(url, folder, made) as workers, Proxy(target_of(url)) as network:
        _Stage(options, report, workers, network, server, url).play(names)
    return report


class _Stage:
    """The parts of one run, in their order."""

    def __init__(
        self, options: RunOptions, report: Report, workers: Fleet, network: Proxy, server: PrivateServer, url: str
    ) -> None:
        self.options = options
        self.report = report
        self.workers = workers
        self.network = network
        self.server = server
        self.url = url
        each = options.rate / PRODUCERS
        self.producers = [
            Producer(number, network.url(url), options.seed, each, options.weights, options.keyed)
            for number in range(1, PRODUCERS + 1)
        ]
        self.liveness = Liveness(url, workers)
        self.crashes: list[datetime] = []

    def play(self, names: Sequence[str]) -> None:
        """All of it."""
        self.workers.start()
        self._all_up()
        sampler = Sampler(self.url, lambda: self.workers.posts[0].pid)
        if self.options.soak:
            sampler.start()
        self._trouble(names)
        sampler.stopping.set()
        if self.options.soak:
            sampler.join(PATIENCE)
        self.report.samples = sampler.samples
        self.report.violations += [Violation(Rule.LIVES_ON, what) for what in grown(sampler.samples)]
        drained = self._recover()
        self.workers.stop()
        self.report.violations += [Violation(Rule.LIVES_ON, what) for what in self.workers.complaints]
        checked = self._check(drained)
        self.report.violations += checked.violations
        self.report.seen = checked.seen

    def _all_up(self) -> None:
        posts = self.workers.posts
        try:
            wait_until(lambda: all(post.up for post in posts), PATIENCE, "all workers are up")
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), *(post.story() for post in posts)])) from None

    def _trouble(self, names: Sequence[str]) -> None:
        """Producers and nemesis, for the time of the run."""
        options = self.options
        strikes = schedule(options.seed, options.seconds, names)
        spare = 0 if options.soak else -1
        nemesis = Nemesis(strikes, self.workers, self.network, self.server, self.url, spare)
        end = time.monotonic() + options.seconds
        for thread in (nemesis, *self.producers):
            thread.start()
        enough = options.rate * 5 + 100
        # On a busy machine strikes take longer than planned: every kind shall have come once all the same.
        latest = end + PATIENCE
        while nemesis.error is None and (time.monotonic() < end or (nemesis.owes() and time.monotonic() < latest)):
            live = rows(self.url, "SELECT count(*) FROM pgqueue.job") or [(0,)]
            for producer in self.producers:
                (producer.waiting.set if live[0][0] > enough else producer.waiting.clear)()
            time.sleep(0.2)
        self._quieten(nemesis)

    def _quieten(self, nemesis: Nemesis) -> None:
        for producer in self.producers:
            producer.stopping.set()
        nemesis.stopping.set()
        nemesis.join(PATIENCE)
        self.server.start()
        for proxy in (self.network, *(post.proxy for post in self.workers.posts)):
            proxy.resume()
        self.network.drop_all()
        for producer in self.producers:
            producer.join(PATIENCE)
        threads: list[Nemesis | Producer] = [nemesis, *self.producers]
        for thread in threads:
            if thread.is_alive() or thread.error is not None:
                raise RuntimeError(f"the {thread.name} of the run has failed") from thread.error
        self.report.strikes = nemesis.done
        self.crashes = nemesis.crashes
        self.report.violations += [Violation(Rule.LIVES_ON, what) for what in nemesis.complaints]

    def _recover(self) -> bool:
        """Whether everything has drained; the questions of liveness, unless a fault is planted."""
        began = time.monotonic()
        found = self.liveness.drained(self.options.drain)
        self.report.drained_after = time.monotonic() - began
        drained = not found
        if drained and not self.options.planted:
            self._all_up()
            found += self.liveness.fresh(self.options.fresh)
            for post in self.workers.posts:
                found += self.liveness.alone(post)
        self.report.violations += found
        return drained

    def _check(self, drained: bool) -> Checked:
        verdicts: dict[int, Verdict] = dict(self.liveness.verdicts)
        for producer in self.producers:
            verdicts |= producer.verdicts
        self.report.verdicts.update(verdict.value for verdict in verdicts.values())
        with psycopg.connect(self.url, autocommit=True) as connection:
            history = History(
                stories=record.stories(connection),
                intents=record.intents(connection),
                verdicts=verdicts,
                leases=record.leases(connection),
                counts=record.counts(connection),
                drained=drained,
                crashes=self.crashes,
            )
            checked, keyed = check(history), check_lanes(lanes(connection))
            return Checked(checked.violations + keyed.violations, checked.seen + keyed.seen)


def main(words: Sequence[str] | None = None) -> int:
    """The command; status 1 where a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.history", description="Check what pgqueue promises under faults."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same choices")
    parser.add_argument("--rate", type=float, default=100.0, help="jobs enqueued a second")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--strikes", default="", help=f"only these, with commas between: {', '.join(SECONDS)}")
    parser.add_argument("--planted", default="", choices=["", *PLANTS], help="a fault for the checker to find")
    parser.add_argument(
        "--soak", action="store_true", help="also sample what must stay flat: memory, sessions, dead rows"
    )
    parser.add_argument("--logs", type=Path, help="an existing folder in which the workers' logs stay")
    given = parser.parse_args(words)
    strikes = [name.strip() for name in given.strikes.split(",") if name.strip()] or None
    if unknown := set(strikes or ()) - set(SECONDS):
        parser.error(f"no such strike: {', '.join(sorted(unknown))}")
    options = RunOptions(
        seed=given.seed, seconds=given.seconds, rate=given.rate, workers=given.workers, strikes=strikes,
        planted=given.planted, soak=given.soak,
    )  # fmt: skip
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # that connections break is what we are here for
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pgqueue-history-")))
        folder.chmod(0o711)  # passable, for the account that runs the server of root
        server = stack.enter_context(PrivateServer(folder / "postgres"))
        report = run(options, server, given.logs or folder)
    print(report)
    return 1 if report.violations else 0

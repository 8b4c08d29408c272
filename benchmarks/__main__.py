"""`python -m benchmarks`: pgqueue and its peers in one run, in turn."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cases as peer_cases
from benchmarks.peers.base import Peer
from benchmarks.roster import ALL
from pgqueue.bench import main as bench
from pgqueue.bench import suite


def main(words: Sequence[str]) -> int:
    """Exit status 0 when every case brought a figure, 1 when one did not, 2 for a wrong command line."""
    arguments = _parser().parse_args(words)
    names = [peer.name for peer in ALL]
    wanted = _chosen(arguments.peers, names, "peer", none_of_them=arguments.peers == "none")
    peers, absent = _present([peer for peer in ALL if peer.name in wanted])
    known = suite.measurements(suite.cases())
    only = _chosen(arguments.only, known, "measurement")
    plan = bench.Plan(
        cases=[case for case in [*suite.cases(), *peer_cases.cases(peers)] if case.measurement in only],
        comparisons=[*peer_cases.comparisons(peers), *suite.comparisons()],
        rounds=arguments.rounds,
        scale=arguments.scale,
        seconds=arguments.seconds,
        output=arguments.output,
        database_url=arguments.database_url,
        quiet=arguments.quiet,
        settings={peer.name: peer.settings() for peer in peers},
        troubles=absent,
    )
    outcome = bench.perform(plan)
    print(outcome.report)
    _draw(outcome, arguments.output)
    return 1 if len(outcome.run.troubles) > len(absent) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="", metavar="A,B", help="only these measurements")
    parser.add_argument("--peers", default="", metavar="A,B", help="only these peers; none for no peer")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each case runs (3)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="multiplies numbers of jobs (1)")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="length of timed measurements (10)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results.jsonl, results.md and plots go")
    parser.add_argument("--database-url", metavar="URL", help="a server of yours, instead of a private one")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _chosen(text: str, known: Sequence[str], what: str, *, none_of_them: bool = False) -> list[str]:
    if none_of_them:
        return []
    chosen = [name for name in text.split(",") if name] or list(known)
    for name in chosen:
        if name not in known:
            print(f"there is no {what} {name!r}; known are {', '.join(known)}", file=sys.stderr)
            raise SystemExit(2)
    return chosen


def _present(peers: Sequence[Peer]) -> tuple[list[Peer], list[str]]:
    present, absent = [], []
    for peer in peers:
        reason = peer.missing()
        if reason is None:
            present.append(peer)
        else:
            absent.append(f"{peer.name}: skipped, {reason}")
            print(absent[-1], file=sys.stderr)
    return present, absent


def _draw(outcome: bench.Outcome, folder: Path | None) -> None:
    if folder is None:
        return
    try:
        from benchmarks import plots

        plots.draw(outcome.run.results, folder)
    except ImportError:
        print("no plots: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

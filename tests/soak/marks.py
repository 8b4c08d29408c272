"""What was enqueued against what has run: the journal of the producer, and one byte of marks for every number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgqueue.worker.claimer import BACKLOG, MOST_AHEAD, PER_CLAIM
from pgqueue.worker.settler import BATCH
from tests.history.checker import Verdict

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Batch:
    """One transaction: jobs of the numbers from `first` on, and what the producer was told of its commit."""

    first: int
    count: int
    verdict: Verdict

    def line(self) -> str:
        """As it stands in the journal."""
        return f"{self.first} {self.count} {self.verdict.value}\n"


@dataclass(slots=True)
class Checked:
    """Sums of a run, in jobs, and a sentence for everything that is wrong. `again`: numbers that ran more than once,
    `extra`: how many runs too many. `unknown`: jobs of transactions whose commit got no answer."""

    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0
    again: int = 0
    extra: int = 0
    complaints: list[str] = field(default_factory=list)


def journal(path: Path) -> Iterator[Batch]:
    """The batches of a journal."""
    for line in path.read_text().splitlines():
        first, count, verdict = line.split(" ", 2)
        yield Batch(int(first), int(count), Verdict(verdict))


def held_at_most(concurrency: int) -> int:
    """Jobs that one worker may hold: running, waiting, on their way, and done with an outcome that is not written yet."""
    return concurrency + MOST_AHEAD + PER_CLAIM + BACKLOG + BATCH


def check(batches: Iterable[Batch], marks: bytes, *, explained: int) -> Checked:
    """Compare them. `explained`: how many numbers the faults may have made to run again."""
    checked = Checked()
    accounted = 0
    lost: list[int] = []
    ghosts: list[int] = []
    for batch in batches:
        piece = marks[batch.first : batch.first + batch.count]
        ran = len(piece) - piece.count(0)
        missing = batch.count - ran
        accounted += ran
        if batch.verdict is Verdict.COMMITTED:
            checked.committed += batch.count
            lost += _where(batch, piece, marked=False) if missing else []
        elif batch.verdict is Verdict.ROLLED_BACK:
            checked.rolled_back += batch.count
            ghosts += _where(batch, piece, marked=True) if ran else []
        else:
            checked.unknown += batch.count
            if missing and ran:
                checked.complaints.append(f"a commit that got no answer was torn: {ran} of {batch.count} jobs ran")
        once = piece.count(1)
        if once < ran:
            checked.again += ran - once
            checked.extra += sum(piece) - ran
    strangers = len(marks) - marks.count(0) - accounted
    checked.complaints += _complaints(checked, lost, ghosts, strangers, explained)
    return checked


def _complaints(
    checked: Checked, lost: Sequence[int], ghosts: Sequence[int], strangers: int, explained: int
) -> list[str]:
    found = []
    if lost:
        found.append(f"{len(lost):,} jobs are lost, committed and never run: {_some(lost)}")
    if ghosts:
        found.append(f"{len(ghosts):,} jobs ran that were rolled back: {_some(ghosts)}")
    if strangers:
        found.append(f"{strangers:,} numbers ran that nobody enqueued")
    if checked.again > explained:
        found.append(f"{checked.again:,} jobs ran more than once, and the faults explain at most {explained:,}")
    return found


def _where(batch: Batch, piece: bytes, *, marked: bool) -> list[int]:
    # A file that ends before the batch leaves its rest without marks.
    padded = piece.ljust(batch.count, b"\0")
    return [batch.first + place for place, mark in enumerate(padded) if bool(mark) is marked]


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SHOWN:,} more" if len(numbers) > SHOWN else ""
    return ", ".join(map(str, numbers[:SHOWN])) + more

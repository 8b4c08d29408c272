"""What must stay flat, looked at every few seconds; and the brake of the producer, for a machine that cannot keep up."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.history.fleet import Post
from tests.history.server import rows
from tests.history.soak import Sample

CHILDREN, SESSIONS, DEAD, BYTES, LIVE = "memory of child processes", "sessions", "dead rows", "table bytes", "live jobs"
SPARE, PER_ROW = 64e6, 1500.0
"""Bytes: some 400 to 700 a row are usual. A crash of the server makes it forget its count of dead rows for a while."""
SIZE = re.compile(r"^(Pss\w*):\s+(\d+) kB", re.MULTILINE)
LOOK = (
    "SELECT (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()),"
    " (SELECT sum(n_dead_tup) FROM pg_stat_user_tables WHERE relid IN ('pgqueue.job'::regclass,"
    "  'pgqueue.lease'::regclass)),"
    " pg_total_relation_size('pgqueue.job') + pg_total_relation_size('pgqueue.lease'),"
    " (SELECT count(*) FROM pgqueue.job)"
)


def memory_of(worker: int) -> str:
    """The name of these samples."""
    return f"memory of worker {worker}"


def margins(workers: int, rate: float) -> Mapping[str, tuple[float, float]]:
    """How much more the last third of a run may show than the middle one: a factor, and a constant on top.

    Memory and sessions must be flat. Dead rows follow the work, `rate` jobs a second: between two rounds of autovacuum, a
    minute apart, and through an outage, there may be half a minute of it more.
    """
    return {
        **{memory_of(number): (1.15, 16e6) for number in range(workers)},
        CHILDREN: (1.5, 200e6),
        SESSIONS: (1.2, 8.0),
        DEAD: (1.5, 30 * rate),
    }


def bloated(peaks: Mapping[str, float]) -> list[str]:
    """A sentence when the tables with their indexes have become larger than the rows that they held at one time explain. A
    table does not shrink, so its size is that of its fullest moment; half of a page is left free for updates."""
    rows = peaks.get(LIVE, 0.0) + peaks.get(DEAD, 0.0)
    most = SPARE + PER_ROW * rows
    size = peaks.get(BYTES, 0.0)
    return [f"{BYTES} are {size:,.0f}, where {rows:,.0f} rows explain at most {most:,.0f}"] if size > most else []


class Sampler(threading.Thread):
    """Samples the workers and the database at `url` every `every` seconds until stopped. While more than `enough` jobs are
    live, the file `hold` is there; `held_back` counts the looks at which it was."""

    def __init__(self, url: str, posts: Sequence[Post], every: float, hold: Path, enough: float) -> None:
        super().__init__(name="sampler", daemon=True)
        self.url = url
        self.posts = posts
        self.every = every
        self.hold = hold
        self.enough = enough
        self.samples: list[Sample] = []
        self.held_back = 0
        self.looks = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        """Until stopped."""
        while not self.stopping.wait(self.every):
            self.looks += 1
            self._database()
            self._memory()

    def peaks(self) -> dict[str, float]:
        """The largest value of each kind."""
        found: dict[str, float] = {}
        for sample in self.samples:
            found[sample.what] = max(sample.value, found.get(sample.what, 0.0))
        return found

    def _database(self) -> None:
        for found in rows(self.url, LOOK) or ():
            for what, value in zip((SESSIONS, DEAD, BYTES, LIVE), found, strict=True):
                self.samples.append(Sample(what, float(value or 0)))
            if found[-1] > self.enough:
                self.held_back += 1
                self.hold.touch()
            else:
                self.hold.unlink(missing_ok=True)

    def _memory(self) -> None:
        workers = {post.pid: post.number for post in self.posts if post.up}
        for pid, number in workers.items():
            if size := memory(pid):
                self.samples.append(Sample(memory_of(number), size))
        children: Counter[str] = Counter()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError):
                parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
                if parent in workers:
                    children[CHILDREN] += int(memory(int(stat.parent.name)))
        self.samples.append(Sample(CHILDREN, float(children[CHILDREN])))


def memory(pid: int) -> float:
    """The proportional set size in bytes: what is shared with other processes is divided among them. Without files, where
    the system tells them apart: the marks are one, and grow with the work. 0 when the process is gone."""
    with suppress(OSError):
        sizes: dict[str, str] = dict(SIZE.findall(Path(f"/proc/{pid}/smaps_rollup").read_text()))
        return float(sizes.get("Pss_Anon") or sizes.get("Pss", "0")) * 1024
    return 0.0

"""The application: one task, which marks its number in a file that all processes share, and does nothing else."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pgqueue

QUEUE = "soak"
VARIABLE = "SOAK_MARKS"
MOST = 255
ATTEMPTS = 100
"""More than the faults of any run can burn: a job that runs out of them is a finding."""

pq = pgqueue.PgQueue()


def mapped(path: Path) -> mmap.mmap:
    """The file as memory that every process sees; what a killed process has written into it stays."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


_marks = mapped(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else bytearray()


@pq.task(name="mark", queue=QUEUE, max_attempts=ATTEMPTS)
def mark(number: int) -> None:
    """One byte a number: how often it ran, up to 255. Two runs of one number at the same instant may count as one."""
    before = _marks[number]
    if before < MOST:
        _marks[number] = before + 1

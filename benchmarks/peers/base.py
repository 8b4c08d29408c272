"""What every adapter of a peer provides."""

from __future__ import annotations

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pgqueue.bench import tally
from pgqueue.bench.report import installed
from pgqueue.bench.stage import Stage

TARGET = "PGQUEUE_BENCH_TARGET"
ROOT = Path(__file__).resolve().parents[2]


class Session(ABC):
    """A peer that is set up: its tables exist in a database of this run, or its Redis runs."""

    url: str
    postgres_url: str | None = None
    """Where statements are counted and an old snapshot is held; None for a peer without PostgreSQL."""

    @abstractmethod
    def enqueue_many(self, number: int) -> None:
        """Enqueue `number` no-op jobs in the fastest documented way."""

    @abstractmethod
    def enqueue_one(self, number: int) -> object:
        """Enqueue one job that stamps `number` when it starts; durable, as far as the peer's server is, on return."""

    def enqueue_each(self, number: int) -> None:
        """Enqueue `number` jobs one by one; a client with an event loop enters it once."""
        for n in range(number):
            self.enqueue_one(n)

    @abstractmethod
    def empty(self) -> bool:
        """Whether nothing waits or runs any more: every job is settled."""

    @abstractmethod
    def words(self) -> list[str]:
        """The command line of one worker process."""

    def environment(self) -> Mapping[str, str]:
        """What the worker finds in its environment."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {TARGET: self.url, "PYTHONPATH": path}


class Peer(ABC):
    """A queue to compare with. `drain_jobs`: how many jobs keep its worker busy for some seconds."""

    name: str
    distribution: str
    needs: tuple[str, ...] = ()
    configuration: Mapping[str, str]
    drain_jobs: int = 10_000
    on_postgres: bool = False
    single: bool = True
    """Whether it is measured job by job too: enqueue one by one, latency, idle."""

    def missing(self) -> str | None:
        """Why it cannot take part, or None."""
        for module in (self.distribution, *self.needs):
            if importlib.util.find_spec(module) is None:
                return f"{module} is not installed"
        return None

    def settings(self) -> dict[str, str]:
        """Version and configuration, for the report."""
        return {"version": installed(self.distribution) or "?", **self.configuration}

    @abstractmethod
    def open(self, stage: Stage) -> AbstractContextManager[Session]:
        """Set up for one run, and clean up afterwards."""


def module_words(module: str) -> list[str]:
    """The command line of a worker that an adapter's own module starts."""
    return [sys.executable, "-c", f"from {module} import main; main()"]


def target() -> str:
    """In a worker: where its queue is."""
    return os.environ[TARGET]


def work(job: Mapping[str, Any]) -> None:
    """What a bare consumer does with a job: count it, or stamp its start where it asks for that."""
    if "stamp" in job:
        tally.stamp(job["stamp"])
    else:
        tally.count()

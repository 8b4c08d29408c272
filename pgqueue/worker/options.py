"""What a worker is started with."""

from __future__ import annotations

import dataclasses
import os
import socket

from pgqueue.config import validate_count, validate_name, validate_seconds
from pgqueue.errors import ConfigurationError
from pgqueue.ops.worker import Identity
from pgqueue.version import __version__

BEATS_PER_LEASE = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """`queues`: in the order in which they are served, None for those of the registered tasks. `concurrency`: threads for
    plain functions, and as many `async def` jobs at once. `lease`, `heartbeat`, `grace`, `poll`: seconds; the heartbeat is
    a third of the lease unless given, and never more than a third. `drain`: leave when the queues are empty.

    `breaker_failures`: so many failures in a row, for one reason and within a minute, hold a queue back.
    `unfit_failures`: so many in a row, while other workers complete jobs of the same queues, make the worker leave. 0
    switches either off. `schedules` False: this worker writes no schedules and makes no job of theirs.
    """

    queues: tuple[str, ...] | None = None
    concurrency: int = 10
    lease: float = 30.0
    heartbeat: float | None = None
    grace: float = 30.0
    poll: float = 1.0
    drain: bool = False
    name: str | None = None
    breaker_failures: int = 20
    unfit_failures: int = 100
    schedules: bool = True

    def __post_init__(self) -> None:
        for queue in self.queues or ():
            validate_name("queue", queue)
        validate_count("concurrency", self.concurrency, most=1000)
        validate_seconds("lease", self.lease, least=1.0)
        validate_seconds("grace", self.grace)
        validate_seconds("poll", self.poll, least=0.05)
        validate_count("breaker_failures", self.breaker_failures, least=0, most=10_000)
        validate_count("unfit_failures", self.unfit_failures, least=0, most=1_000_000)
        if self.heartbeat is not None:
            validate_seconds("heartbeat", self.heartbeat, least=0.05)
            if self.heartbeat > self.lease / BEATS_PER_LEASE:
                raise ConfigurationError(
                    f"heartbeat {self.heartbeat:g} s is too slow for a lease of {self.lease:g} s: "
                    f"at most a third of it ({self.lease / BEATS_PER_LEASE:g} s), or live jobs are taken away"
                )

    @property
    def beat_every(self) -> float:
        """Seconds between heartbeats."""
        return self.heartbeat if self.heartbeat is not None else self.lease / BEATS_PER_LEASE

    @property
    def deadline(self) -> float:
        """Seconds that one database round trip of a control loop may take: less than the lease, so that a hung socket is
        noticed while there is still time to renew over another."""
        return max(0.5, min(10.0, self.lease / BEATS_PER_LEASE))

    def identity(self, queues: list[str]) -> Identity:
        """How a worker of this process that serves `queues` is known to others."""
        hostname = socket.gethostname()
        return Identity(
            name=self.name or f"{hostname}:{os.getpid()}",
            hostname=hostname,
            pid=os.getpid(),
            version=__version__,
            queues=queues,
            concurrency=self.concurrency,
            lease=self.lease,
        )

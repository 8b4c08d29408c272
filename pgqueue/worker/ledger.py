"""What this worker holds: every claimed job until its outcome is written, and the lease that covers it.

The only state that the loops share. A job leaves it exactly once: whoever takes it first (a runner with an outcome, the
shutdown with a release, the heartbeat that lost its lease) decides.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter

from pgqueue.current import CurrentJob
from pgqueue.job import Job


class Phase(enum.Enum):
    """Where a held job is: from WAITING and RUNNING somebody takes it; SETTLING means its outcome is on the way."""

    WAITING = 1
    RUNNING = 2
    SETTLING = 3
    LOST = 4


class Start(enum.Enum):
    """What a runner does with a job that it comes to."""

    RUN = 1
    GIVE_BACK = 2
    GONE = 3


class Lease:
    """One claim. `deadline` is on the monotonic clock, counted from the moment the claim or renewal was sent. `confirmed` is
    the last one that the database agreed to: until then nobody else can have taken the jobs. `sent`: when the claim was."""

    __slots__ = ("confirmed", "deadline", "held", "queue", "sent", "token")

    def __init__(self, token: int, queue: str, deadline: float, sent: float = 0.0) -> None:
        self.token = token
        self.queue = queue
        self.sent = sent
        self.deadline = self.confirmed = deadline
        self.held: dict[int, Held] = {}


class Held:
    """One claimed job. Its lock is its own: one for all jobs would make every runner wait for every other, and on a busy
    machine each such wait costs a turn of the scheduler."""

    __slots__ = ("cancel_requested", "current", "job", "lease", "lock", "phase", "stop", "superseded")

    def __init__(self, job: Job, lease: Lease) -> None:
        self.job = job
        self.lease = lease
        self.phase = Phase.WAITING
        self.current: CurrentJob | None = None
        self.stop: object | None = None
        self.cancel_requested = False
        self.superseded = False
        self.lock = threading.Lock()

    def move(self, phases: Sequence[Phase], to: Phase) -> bool:
        """To another phase, if it is in one of these: of several threads that try, one succeeds."""
        with self.lock:
            if self.phase not in phases:
                return False
            self.phase = to
            return True


_UNDECIDED = (Phase.WAITING, Phase.RUNNING)
_lease_of = attrgetter("lease")


class Ledger:
    """Thread-safe. All methods are short; none touches the database. Its own lock guards which jobs and leases there are and
    is taken before the lock of a job, never after."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self.superseded: set[Held] = set()

    def __len__(self) -> int:
        with self._lock:
            return sum(len(lease.held) for lease in self._leases.values())

    def add(self, jobs: Sequence[Job], deadline: float, sent: float | None = None) -> list[Held]:
        """Take in what a claim brought that was `sent` then, or now."""
        held = []
        sent = time.monotonic() if sent is None else sent
        with self._lock:
            for job in jobs:
                lease = self._leases.get(job.token)
                if lease is None:
                    lease = self._leases[job.token] = Lease(job.token, job.queue, deadline, sent)
                entry = lease.held[job.id] = Held(job, lease)
                held.append(entry)
        return held

    def begin(self, held: Held, current: CurrentJob) -> Start:
        """A runner comes to this job. GIVE_BACK makes it submit a release: the lease ran out in the buffer, or the job was
        cancelled or superseded there, and nobody else would ever take it up again; or it has expired, and is for the
        sweep."""
        expires_in = held.job.expires_in
        with held.lock:
            if held.phase is not Phase.WAITING:
                return Start.GONE
            now = time.monotonic()
            late = expires_in is not None and now >= held.lease.sent + expires_in
            if late or held.cancel_requested or held.superseded or now >= held.lease.deadline:
                held.phase = Phase.SETTLING
                return Start.GIVE_BACK
            held.phase = Phase.RUNNING
            held.current = current
            return Start.RUN

    def take(self, held: Held) -> bool:
        """Decide this job's outcome now; False when somebody else has."""
        return held.move(_UNDECIDED, Phase.SETTLING)

    def take_all(
        self, *phases: Phase, queue: str | None = None, task: str | None = None, but: Collection[Held] = ()
    ) -> list[Held]:
        """The same for every job that is in one of these phases, of one queue, of one task of it or of all, not in `but`."""
        with self._lock:
            chosen = [held for held in self._all() if queue is None or held.job.queue == queue]
            if task is not None:
                chosen = [held for held in chosen if held.job.task == task]
            return [held for held in chosen if held not in but and held.move(phases, Phase.SETTLING)]

    def finished(self, helds: Iterable[Held]) -> list[int]:
        """The tokens whose last jobs these are, if all of them are written now. Changes nothing."""
        counts = Counter(map(_lease_of, helds))
        with self._lock:
            return [
                lease.token
                for lease, count in counts.items()
                if lease.token in self._leases and len(lease.held) == count
            ]

    def remove(self, helds: Iterable[Held]) -> None:
        """These are written, or lost: forget them."""
        with self._lock:
            touched = set()
            if self.superseded:
                self.superseded.difference_update(helds)
            for held in helds:
                lease = held.lease
                lease.held.pop(held.job.id, None)
                touched.add(lease)
            for lease in touched:
                if not lease.held:
                    self._leases.pop(lease.token, None)

    def tokens(self) -> dict[str, list[int]]:
        """What the heartbeat must renew, by queue."""
        by_queue: dict[str, list[int]] = {}
        with self._lock:
            for lease in self._leases.values():
                by_queue.setdefault(lease.queue, []).append(lease.token)
        return by_queue

    def renew(self, tokens: Iterable[int], deadline: float) -> None:
        """The database said that these leases are still ours."""
        with self._lock:
            for token in tokens:
                lease = self._leases.get(token)
                if lease is not None:
                    lease.deadline = max(lease.deadline, deadline)
                    lease.confirmed = max(lease.confirmed, deadline)

    def lose(self, tokens: Iterable[int]) -> list[Held]:
        """These leases are not ours any more; returns their jobs that were waiting or running.

        Jobs whose outcome is on the way stay: their settle carries the token and finds out by itself.
        """
        with self._lock:
            lost = self._lose(filter(None, map(self._leases.get, tokens)))
        self.remove(lost)
        return lost

    def lose_expired(self, now: float) -> list[Held]:
        """The same for the leases that have ended. One step: what a beat renews meanwhile must not be given up."""
        with self._lock:
            lost = self._lose(lease for lease in self._leases.values() if lease.deadline <= now)
        self.remove(lost)
        return lost

    def first_deadline(self) -> float:
        """When the first lease ends that is not renewed; infinity where none is held."""
        with self._lock:
            return min((lease.deadline for lease in self._leases.values()), default=math.inf)

    def request_cancel(self, token: int, ids: Iterable[int]) -> list[Held]:
        """Cancellation was asked for; returns the jobs that did not know yet."""
        with self._lock:
            lease = self._leases.get(token)
            news = (
                [lease.held[i] for i in ids if i in lease.held and not lease.held[i].cancel_requested] if lease else []
            )
            for held in news:
                with held.lock:
                    held.cancel_requested = True
                    current = held.current
                if current is not None:
                    current.cancel()
            return news

    def supersede(self, token: int, ids: Iterable[int]) -> list[Held]:
        """Newer jobs of their keys wait for these; returns the jobs that did not know yet."""
        with self._lock:
            lease = self._leases.get(token)
            news = [lease.held[i] for i in ids if i in lease.held and not lease.held[i].superseded] if lease else []
            self.superseded.update(news)
            for held in news:
                with held.lock:
                    held.superseded = True
                    current = held.current
                if current is not None:
                    current.supersede()
            return news

    @staticmethod
    def _lose(leases: Iterable[Lease]) -> list[Held]:
        lost: list[Held] = []
        for lease in leases:
            lease.deadline = math.inf  # what stays is being written: nothing is left that could be lost
            lost.extend(held for held in lease.held.values() if held.move(_UNDECIDED, Phase.LOST))
        return lost

    def _all(self) -> list[Held]:
        return [held for lease in self._leases.values() for held in lease.held.values()]

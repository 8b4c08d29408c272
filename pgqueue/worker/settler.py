"""The settler: the only part of a worker that writes outcomes. In batches, fenced, until they are stored or surely lost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import psycopg

from pgqueue.current import Stage
from pgqueue.errors import DatabaseUnavailable, PgQueueError
from pgqueue.events import Bus, EventName
from pgqueue.failure import PLACEHOLDER
from pgqueue.job import Job
from pgqueue.ops import settle as settle_ops
from pgqueue.outcome import COMPLETED, Outcome, OutcomeKind
from pgqueue.result import Kept
from pgqueue.worker.breaker import failure_of
from pgqueue.worker.doubts import Doubt, Doubts
from pgqueue.worker.execution import tell_failed
from pgqueue.worker.inbox import Inbox
from pgqueue.worker.ledger import Held, Ledger
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop

BATCH = 1000
WAIT = 5.0
LAST_WRITES = 1.0
LAST_LOOK = 0.02
Pending = tuple[Held, Outcome]
OPEN, OURS, LOST, DONE = "open", "ours", "other", "done"
"""What became of a job in doubt: see `job_doubt`; one that is gone is done."""
ENDING = (OutcomeKind.COMPLETED, OutcomeKind.DISCARD, OutcomeKind.DEAD)
PASSING = (psycopg.OperationalError, psycopg.InterfaceError, DatabaseUnavailable, psycopg.errors.ReadOnlySqlTransaction)


class Settler(Loop):
    """Takes outcomes from any thread. While the database is away they wait here, however long: when it is back, the token
    tells whether the job is still ours."""

    name: ClassVar[str] = "settle"

    def __init__(
        self,
        link: Link,
        ledger: Ledger,
        events: Bus,
        options: settle_ops.SettleOptions,
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.link = link
        self.ledger = ledger
        self.options = options
        self._inbox: Inbox[Pending] = Inbox()
        self._batches: dict[str, list[Pending]] = {}
        self.settled = 0
        self.completed: dict[str, int] = {}
        self.relieved: Callable[[], None] = _nobody
        self.freed: Callable[[str], None] = _nobody
        self.written: Callable[[str], None] = _nobody
        self.decided: Callable[[Held, Outcome], None] = _nobody
        self.succeeded: Callable[[], None] = _nobody
        self._doubts = Doubts()
        self._most = BATCH
        self._unsure: dict[tuple[int, int], float] = {}

    def submit(self, held: Held, outcome: Outcome) -> None:
        """Have this outcome written."""
        self._inbox.put((held, outcome))

    def doubt(self, held: Held, outcome: Outcome, error: str | None = None, counts: bool = True) -> None:
        """The handler has settled this job itself. Once the database says whether that is true, `decided` is called with
        what holds: completed, or else this outcome, which is then written. Not called where it does not count."""
        self._doubts.add(Doubt(held, outcome, error, counts))
        self._inbox.ring()

    def backlog(self) -> int:
        """How many outcomes wait: claims stop when it grows, and `relieved` is called when some were written."""
        return len(self._inbox) + sum(map(len, list(self._batches.values()))) + len(self._doubts)

    def stop(self) -> None:
        """End once everything submitted is written."""
        super().stop()
        self._inbox.ring()

    def turn(self) -> None:
        """Collect a batch and write it, queue by queue. What could not be written is kept for the next turn."""
        if not self._batches:
            self._look_into_doubts()
            idle = WAIT if not self.stopping.is_set() else LAST_LOOK if self._doubts else 0.0
            for pair in self._inbox.take(BATCH, timeout=min(idle, self._doubts.due_in())):
                self._batches.setdefault(pair[0].job.queue, []).append(pair)
        while self._batches:
            self._write_first_queue()

    def finish(self) -> None:
        """Write what is left, for a bounded time: what cannot be written then, the leases cover."""
        end = time.monotonic() + LAST_WRITES
        while self.backlog() and time.monotonic() < end:
            try:
                self.turn()
            except (*PASSING, PgQueueError):
                time.sleep(0.05)
        self.link.close()

    def _look_into_doubts(self) -> None:
        for queue, doubts in self._doubts.due().items():
            fates = self.link.run(settle_ops.doubt(queue, [(one.held.job.id, one.held.job.token) for one in doubts]))
            found: dict[str, list[Doubt]] = {OPEN: [], OURS: [], LOST: [], DONE: []}
            for one in doubts:
                found[self._fate(one, fates.get(one.held.job.id))].append(one)
            # In this order: what fails here is looked at again, with the same answer.
            leases = self.ledger.finished([one.held for one in found[DONE]])
            if leases:
                self.link.run(settle_ops.settle(queue, [], finished=leases, options=self.options))
            self._doubts.settled([*found[DONE], *found[LOST], *found[OURS]])
            self._doubts.still_open(found[OPEN])
            self._done(queue, found[DONE])
            self._given_up(found[LOST])
            for one in found[OURS]:
                self._undone(one)

    @staticmethod
    def _fate(one: Doubt, found: str | None) -> str:
        if found is None:
            return DONE
        # A row that is not ours any more: a handler that failed or snoozed its own job by hand has left it so.
        by_hand = one.held.current is not None and one.held.current.stage is Stage.BY_HAND
        return DONE if found == LOST and by_hand else found

    def _done(self, queue: str, done: Sequence[Doubt]) -> None:
        self._forget([one.held for one in done])
        self.settled += len(done)
        self.written(queue)
        if any(one.held.current is not None and one.held.current.frees for one in done):
            self.freed(queue)
        blocks = [one for one in done if one.held.current is not None and one.held.current.stage is Stage.SETTLED]
        self.completed[queue] = self.completed.get(queue, 0) + len(blocks)
        for one in blocks:
            if one.counts:
                self.decided(one.held, COMPLETED)
            if one.error is not None:
                tell_failed(self.events, one.held, COMPLETED, one.error)
        if blocks and self.events.wanted(EventName.JOBS_SETTLED):
            self._tell(queue, [(one.held, COMPLETED) for one in blocks], set())

    def _given_up(self, lost: Sequence[Doubt]) -> None:
        self._forget([one.held for one in lost])
        if lost:
            self.events.emit(EventName.LEASE_LOST, ids=[one.held.job.id for one in lost], during="settle")

    def _undone(self, one: Doubt) -> None:
        """That transaction was not committed: the job is ours, and what came of its handler holds."""
        self._inbox.put((one.held, one.outcome))
        if one.counts:
            self.decided(one.held, one.outcome)
        if (error := one.error or failure_of(one.outcome)) is not None:
            tell_failed(self.events, one.held, one.outcome, error)

    def _write_first_queue(self) -> None:
        name, waiting = next(iter(self._batches.items()))
        chosen = waiting[: self._most]
        try:
            self._write(name, chosen)
        except PASSING:
            self._most = max(1, self._most // 2)  # a batch that takes longer than the deadline would never be written
            raise
        except psycopg.Error:
            for pair in chosen:
                self._write_alone(name, pair)
        self._most = min(BATCH, self._most * 2)
        del waiting[: len(chosen)]
        if not waiting:
            del self._batches[name]
        self.relieved()

    def _write_alone(self, name: str, pair: Pending) -> None:
        """One outcome that may not be storable: as it is, then without its text, then not at all."""
        held, outcome = pair
        for attempt in (outcome, _without_text(held, outcome)):
            try:
                self._write(name, [(held, attempt)])
                return
            except PASSING:
                raise
            except psycopg.Error:
                continue
        # The lease is renewed no more, so the job is rescued when it ends: counted, and in the end dead-lettered.
        self._forget([held])
        self.events.emit(EventName.SETTLE_ABANDONED, ids=[held.job.id])

    def _write(self, name: str, chosen: Sequence[Pending]) -> None:
        helds = [held for held, _ in chosen]
        op = settle_ops.settle(
            name,
            [(held.job, outcome) for held, outcome in chosen],
            finished=self.ledger.finished(helds),
            options=self._options(),
        )
        try:
            lost, freed = self.link.run(op)
            if freed:
                self.freed(name)
            if lost and self._unsure:
                lost = self._without_stored(name, chosen, lost)
        except PASSING:
            self._unsure.update({(held.job.id, held.job.token): held.lease.confirmed for held in helds})
            raise
        self._forget(helds)
        if self._unsure:
            for held in helds:
                self._unsure.pop((held.job.id, held.job.token), None)
        self.settled += len(helds) - len(lost)
        self.written(name)
        done = OutcomeKind.COMPLETED  # looked up once: per job it would cost more than the comparison
        completed = sum([outcome.kind is done for _, outcome in chosen])
        self.completed[name] = self.completed.get(name, 0) + completed
        if self.events.wanted(EventName.JOBS_SETTLED) or self.events.wanted(EventName.JOBS_RELEASED):
            self._tell(name, chosen, {(job.id, job.token) for job in lost})
        if lost:
            self.events.emit(EventName.LEASE_LOST, ids=[job.id for job in lost], during="settle")

    def _forget(self, helds: Sequence[Held]) -> None:
        succeeded = bool(self.ledger.superseded) and any(held.superseded for held in helds)
        self.ledger.remove(helds)
        if succeeded:
            self.succeeded()  # what waits for their end may follow

    def _options(self) -> settle_ops.SettleOptions:
        if not self.stopping.is_set():
            return self.options
        # This worker claims no more, so others have to look after the lanes of what it settles.
        return dataclasses.replace(self.options, lanes_channel=self.options.channel)

    def _without_stored(self, name: str, chosen: Sequence[Pending], lost: Sequence[Job]) -> list[Job]:
        """Those of `lost` that are lost indeed. The others were written by a try whose answer did not arrive: their lease
        has not ended since, so nobody else can have settled them."""
        now = time.monotonic()
        ends = {(held.job.id, held.job.token) for held, outcome in chosen if outcome.kind in ENDING}
        ours = [job for job in lost if now < self._unsure.get((job.id, job.token), 0.0)]
        # What the crash of a server forgot was written by nobody: its claim, and the row is still there.
        live = self.link.run(settle_ops.live(name, [job.id for job in ours])) if ours else set()
        stored = {(job.id, job.token) for job in ours if job.id not in live or (job.id, job.token) not in ends}
        return [job for job in lost if (job.id, job.token) not in stored]

    def _tell(self, name: str, chosen: Sequence[Pending], lost: set[tuple[int, int]]) -> None:
        by_kind: dict[str, list[int]] = {}
        for held, outcome in chosen:
            if (held.job.id, held.job.token) not in lost:
                by_kind.setdefault(outcome.kind.value, []).append(held.job.id)
        for kind, ids in by_kind.items():
            event = EventName.JOBS_RELEASED if kind == OutcomeKind.RELEASE.value else EventName.JOBS_SETTLED
            self.events.emit(event, queue=name, outcome=kind, ids=ids, count=len(ids))


def _nobody(*facts: object) -> None: ...


def _without_text(held: Held, outcome: Outcome) -> Outcome:
    if outcome.kept is not None:
        return dataclasses.replace(outcome, kept=Kept(outcome.kept.seconds, None, "the database refused it"))
    if outcome.error_json is None:
        return dataclasses.replace(outcome, reason=None)
    return dataclasses.replace(
        outcome, error_json=PLACEHOLDER.to_json(attempt=held.job.attempt), reason=PLACEHOLDER.summary
    )

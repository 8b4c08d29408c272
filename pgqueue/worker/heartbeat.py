"""The heartbeat: its own thread, its own connection, nothing shared with the work. It renews leases and learns of losses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from pgqueue.events import Bus, EventName
from pgqueue.ops import worker as worker_ops
from pgqueue.worker.fitness import Fitness, Verdict
from pgqueue.worker.ledger import Held, Ledger
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop
from pgqueue.worker.options import WorkerOptions

SOON = 0.2


class Heartbeat(Loop):
    """Beats every third of the lease. A beat that fails means "unknown", not "lost": the fence watches the end."""

    name: ClassVar[str] = "heartbeat"

    def __init__(
        self,
        link: Link,
        ledger: Ledger,
        events: Bus,
        options: WorkerOptions,
        worker_id: int,
        identity: worker_ops.Identity,
        *,
        tell: Callable[[Held], None],
        inform: Callable[[Held], None],
        lose: Callable[[Sequence[int], str], None],
        fitness: Fitness,
        report: Callable[[], worker_ops.Report],
        unfit: Callable[[Verdict], None],
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.link = link
        self.ledger = ledger
        self.options = options
        self.worker_id = worker_id
        self.identity = identity
        self.tell = tell
        self.inform = inform
        self.lose = lose
        self.fitness = fitness
        self.report = report
        self.unfit = unfit
        self._next = 0.0
        self._asked = threading.Event()

    def turn(self) -> None:
        """Beat if it is time; then wait for the next beat."""
        if time.monotonic() >= self._next or self._asked.is_set():
            self._asked.clear()
            self._next = time.monotonic() + (self.options.beat_every if self._beat() else SOON)
        # A lease that is claimed meanwhile ends later than the next beat.
        self._asked.wait(min(self.options.beat_every, max(0.01, self._next - time.monotonic())))

    def ask(self) -> None:
        """Beat now: somebody asked for a cancellation, or there is something to report."""
        self._asked.set()

    def stop(self) -> None:
        """End after the beat under way."""
        super().stop()
        self._asked.set()

    def finish(self) -> None:
        """Close the connection."""
        self.link.close()

    def _beat(self) -> bool:
        """False when a lease could not be extended now, because somebody's open transaction holds its row."""
        complete = True
        for queue, tokens in self.ledger.tokens().items():
            sent = time.monotonic()
            ours = self.link.run(worker_ops.beat_leases(self.worker_id, queue, tokens, lease=self.options.lease))
            extended = [token for token, beat in ours.items() if beat.extended]
            self.ledger.renew(extended, sent + self.options.lease)
            complete = complete and len(extended) == len(ours)
            self.lose([token for token in tokens if token not in ours], "taken by a rescue")
            for token, beat in ours.items():
                for held in self.ledger.request_cancel(token, beat.cancelled) if beat.cancelled else ():
                    self.events.emit(EventName.JOB_CANCEL_REQUESTED, id=held.job.id, queue=queue)
                    self.tell(held)
                for held in self.ledger.supersede(token, beat.superseded) if beat.superseded else ():
                    self.events.emit(EventName.JOB_SUPERSEDED, id=held.job.id, queue=queue)
                    self.inform(held)
        self.link.run(worker_ops.beat(self.worker_id, self.identity, self.report()))
        self._compare()
        return complete

    def _compare(self) -> None:
        """Ask how others do, once everything fails here."""
        queues = self.fitness.suspect()
        if queues and not self.stopping.is_set():
            verdict = self.fitness.judge(queues, self.link.run(worker_ops.peers(self.worker_id, queues)))
            if verdict is not None:
                self.unfit(verdict)

"""The claimer: keeps the runners fed, and hoards nothing."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import psycopg

from pgqueue.errors import PgQueueError
from pgqueue.events import Bus, EventName
from pgqueue.job import Job
from pgqueue.limit import Limit
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import claim as claim_ops
from pgqueue.ops import limit as limit_ops
from pgqueue.ops import status as status_ops
from pgqueue.outcome import RELEASED
from pgqueue.task import PROCESS, Registry
from pgqueue.worker.batches import Batches, Group
from pgqueue.worker.breaker import Breaker
from pgqueue.worker.children import ChildRunner
from pgqueue.worker.circuit import Circuits
from pgqueue.worker.coroutines import CoroutineRunner
from pgqueue.worker.ledger import Held, Ledger, Phase
from pgqueue.worker.limits import Limits
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop
from pgqueue.worker.options import WorkerOptions
from pgqueue.worker.settler import Settler
from pgqueue.worker.threads import ThreadRunner

AHEAD = 0.05
"""Seconds of work to hold in the buffer: more would take fast jobs from other workers, less would leave runners waiting."""
MOST_AHEAD = 4000
PER_CLAIM = 1000
"""A claim that is decoded holds the interpreter: four small ones let the runners in between."""
BACKLOG = 5000
HOARD = 1.0
HEARING = 5
"""Polls are this many times rarer while notifications come through."""
DRAIN_POLL = 0.1
PROBE_POLL = 0.05


class Claimer(Loop):
    """Claims what the runners will start within `AHEAD` seconds, judged from how long jobs have taken so far."""

    name: ClassVar[str] = "claim"

    def __init__(
        self,
        link: Link,
        queues: Sequence[str],
        registry: Registry,
        ledger: Ledger,
        events: Bus,
        options: WorkerOptions,
        worker_id: int,
        *,
        settler: Settler,
        breaker: Breaker,
        drained: Callable[[], None],
        hearing: Callable[[], bool],
        channel: str | None,
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.link = link
        self.queues = queues
        self.registry = registry
        self.ledger = ledger
        self.options = options
        self.worker_id = worker_id
        self.settler = settler
        self.breaker = breaker
        self.drained = drained
        self.hearing = hearing
        self.channel = channel
        self.threads: ThreadRunner
        self.coroutines: CoroutineRunner
        self.children: ChildRunner
        self.batches = Batches(
            registry,
            ledger,
            events,
            hand_over=self._hand_over_batch,
            submit=settler.submit,
            hurry=options.drain,
            fatal=fatal,
        )
        self._wake = threading.Event()
        self._hints = {queue: claim_ops.LowWater() for queue in queues}
        self._to_admit: set[str] = set()
        self._marks = {queue: admission_ops.AdmissionMark() for queue in queues}
        self.limits = Limits(queues)
        self._left_out: dict[str, set[str]] = {queue: set() for queue in queues}
        self._seen = (0, 0.0)
        self._average: float | None = None
        self._most = PER_CLAIM
        self._held_up = False
        self._moved = (0, time.monotonic())

    def wake(self) -> None:
        """Something may be claimable: look now."""
        for hint in self._hints.values():
            hint.notified()
        self._wake.set()

    def admit(self, queue: str) -> None:
        """A lane of this queue has changed: look who is next."""
        self._to_admit.add(queue)
        self._wake.set()

    def limit(self, queue: str, limit: Limit) -> None:
        """So this queue is limited now: look, if that is new."""
        if self.limits.learn(queue, limit):
            self.wake()

    def settled(self, queue: str) -> None:
        """Jobs of this queue have ended here: look now if their slots were all that there are."""
        if self.limits.settled(queue):
            self._wake.set()

    def hungry(self) -> None:
        """The buffer runs low: look now."""
        if not self._wake.is_set():  # said by every runner after every job: no lock for saying it again
            self._wake.set()

    def relieved(self) -> None:
        """Outcomes were written: look now if it was their number that held claims up."""
        if self._held_up:
            self._wake.set()

    def stop(self) -> None:
        """End after the claim under way; what that brings is given back."""
        super().stop()
        self.batches.stop()
        self._wake.set()

    def turn(self) -> None:
        """One round over the queues, then wait for hunger, a notification or the poll."""
        self._wake.clear()
        self._give_back_hoard()
        room = self._room()
        left = float(room)
        taken = 0
        more = False
        failure: Exception | None = None
        for queue in self.queues:
            wanted = self.batches.room(queue, left, ahead=MOST_AHEAD)
            try:
                more = self._admit(queue, wanted) or more
            except Exception as error:  # noqa: BLE001 - jobs without keys must not wait for it; raised below
                failure = failure or error
            if wanted > 0 and not self.stopping.is_set():
                asked = min(wanted, self._most)
                got, calls = self._claim(queue, asked, left)
                taken += got
                left -= calls
                more = more or 0 < got == asked
        if failure is not None:
            raise failure
        if self.stopping.is_set() or (more and self._room() > 0):
            return
        if self.options.drain and not taken and room > 0 and not len(self.ledger) and self._all_drained():
            self.drained()
        self._wake.wait(self._until_next(room))

    def _admit(self, queue: str, room: int) -> bool:
        """Whether there is more to admit."""
        mark = self._marks[queue]
        if self.stopping.is_set() or (queue not in self._to_admit and mark.owed_in() != 0):
            return False
        self._to_admit.discard(queue)  # before the look: what changes during it is looked at anew
        try:
            admitted = self.link.run(admission_ops.admit(queue, mark, room=room, channel=self.channel))
        except BaseException:
            self._to_admit.add(queue)
            raise
        if admitted.more:
            self._to_admit.add(queue)
        return admitted.more

    def give_up(self) -> None:
        """A claim that takes longer than its deadline would never succeed: ask for less, and for more again later."""
        self._most = max(1, self._most // 2)

    def finish(self) -> None:
        """Close the connection."""
        self.link.close()

    def _until_next(self, room: int) -> float:
        pause = (DRAIN_POLL if self.options.drain else self.options.poll) * random.uniform(0.8, 1.2)
        if self.hearing() and not self.options.drain:
            pause *= HEARING
        looks = [hint.owed_in() for queue, hint in self._hints.items() if self.limits.open(queue)]
        looks += [mark.owed_in() for mark in self._marks.values()] + [self.limits.due_in()]
        owed = [seconds for seconds in looks if seconds is not None]
        if room > 0 and owed:
            pause = min(pause, max(0.001, min(owed)))
        if (probe_in := self.breaker.due_in()) is not None:
            pause = min(pause, max(PROBE_POLL, probe_in))  # due and not claimed: other queues took the room
        return pause

    def _room(self) -> int:
        self._held_up = True  # before the question: an answer that changes right after it must find the flag
        if self.settler.backlog() > BACKLOG:
            return 0
        self._held_up = False
        waiting = self._waiting()
        return max(0, self.options.concurrency + self._ahead() - waiting - self._running())

    def _ahead(self) -> int:
        """How many jobs to hold beyond those that run."""
        count, spent = self.threads.clocked()
        for runner in (self.coroutines, self.children):
            count, spent = count + runner.count, spent + runner.seconds
        new = count - self._seen[0]
        if new > 0:
            latest = (spent - self._seen[1]) / new
            self._average = latest if self._average is None else 0.7 * self._average + 0.3 * latest
            self._seen = (count, spent)
        if self._average is None:
            return 0
        ahead = int(min(MOST_AHEAD, self.options.concurrency * AHEAD / max(self._average, 1e-6)))
        self.threads.low_mark = self.coroutines.low_mark = self.children.low_mark = ahead // 2
        return ahead

    def _claim(self, queue: str, limit: int, room: float) -> tuple[int, float]:
        """How many jobs were claimed, and how many calls they make."""
        circuits = self.breaker.circuits[queue]
        left_out = circuits.left_out() if circuits.by_task else []
        if not self._left_out[queue] <= set(left_out):
            self._hints[queue].notified()  # what was left out stands behind the marks
        self._left_out[queue] = set(left_out)
        sent = time.monotonic()
        jobs = self._ask(queue, limit, left_out)
        self._most = min(PER_CLAIM, self._most * 2)
        if not jobs:
            return 0, 0.0
        held = self.ledger.add(jobs, sent + self.options.lease, sent)
        if self.events.wanted(EventName.JOBS_CLAIMED):
            self.events.emit(EventName.JOBS_CLAIMED, queue=queue, ids=[job.id for job in jobs])
        calls = self.batches.learn(queue, held, {job.task for job in jobs})
        if self.stopping.is_set():
            self._give_back(held)
            return len(jobs), calls
        if limit > room and (beyond := self.batches.beyond(held, room)):
            self._give_back(beyond)
            held = held[: len(held) - len(beyond)]
        self._hand_over(self._admitted(circuits, held) if circuits.by_task else held)
        if self.limits.full(queue):
            self.batches.hasten(queue)  # the slots are taken: nothing comes that a batch could wait for
        return len(jobs), calls

    def _ask(self, queue: str, limit: int, left_out: Sequence[str]) -> list[Job]:
        """A claim, within the limits of the queue if it has any."""
        options: dict[str, Any] = {
            "left_out": left_out,
            "lease": self.options.lease,
            "low_water": self._hints[queue],
            "worker_id": self.worker_id,
        }
        if (known := self.limits.limit(queue)) is None:
            return self.link.run(claim_ops.claim(queue, limit, relaxed=True, **options))
        if not self.limits.open(queue):
            return []
        settles = self.limits.settles(queue)
        calls = max(0, self.options.concurrency - self._waiting() - self._running())
        free = self.batches.room(queue, float(calls), ahead=MOST_AHEAD)
        granted = self.link.run(limit_ops.claim(queue, limit, free=free, wait=False, **options))
        if self.limits.after(queue, granted, settles):
            self._wake.set()
        if self.events.wanted(EventName.QUEUE_LIMITED):
            self._tell_limited(queue, granted, known)
        return granted.jobs

    def _tell_limited(self, queue: str, granted: limit_ops.Granted, known: Limit) -> None:
        with suppress(psycopg.Error, PgQueueError):  # what is claimed must be handed over
            if self.limits.begins(queue, lambda: self.link.run(limit_ops.waits(queue))):
                self.events.emit(EventName.QUEUE_LIMITED, queue=queue, bound=granted.bound, **known.said())

    def _admitted(self, circuits: Circuits, helds: Sequence[Held]) -> list[Held]:
        """Those that may run now. Of a task whose circuit is open one may, as a probe; the others go back."""
        admitted = [held for held in helds if circuits.admits(held.job)]
        kept = set(admitted)
        self._give_back([held for held in helds if held not in kept])
        return admitted

    def _give_back_hoard(self) -> None:
        """Jobs that wait here behind slow ones, with nothing started for a while, are better run elsewhere."""
        started = self._running()
        started += self.threads.clocked()[0] + self.coroutines.count + self.children.count
        now = time.monotonic()
        if started != self._moved[0] or not self._waiting():
            self._moved = (started, now)
        elif now - self._moved[1] > HOARD:
            self._average = max(self._average or 0.0, HOARD)
            for held in self.ledger.take_all(Phase.WAITING):
                self.settler.submit(held, RELEASED)

    def _running(self) -> int:
        return self.threads.running() + self.coroutines.running() + self.children.running()

    def _waiting(self) -> int:
        return self.threads.buffer.qsize() + self.coroutines.waiting() + self.children.waiting()

    def _give_back(self, helds: Sequence[Held]) -> None:
        for held in helds:
            if self.ledger.take(held):
                self.settler.submit(held, RELEASED)

    def _hand_over(self, helds: Sequence[Held]) -> None:
        wanted = self.events.wanted(EventName.JOB_STARTED)
        self.threads.announce = self.coroutines.announce = self.children.announce = wanted
        names = {held.job.task for held in helds}
        if batched := {name for name in names if self.batches.takes(name)}:
            self.batches.add([held for held in helds if held.job.task in batched], self._is_alone)
            helds = [held for held in helds if held.job.task not in batched]
            names -= batched
        apart = {name for name in names if self._is_isolated(name)}
        if apart or any(held.job.lost for held in helds):
            for_children = {held for held in helds if self.children.takes(held.job)}
            self.children.submit([held for held in helds if held in for_children])
            helds = [held for held in helds if held not in for_children]
        coroutines = {name for name in names if self._is_async(name)}
        for held in helds:
            if held.job.task not in coroutines:
                self.threads.buffer.put(held)
        if coroutines:
            self.coroutines.submit([held for held in helds if held.job.task in coroutines])

    def _hand_over_batch(self, group: Group) -> None:
        task = group.task
        if task.defaults.isolation == PROCESS or (group.most == 1 and self.children.takes(group.helds[0].job)):
            self.children.submit([group])
        elif task.is_async:
            self.coroutines.submit([group])
        else:
            self.threads.buffer.put(group)

    def _is_alone(self, held: Held) -> bool:
        """Whether a job of a batch task gets a call of its own: it may be what its last worker died of, or it is a probe."""
        circuit = self.breaker.circuits[held.job.queue].by_task.get(held.job.task)
        return held.job.lost > 0 or (circuit is not None and circuit.open)

    def _is_isolated(self, name: str) -> bool:
        task = self.registry.get(name)
        return task is not None and task.defaults.isolation == PROCESS

    def _is_async(self, name: str) -> bool:
        # An unknown task is for a thread: the runner records it against that job alone.
        task = self.registry.get(name)
        return task is not None and task.is_async

    def _all_drained(self) -> bool:
        return all(self.link.run(status_ops.drained(queue)) for queue in self.queues)

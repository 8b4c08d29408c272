"""Forming batches: jobs of batch tasks wait here for each other, and are handed over together.

A group is of one queue and one task. It is handed over when it is full, or when its first job has waited for as long as the
task says; and it takes more jobs until a runner takes it up. So batches fill by themselves while all runners are busy.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from pgqueue.events import Bus
from pgqueue.outcome import RELEASED, Outcome
from pgqueue.task import BaseTask, Registry
from pgqueue.worker.ledger import Held, Ledger, Phase
from pgqueue.worker.loop import Loop

LONGEST_SLEEP = 3600.0
TINY = 1e-6
STEADY = 0.5
"""How much of what was learned of a queue stays at each claim."""


class Group:
    """Jobs for one call. `stop` is what ends that: see Held.stop."""

    __slots__ = ("_batches", "closed", "due", "helds", "most", "queue", "sent", "stop", "task")

    def __init__(self, batches: Batches, task: BaseTask[..., Any], queue: str, most: int, due: float) -> None:
        self._batches = batches
        self.task = task
        self.queue = queue
        self.most = most
        self.due = due
        self.helds: list[Held] = []
        self.sent = False
        self.closed = False
        self.stop: object | None = None

    def close(self) -> list[Held]:
        """A runner takes it up: these are its jobs, in the order of their places in line, and there will be no more."""
        self._batches.close(self)
        # Jobs of several claims may be here: one that was released in between keeps its old place.
        return sorted(self.helds, key=_place)


class Batches(Loop):
    """Groups that still take jobs. Its thread is there from the first one on that waits.

    `hand_over` gets groups, from any thread. With `hurry` no group waits: a worker that is to leave when its queues are
    empty must not wait for jobs that do not come.
    """

    name: ClassVar[str] = "batches"

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        events: Bus,
        *,
        hand_over: Callable[[Group], None],
        submit: Callable[[Held, Outcome], None],
        hurry: bool,
        fatal: Callable[[str, BaseException], None],
    ) -> None:
        super().__init__(events, fatal)
        self.registry = registry
        self.ledger = ledger
        self.hand_over = hand_over
        self.submit = submit
        self.hurry = hurry
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Group] = {}
        self._sent = 0
        self._bell = threading.Event()
        self._calls_per_job: dict[str, float] = {}

    # How many jobs a worker has room for

    def weight(self, name: str) -> float:
        """How much of a call a job of the task of that name is."""
        task = self.registry.get(name)
        return 1.0 if task is None or task.defaults.batch is None else 1.0 / task.defaults.batch_fill

    def room(self, queue: str, calls: float, *, ahead: int) -> int:
        """How many jobs of this queue make so many calls, judged from what the last claims of it brought. Batches that wait
        for a runner hold at most `ahead` jobs."""
        each = self._calls_per_job.get(queue)
        if each is None:
            each = self._calls_per_job[queue] = self._first_guess(queue)
        if each >= 1.0 or calls <= 0:
            return max(0, int(calls))
        return max(0, min(int(calls / each + TINY), ahead - self._sent))

    def learn(self, queue: str, helds: Sequence[Held], names: Iterable[str]) -> float:
        """A claim brought these, of tasks of these names; returns how many calls they make."""
        weights = {name: self.weight(name) for name in names}
        if all(weight == 1.0 for weight in weights.values()) and self._calls_per_job.get(queue) == 1.0:
            return float(len(helds))
        # What was lost before is called alone.
        calls = math.fsum(1.0 if held.job.lost else weights[held.job.task] for held in helds)
        old = self._calls_per_job.get(queue, 1.0)
        self._calls_per_job[queue] = old * STEADY + (1.0 - STEADY) * calls / len(helds)
        return calls

    def beyond(self, helds: Sequence[Held], calls: float) -> list[Held]:
        """What of a claim is more than so many calls: it had brought batches before, and other jobs now."""
        taken = 0.0
        for number, held in enumerate(helds):
            taken += 1.0 if held.job.lost else self.weight(held.job.task)
            if taken > calls + 1.0 + TINY:
                return list(helds[number:])
        return []

    def _first_guess(self, queue: str) -> float:
        weights = [self.weight(name) for name, task in list(self.registry.items()) if task.defaults.queue == queue]
        return max(weights, default=1.0)

    # Forming

    def takes(self, name: str) -> bool:
        """Whether jobs of the task of that name are called in batches."""
        task = self.registry.get(name)
        return task is not None and task.defaults.batch is not None

    def add(self, helds: Sequence[Held], alone: Callable[[Held], bool]) -> None:
        """Take jobs of batch tasks in; those that are to run `alone` get a group each."""
        ready: list[Group] = []
        with self._lock:
            if not self.stopping.is_set():
                for held in helds:
                    task = self.registry.find(held.job.task)
                    self._join(held, task, ready, alone=alone(held))
                helds = ()
        for group in ready:
            self.hand_over(group)
        for held in helds:
            self._give_back(held)

    def _join(self, held: Held, task: BaseTask[..., Any], ready: list[Group], *, alone: bool) -> None:
        key = (held.job.queue, task.name)
        group = None if alone else self._open.get(key)
        if group is None:
            wait = 0.0 if self.hurry or alone else task.defaults.wait_seconds
            most = 1 if alone else task.defaults.batch or 1
            group = Group(self, task, held.job.queue, most, time.monotonic() + wait)
            if not alone:
                self._open[key] = group
            if wait > 0:
                self._ring()
        group.helds.append(held)
        held.stop = group
        if group.sent:
            self._sent += 1
        elif len(group.helds) >= min(group.most, task.defaults.batch_fill) or group.due <= time.monotonic():
            self._send(group)
            ready.append(group)
        if len(group.helds) >= group.most and not alone:
            del self._open[key]

    def hasten(self, queue: str) -> None:
        """Hand over what waits in this queue: nothing more comes for now."""
        with self._lock:
            ready = [group for group in self._open.values() if group.queue == queue and not group.sent and group.helds]
            for group in ready:
                self._send(group)
        for group in ready:
            self.hand_over(group)

    def _send(self, group: Group) -> None:
        group.sent = True
        self._sent += len(group.helds)

    def close(self, group: Group) -> None:
        """This group takes no more jobs."""
        with self._lock:
            if not group.closed:
                group.closed = True
                self._sent -= len(group.helds)
                if self._open.get((group.queue, group.task.name)) is group:
                    del self._open[group.queue, group.task.name]

    def cancel(self, held: Held) -> None:
        """Something has happened to this job: one that still waits here, and is cancelled or superseded, ends now. Its group
        keeps its time, so that what follows a superseded job does not begin to wait anew."""
        ends = held.cancel_requested or held.superseded
        if ends and held.phase is Phase.WAITING and isinstance(held.stop, Group):
            self._give_back(held)

    def _give_back(self, held: Held) -> None:
        if self.ledger.take(held):
            self.submit(held, RELEASED)

    # The thread

    def _ring(self) -> None:
        if self._thread.ident is None and not self.stopping.is_set():
            self.start()
        self._bell.set()

    def turn(self) -> None:
        """Hand over what has waited long enough, then wait for the next one."""
        self._bell.clear()
        now = time.monotonic()
        with self._lock:
            due = [group for group in self._open.values() if not group.sent and group.due <= now]
            for group in due:
                self._send(group)
            next_at = min((group.due for group in self._open.values() if not group.sent), default=math.inf)
        for group in due:
            self.hand_over(group)
        if not self.stopping.is_set():
            self._bell.wait(min(LONGEST_SLEEP, max(0.0, next_at - time.monotonic())))

    def stop(self) -> None:
        """From now on nothing more is taken in or handed over: what waits is the worker's to give back."""
        with self._lock:
            super().stop()
        self._bell.set()


def _place(held: Held) -> tuple[int, int]:
    return -held.job.priority, held.job.position

"""Runner threads for plain functions: they pull from one queue, and push outcomes to the settler.

A thread cannot be stopped from outside. One whose job goes on past its timeout is stuck: it keeps its job, so that no second
attempt overlaps it, and another thread takes its slot, so that the others are not held up.
"""

from __future__ import annotations

import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pgqueue.current import CurrentJob
from pgqueue.events import EventName
from pgqueue.outcome import COMPLETED, Outcome
from pgqueue.task import BaseTask
from pgqueue.worker.batch_call import BatchCall, rescue
from pgqueue.worker.batches import Group
from pgqueue.worker.execution import Runner, prepare
from pgqueue.worker.ledger import Held, Phase
from pgqueue.worker.wrapping import call_function


class ThreadRunner(Runner):
    """`concurrency` threads, and at most as many stuck ones beside them. `limit` is called with every time, on the monotonic
    clock, at which a job may come to be past its timeout."""

    def __init__(self, *shared: Any, **more: Any) -> None:
        super().__init__(*shared, **more)
        self.limit: Callable[[float], None] = _nobody
        self.buffer: queue.SimpleQueue[Held | Group | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._slots = [_Slot(self, number) for number in range(self.concurrency)]
        self._stuck: list[_Slot] = []

    def start(self) -> None:
        """Start all threads."""
        for slot in self._slots:
            slot.start()

    def stop(self) -> None:
        """Let every thread end after the job it runs."""
        for _ in self._slots:
            self.buffer.put(None)

    def idle(self) -> bool:
        """True when every thread has ended or waits."""
        return not any(slot.busy for slot in [*self._slots, *self._stuck])

    def running(self) -> int:
        """How many threads are in a job now, but for the stuck ones."""
        return sum(slot.busy for slot in self._slots)

    def clocked(self) -> tuple[int, float]:
        """Jobs done in time and seconds spent in them, since the start."""
        slots = self._slots
        return sum(slot.count for slot in slots), sum(slot.seconds for slot in slots)

    def stuck(self) -> list[Held]:
        """The jobs of this worker that still run past their timeout."""
        helds = [held for slot in self._stuck if slot.busy for held in slot.helds]
        return [held for held in helds if held.phase is Phase.RUNNING]

    def replace_stuck(self, now: float) -> int:
        """Put a new thread in the place of every one that is past its timeout, as long as there are at most `concurrency`
        stuck ones; returns how many there are."""
        for slot in self._slots:
            if slot.deadline <= now and (helds := slot.give_up()):
                with self._changing:
                    self._stuck = [*self._stuck, slot]
                    stuck = len(self._stuck)
                    self._slots = [other for other in self._slots if other is not slot]
                    if stuck <= self.concurrency:
                        self._slots.append(successor := _Slot(self, slot.number, slot.count, slot.seconds))
                        successor.start()
                for held in helds:
                    self._tell(held, stuck)
                self.hungry()
        return len(self._stuck)

    def first_deadline(self) -> float:
        """When the next job comes to be past its timeout; infinity where none has one."""
        return min((slot.deadline for slot in self._slots), default=math.inf)

    def forget(self, slot: _Slot) -> None:
        """A stuck thread has come to its end after all."""
        with self._changing:
            self._stuck = [other for other in self._stuck if other is not slot]

    def _tell(self, held: Held, stuck: int) -> None:
        job = held.job
        facts: dict[str, Any] = {"id": job.id, "queue": job.queue, "task": job.task, "attempt": job.attempt}
        self.events.emit(EventName.JOB_OVERDUE, **facts, timeout=job.timeout, stuck=stuck)


class _Slot:
    """One thread. `helds`: what it runs, where that has a timeout. `deadline` is when it comes to be past that, infinity
    without one."""

    def __init__(self, runner: ThreadRunner, number: int, count: int = 0, seconds: float = 0.0) -> None:
        self.runner = runner
        self.number = number
        self.busy = False
        self.count = count
        self.seconds = seconds
        self.deadline = math.inf
        self.helds: Sequence[Held] = ()
        self._replaced = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"pgqueue-runner-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def give_up(self) -> Sequence[Held]:
        """Stuck: the thread ends after these jobs. None when they have ended just now."""
        with self._lock:
            if self.deadline == math.inf:
                return ()
            self.deadline = math.inf
            self._replaced = True
            return self.helds

    def _run(self) -> None:
        buffer, runner = self.runner.buffer, self.runner
        while not self._replaced:
            held = buffer.get()
            if held is None:
                return
            self.busy = True
            began = time.monotonic()
            try:
                if isinstance(held, Held):
                    self._job(held, began)
                else:
                    self._batch(held, began)
            except BaseException as error:  # noqa: BLE001 - whatever escapes, the thread lives and the job gets an outcome
                rescue(runner, held, error)
            finally:
                if self.helds:
                    self._in_time()
                self.count += 1
                self.seconds += time.monotonic() - began
                self.busy = False
            if buffer.qsize() <= runner.low_mark:
                runner.hungry()
        runner.forget(self)

    def _job(self, held: Held, began: float) -> None:
        current = self.runner.begin(held)
        if current is None:
            return
        timeout = held.job.timeout
        if timeout is not None:
            self._limit((held,), began, timeout)
        outcome, error = self._call(held, current)
        self.runner.end(held, outcome, error)

    def _batch(self, group: Group, began: float) -> None:
        call = BatchCall(self.runner, group)
        if not call.batch:
            return
        if call.timeout is not None:
            self._limit(call.helds, began, call.timeout)
        call.run()

    def _limit(self, helds: Sequence[Held], began: float, timeout: float) -> None:
        if timeout < math.inf:
            self.helds = helds
            self.deadline = began + timeout
            self.runner.limit(self.deadline)

    def _in_time(self) -> None:
        """The job has ended; from here on it is too late to give this thread up."""
        with self._lock:
            self.deadline = math.inf
            self.helds = ()

    def _call(self, held: Held, current: CurrentJob) -> tuple[Outcome, BaseException | None]:
        task: BaseTask[..., Any] | None = None
        try:
            task, args, kwargs = prepare(self.runner.registry.find, held.job)
            result = call_function(task, current, contextvars.copy_context(), args, kwargs)
            if task.keeps is not None:
                return self.runner.desk.returned(current, result), None
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt too: a failed attempt, never a dead runner
            return self.runner.raised(held, task, error), error
        return COMPLETED, None


def _nobody(deadline: float) -> None: ...

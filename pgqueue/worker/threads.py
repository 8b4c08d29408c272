"""Runner threads for plain functions: they pull from one queue, and push outcomes to the settler."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable

from pgqueue.current import CurrentJob, enter
from pgqueue.events import Bus, EventName
from pgqueue.job import Job
from pgqueue.outcome import RELEASED, Outcome
from pgqueue.task import Registry
from pgqueue.worker.execution import Finish, check_result, judge, prepare, report
from pgqueue.worker.ledger import Held, Ledger, Start

Extend = Callable[[Job, float], None]


class ThreadRunner:
    """`concurrency` threads. `hungry` is called when the buffer runs low, so that the next claim is under way in time.
    `announce`, refreshed at every claim, says whether anybody wants to hear of every start."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        events: Bus,
        *,
        concurrency: int,
        finish: Finish,
        extend: Extend,
        hungry: Callable[[], None],
    ) -> None:
        self.registry = registry
        self.ledger = ledger
        self.events = events
        self.finish = finish
        self.extend = extend
        self.hungry = hungry
        self.buffer: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
        self.low_mark = 0
        self.announce = True
        self._slots = [_Slot(self, number) for number in range(concurrency)]

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
        return all(not slot.busy for slot in self._slots)

    def running(self) -> int:
        """How many threads are in a job now."""
        return sum(slot.busy for slot in self._slots)

    def rescue(self, held: Held, error: BaseException) -> None:
        """Something of ours failed around a job: that is a failed attempt of it, unless its outcome is known already."""
        if self.ledger.take(held):
            self.finish(held, judge(held, error, prepared=True))

    def clocked(self) -> tuple[int, float]:
        """Jobs done and seconds spent in them, since the start."""
        return sum(slot.count for slot in self._slots), sum(slot.seconds for slot in self._slots)


class _Slot:
    def __init__(self, runner: ThreadRunner, number: int) -> None:
        self.runner = runner
        self.busy = False
        self.count = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"pgqueue-runner-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        buffer, runner = self.runner.buffer, self.runner
        while True:
            held = buffer.get()
            if held is None:
                return
            self.busy = True
            began = time.monotonic()
            try:
                self._job(held)
            except BaseException as error:  # noqa: BLE001 - whatever escapes, the thread lives and the job gets an outcome
                runner.rescue(held, error)
            finally:
                self.count += 1
                self.seconds += time.monotonic() - began
                self.busy = False
            if buffer.qsize() <= runner.low_mark:
                runner.hungry()

    def _job(self, held: Held) -> None:
        runner = self.runner
        current = CurrentJob(held.job, runner.extend)
        start = runner.ledger.begin(held, current)
        if start is Start.GIVE_BACK:
            runner.finish(held, RELEASED)
        if start is not Start.RUN:
            return
        if runner.announce:
            runner.events.emit(EventName.JOB_STARTED, id=held.job.id, task=held.job.task, attempt=held.job.attempt)
        outcome, error = self._call(held, current)
        if runner.ledger.take(held):
            runner.finish(held, outcome)
            report(runner.events, held, outcome, error)

    def _call(self, held: Held, current: CurrentJob) -> tuple[Outcome, BaseException | None]:
        prepared = False
        try:
            task, args, kwargs = prepare(self.runner.registry, held.job)
            prepared = True
            context = contextvars.copy_context()
            context.run(enter, current)
            check_result(context.run(task.function, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt too: a failed attempt, never a dead runner
            return judge(held, error, prepared=prepared), error
        return judge(held, None, prepared=True), None

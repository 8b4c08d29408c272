"""Runner of jobs in child processes: those of tasks that ask for it, and those whose worker was lost before.

A job that kills its process costs itself an attempt, and nobody else anything.
"""

from __future__ import annotations

import functools
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pgqueue.errors import ConfigurationError
from pgqueue.job import Job
from pgqueue.outcome import RELEASED
from pgqueue.task import PROCESS
from pgqueue.worker import platform
from pgqueue.worker.batch_call import BatchCall, rescue
from pgqueue.worker.batches import Group
from pgqueue.worker.channel import Message, pack
from pgqueue.worker.child_process import ChildGone, ChildProcess
from pgqueue.worker.execution import WORKER_LOST, Runner, judge, lost
from pgqueue.worker.ledger import Held
from pgqueue.worker.places import Places
from pgqueue.worker.talk import Result, Talk

IDLE = 60.0
"""Seconds after which a child that had nothing to do is let go."""
BOOTS = max(1, (os.cpu_count() or 2) // 2)
"""Children that may start at once."""


class ChildRunner(Runner):
    """At most `concurrency` children, started on demand; each runs one job at a time, and is used again while it is well."""

    def __init__(self, places: Places, *shared: Any, **more: Any) -> None:
        super().__init__(*shared, **more)
        self.places = places
        self.giving_back = False
        self.buffer: queue.SimpleQueue[Held | Group | None] = queue.SimpleQueue()
        self.count = 0
        self.seconds = 0.0
        self._changing = threading.Lock()
        self._seats: list[_Seat] = []
        self._leaving: list[_Seat] = []

    def takes(self, job: Job) -> bool:
        """Whether this job is to run in a child: its task asks for it, or it may be what its last worker died of."""
        task = self.registry.get(job.task)
        if task is None:
            return False  # a thread records that against the job
        poison = job.lost > 0 and not platform.lacks() and self.places.get(job.task) is not None
        return task.defaults.isolation == PROCESS or poison

    def submit(self, items: Sequence[Held | Group]) -> None:
        """Hand jobs or batches over."""
        with self._changing:
            for item in items:
                self.buffer.put(item)
            self._add_seats()

    def booted(self) -> None:
        """A child has come up, or has failed to: there may be use for another one."""
        with self._changing:
            self._add_seats()

    def _add_seats(self) -> None:
        # Few at a time: ten that start at once are all late, and what one of them does in a moment waits for it meanwhile.
        free = sum(not seat.helds for seat in self._seats)
        booting = sum(not seat.up for seat in self._seats)
        wanted = min(self.buffer.qsize() - free, self.concurrency - len(self._seats), BOOTS - booting)
        for _ in range(0 if self.giving_back else wanted):
            seat = _Seat(self, len(self._seats))
            self._seats.append(seat)
            seat.start()

    def cancel(self, held: Held) -> None:
        """Something has happened to this job: let who runs it look, if it runs here. From any thread."""
        seat = held.stop
        if isinstance(seat, _Seat):
            seat.ring()

    def running(self) -> int:
        """How many jobs or batches are in a child now."""
        return sum(bool(seat.helds) for seat in self._seats)

    def waiting(self) -> int:
        """How many jobs or batches wait in the buffer."""
        return self.buffer.qsize()

    def held(self) -> list[Held]:
        """The jobs that are in a child now."""
        return [held for seat in self._seats for held in seat.helds]

    def give_back(self, seconds: float) -> None:
        """Kill the children that are in a job, and release these jobs. In this order, so that no other run overlaps: a child
        that is not gone within `seconds` keeps its job, until the lease ends."""
        self.giving_back = True
        for seat in list(self._seats):
            seat.ring()
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            time.sleep(0.005)

    def stop(self) -> None:
        """Let every child leave after its job. A second call is for what has begun meanwhile."""
        with self._changing:
            self._leaving += self._seats
            for _ in self._seats:
                self.buffer.put(None)

    def join(self, seconds: float) -> None:
        """Wait for that."""
        end = time.monotonic() + seconds
        for seat in self._leaving:
            seat.join(max(0.0, end - time.monotonic()))

    def next(self, seat: _Seat) -> Held | Group | None:
        """The next job or batch for this seat; None when it is to end: the worker stops, or nothing has come for a while."""
        with suppress(queue.Empty):
            return self.buffer.get(timeout=IDLE)
        with self._changing:
            with suppress(queue.Empty):
                return self.buffer.get_nowait()
            self._seats.remove(seat)  # in one step with the look: what is submitted now gets a seat of its own
        return None

    def forget(self, seat: _Seat) -> None:
        """This seat is no more."""
        with self._changing:
            if seat in self._seats:
                self._seats.remove(seat)

    def clock(self, seconds: float) -> None:
        """A job took so long."""
        with self._changing:
            self.count += 1
            self.seconds += seconds

    def hello(self) -> Message:
        """What a child is told at its start."""
        settings = self.places.app.settings
        chosen = {
            "database_url": settings.database_url,
            "schema": settings.schema,
            "archive": settings.archive,
            "notify": settings.notify,
        }
        return {
            "path": pack(sys.path),
            "argv": pack(sys.argv),
            "modules": self.places.modules(),
            "settings": {name: value for name, value in chosen.items() if value is not None},
            "told": self.places.app.told(),
        }


class _Seat:
    """A thread that gives jobs, one after another, to a child process of its own."""

    def __init__(self, runner: ChildRunner, number: int) -> None:
        self.runner = runner
        self.helds: Sequence[Held] = ()
        self.up = False
        self._child: ChildProcess | None = None
        self._bell, self._cord = socket.socketpair()
        self._cord.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"pgqueue-child-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def ring(self) -> None:
        """Look what has happened; from any thread."""
        with suppress(OSError):
            self._cord.send(b"\0")

    def _run(self) -> None:
        try:
            while (item := self.runner.next(self)) is not None:
                self._turn(item)
        finally:
            self.runner.forget(self)
            if self._child is not None:
                self._child.end()
            self._bell.close()
            self._cord.close()

    def _turn(self, item: Held | Group) -> None:
        runner, began = self.runner, time.monotonic()
        self.helds = (item,) if isinstance(item, Held) else item.helds
        try:
            if isinstance(item, Held):
                self._job(item)
            else:
                self._batch(item)
        except BaseException as error:  # noqa: BLE001 - whatever escapes, the seat lives and the job gets an outcome
            self._kill()
            rescue(runner, item, error)
        finally:
            runner.clock(time.monotonic() - began)
            self.helds = ()
            if not self.up:
                self.up = True  # it did not come up, or had nothing to run: the next one may try beside it
                runner.booted()
        if runner.waiting() <= runner.low_mark:
            runner.hungry()

    def _job(self, held: Held) -> None:
        held.stop = self
        if self.runner.begin(held) is not None:
            [(outcome, error)] = self._attempt([held])
            if self.runner.ledger.take(held):
                self.runner.finish_or_doubt(held, outcome, error)

    def _batch(self, group: Group) -> None:
        call = BatchCall(self.runner, group, stop=self, decode=False)
        if call.batch:
            self.helds = call.helds
            ended = self._attempt(call.helds, batch=group.task.defaults.batch, timeout=call.timeout)
            call.settle([(held, *result) for held, result in zip(call.helds, ended, strict=True)])

    def _attempt(
        self, helds: Sequence[Held], *, batch: int | None = None, timeout: float | None = None
    ) -> list[Result]:
        """Run a job, or the jobs of a batch, in a child. Every way out but outcomes leaves no process behind."""
        while True:
            fresh = self._child is None
            talk = Talk(self.runner, helds, batch=batch, timeout=timeout)
            try:
                self._talk(talk)
            except ChildGone as gone:
                self._kill()
                if not self.runner.giving_back and not fresh and not talk.began:
                    continue  # a child that died between two jobs has nothing to do with this one
                return [talk.results.get(held.job.id) or self._lost(held, talk, str(gone)) for held in helds]
            except TimeoutError as error:
                self._kill()
                plain = TimeoutError(str(error))  # without our own traceback
                return [talk.results.get(held.job.id) or self._late(held, plain) for held in helds]
            except ConfigurationError as error:
                return [(judge(held, error, prepared=False), "ConfigurationError") for held in helds]
            return [talk.results.get(held.job.id, (RELEASED, None)) for held in helds]

    def _lost(self, held: Held, talk: Talk, how: str) -> Result:
        if self.runner.giving_back:
            return RELEASED, None
        return lost(held, how, prepared=talk.began, apart=talk.batch is not None), WORKER_LOST

    def _late(self, held: Held, error: TimeoutError) -> Result:
        task = self.runner.registry.get(held.job.task)
        tell = functools.partial(self.runner.broken_policy, held)
        return judge(held, error, prepared=True, task=task, tell=tell), "TimeoutError"

    def _talk(self, talk: Talk) -> None:
        place = self.runner.places.of(talk.task_name)
        if self._child is None:
            self._child = ChildProcess(self._bell, largest_result=self.runner.desk.settings.max_result_bytes)
            self._child.send(hello=self.runner.hello())
            while not any("ready" in message for message in talk.listen(self._child)):
                continue
        if not self.up:
            self.up = True
            self.runner.booted()
        if talk.run(self._child, place):
            child, self._child = self._child, None
            child.end()

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()

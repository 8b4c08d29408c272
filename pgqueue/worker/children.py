"""Runner of jobs in child processes: those of tasks that ask for it, and those whose worker was lost before.

A job that kills its process costs itself an attempt, and nobody else anything.
"""

from __future__ import annotations

import functools
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pgqueue.current import Stage
from pgqueue.errors import ConfigurationError, LeaseLost
from pgqueue.failure import one_line
from pgqueue.job import Job
from pgqueue.outcome import RELEASED, Outcome
from pgqueue.task import PROCESS
from pgqueue.worker import platform
from pgqueue.worker.channel import Message, pack, read_outcome
from pgqueue.worker.child_process import ChildGone, ChildProcess
from pgqueue.worker.execution import WORKER_LOST, Runner, heeding, judge, lost, tell_missing
from pgqueue.worker.ledger import Held, Phase
from pgqueue.worker.places import Places

IDLE = 60.0
"""Seconds after which a child that had nothing to do is let go."""
BOOT = 120.0
"""Seconds that a child may take to import the application."""
BOOTS = max(1, (os.cpu_count() or 2) // 2)
"""Children that may start at once."""
UNWIND = 1.0
"""Seconds that an `async def` past its timeout, and a job whose lease is lost, get before their process is killed."""
Result = tuple[Outcome, str | None]
"""What came of a job, and the class of its error."""


class ChildRunner(Runner):
    """At most `concurrency` children, started on demand; each runs one job at a time, and is used again while it is well."""

    def __init__(self, places: Places, *shared: Any, **more: Any) -> None:
        super().__init__(*shared, **more)
        self.places = places
        self.giving_back = False
        self.buffer: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
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

    def submit(self, helds: Sequence[Held]) -> None:
        """Hand jobs over."""
        with self._changing:
            for held in helds:
                self.buffer.put(held)
            self._add_seats()

    def booted(self) -> None:
        """A child has come up, or has failed to: there may be use for another one."""
        with self._changing:
            self._add_seats()

    def _add_seats(self) -> None:
        # Few at a time: ten that start at once are all late, and what one of them does in a moment waits for it meanwhile.
        free = sum(seat.held is None for seat in self._seats)
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
        """How many jobs are in a child now."""
        return sum(seat.held is not None for seat in self._seats)

    def waiting(self) -> int:
        """How many jobs wait in the buffer."""
        return self.buffer.qsize()

    def held(self) -> list[Held]:
        """The jobs that are in a child now."""
        return [held for seat in self._seats if (held := seat.held) is not None]

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

    def next(self, seat: _Seat) -> Held | None:
        """The next job for this seat; None when it is to end: the worker stops, or nothing has come for a while."""
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
        }


class _Seat:
    """A thread that gives jobs, one after another, to a child process of its own."""

    def __init__(self, runner: ChildRunner, number: int) -> None:
        self.runner = runner
        self.held: Held | None = None
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
            while (held := self.runner.next(self)) is not None:
                self.held = held
                self._job(held)
        finally:
            self.runner.forget(self)
            if self._child is not None:
                self._child.end()
            self._bell.close()
            self._cord.close()

    def _job(self, held: Held) -> None:
        runner, began = self.runner, time.monotonic()
        held.stop = self
        try:
            if runner.begin(held) is not None:
                outcome, error = self._attempt(held)
                if runner.ledger.take(held):
                    runner.finish_or_doubt(held, outcome, error)
        except BaseException as error:  # noqa: BLE001 - whatever escapes, the seat lives and the job gets an outcome
            self._kill()
            runner.rescue(held, error)
        finally:
            runner.clock(time.monotonic() - began)
            self.held = None
            if not self.up:
                self.up = True  # it did not come up, or had nothing to run: the next one may try beside it
                runner.booted()
        if runner.waiting() <= runner.low_mark:
            runner.hungry()

    def _attempt(self, held: Held) -> Result:
        """Run the job in a child. Every way out but an outcome leaves no process behind."""
        while True:
            fresh = self._child is None
            talk = _Talk(self.runner, held)
            try:
                return self._talk(talk)
            except ChildGone as gone:
                self._kill()
                if self.runner.giving_back:
                    return RELEASED, None
                if fresh or talk.began:
                    return lost(held, str(gone), prepared=talk.began), WORKER_LOST
                # A child that died between two jobs has nothing to do with this one.
            except TimeoutError as error:
                self._kill()
                plain = TimeoutError(str(error))  # without our own traceback
                task = self.runner.registry.get(held.job.task)
                tell = functools.partial(self.runner.broken_policy, held)
                return judge(held, plain, prepared=True, task=task, tell=tell), "TimeoutError"
            except ConfigurationError as error:
                return judge(held, error, prepared=False), "ConfigurationError"

    def _talk(self, talk: _Talk) -> Result:
        place = self.runner.places.of(talk.held.job.task)
        if self._child is None:
            self._child = ChildProcess(self._bell, largest_result=self.runner.desk.settings.max_result_bytes)
            self._child.send(hello=self.runner.hello())
            while not any("ready" in message for message in talk.listen(self._child)):
                continue
        if not self.up:
            self.up = True
            self.runner.booted()
        result, worn = talk.run(self._child, place)
        if worn:
            child, self._child = self._child, None
            child.end()
        return result

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _Talk:
    """The conversation with a child about one job."""

    def __init__(self, runner: ChildRunner, held: Held) -> None:
        self.runner = runner
        self.held = held
        self.began = False
        self._asked = self._doomed = self._said = False
        self._end = time.monotonic() + BOOT
        self._why = ""

    def run(self, child: ChildProcess, place: Sequence[str]) -> tuple[Result, bool]:
        """Until there is an outcome, and whether the child should run no other job. ChildGone, or TimeoutError."""
        job = self.held.job
        if self.held.phase is not Phase.RUNNING:  # its lease was lost while the child started
            return (RELEASED, None), False
        task = self.runner.registry.get(job.task)
        limit = None if task is None else task.defaults.memory_limit
        child.send(job=list(job), place=list(place), memory_limit=limit, keep=self._keep())
        self._limit(time.monotonic() + BOOT, "")
        while True:
            for message in self.listen(child):
                if "began" in message:
                    self.began = True
                    self._count_from_now(slack=UNWIND if task is not None and task.is_async else 0.0)
                elif "extend" in message:
                    child.send(extended=self._extend(message))
                elif "outcome" in message:
                    self._settling(message)
                    return self._outcome(message), bool(message.get("worn"))
                elif "settling" in message or "progress" in message or "missing" in message:
                    self._take(message)

    def listen(self, child: ChildProcess) -> list[Message]:
        """What the child says, or nothing when there is something else to see to."""
        if self.runner.giving_back:
            raise ChildGone("the worker stops")
        if self.began:
            self._pass_on(child)
        if time.monotonic() >= self._end:
            if self.began:
                raise TimeoutError(f"the job {self._why}: its process was killed")
            raise ChildGone(f"its process was not ready within {BOOT:g} s")
        return child.receive(self._end)

    def _pass_on(self, child: ChildProcess) -> None:
        lease_lost = self.held.phase is Phase.LOST
        if not self._asked and (lease_lost or self.held.cancel_requested):
            self._asked = True
            child.send(cancel=self.held.job.token)
        if self.held.superseded and not self._said:
            self._said = True
            child.send(superseded=self.held.job.token)
        if lease_lost and not self._doomed:
            self._doomed = True
            self._limit(min(self._end, time.monotonic() + UNWIND), "went on after its lease was lost")

    def _count_from_now(self, *, slack: float) -> None:
        timeout = self.held.job.timeout
        if timeout is None:
            self._limit(math.inf, "")
        else:
            self._limit(time.monotonic() + timeout + slack, f"ran for longer than its timeout of {timeout:g} s")

    def _limit(self, end: float, why: str) -> None:
        self._end, self._why = end, why

    def _extend(self, message: Message) -> str:
        if message.get("token") != self.held.job.token:
            return "lost"  # asked for by something that an earlier job has left behind
        try:
            self.runner.extend(self.held.job, float(message["extend"]))
        except LeaseLost:
            return "lost"
        except Exception as error:  # noqa: BLE001 - the handler gets it
            return one_line(f"{type(error).__name__}: {error!s}", 500)
        return ""

    def _keep(self) -> list[float] | None:
        task = self.runner.registry.get(self.held.job.task)
        if task is None or task.keeps is None:
            return None
        return [task.keeps, self.runner.desk.settings.max_result_bytes]

    def _take(self, message: Message) -> None:
        """What the job says of itself, unless an earlier one has left it behind."""
        if message.get("token") != self.held.job.token:
            return
        if "missing" in message:
            tell_missing(self.runner.events, self.held.job)
        elif "progress" in message and self.held.current is not None:
            with suppress(ConfigurationError, TypeError, ValueError):
                percent, text = message["progress"]
                self.runner.desk.progress(self.held.current, percent, text)
        else:
            self._settling(message)

    def _settling(self, message: Message) -> None:
        stage = str(message.get("settling"))
        if self.held.current is not None and stage in Stage.__members__:
            self.held.current.note(Stage[stage])
            self.held.current.frees = message.get("frees") is True

    def _outcome(self, message: Message) -> Result:
        try:
            outcome = read_outcome(message["outcome"])
        except (ValueError, TypeError) as error:
            raise ChildGone("its process has said something that is no outcome") from error
        for problem in message.get("problems") or ():
            self.runner.broken_policy(self.held, one_line(str(problem)))
        kind = message.get("error")
        return heeding(self.held, outcome), None if kind is None else one_line(str(kind))

"""A child process of a worker: runs one job after another, each in the main thread, until its parent lets it go.

Started as ``python -m pgqueue.worker.child DESCRIPTOR PARENT`` in a session of its own. The parent decides everything: this
process ignores stop signals, and ends together with all that its job has started as soon as the parent is gone.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import dataclasses
import functools
import importlib
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pgqueue.batch import Batch, BatchJob
from pgqueue.config import load_settings, validate_seconds
from pgqueue.core import Core
from pgqueue.current import CurrentJob, enter
from pgqueue.errors import DatabaseUnavailable, LeaseLost
from pgqueue.failure import describe, one_line
from pgqueue.job import Job
from pgqueue.outcome import COMPLETED, Outcome
from pgqueue.task import BaseTask
from pgqueue.worker import places
from pgqueue.worker.batch_call import answers, begin_clock, call, call_async, fill_in, results
from pgqueue.worker.channel import Channel, Message, outcome_message, read_job, unpack
from pgqueue.worker.desk import Desk
from pgqueue.worker.execution import limited, prepare, verdict
from pgqueue.worker.processes import stop_signals
from pgqueue.worker.trickle import Trickle
from pgqueue.worker.wrapping import call_coroutine, call_function

PR_SET_PDEATHSIG = 1
CONNECTIONS = 4
"""For the transaction blocks of one job, and the threads that it may start."""
ANSWER = 60.0
"""Seconds that the parent may take for the round trip of an `extend`."""
End = tuple[CurrentJob, Outcome, BaseException | None, list[str]]
"""What came of a job, what it counts as having raised, and what was wrong with the retry policy of its task."""


class Child:
    """See the module."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._jobs: dict[tuple[int, int], CurrentJob] = {}
        self._cancel: Callable[[], object] | None = None
        self._settings: dict[str, Any] = {}
        self._keep: list[Any] | None = None
        self._found: dict[tuple[str | int | None, ...], BaseTask[..., Any]] = {}
        self._desk: Desk | None = None
        self._trickle = Trickle(channel.send)

    def run(self) -> None:
        """Until the parent says `end`, or is gone."""
        threading.Thread(target=self._read, name="pgqueue-parent", daemon=True).start()
        while True:
            message = self._inbox.get()
            if "hello" in message:
                self._prepare(message["hello"])
                self._channel.send(ready=True)
            elif "jobs" in message:
                self._work(message)
            else:
                return

    def _read(self) -> None:
        try:
            while True:
                for message in self._channel.receive():
                    self._take(message)
        except BaseException:  # noqa: BLE001 - whatever it was, nobody could stop the job any more
            end_at_once()

    def _take(self, message: Message) -> None:
        if "extended" in message:
            self._answers.put(message["extended"])
        elif "superseded" in message:
            running = self._jobs
            for job_id, token in message["superseded"]:
                if (current := running.get((job_id, token))) is not None:
                    current.supersede()
        elif "cancel" not in message:
            self._inbox.put(message)
        else:
            self._cancel_jobs(message["cancel"])

    def _cancel_jobs(self, named: list[tuple[int, int]]) -> None:
        running = self._jobs
        told = [current for job_id, token in named if (current := running.get((job_id, token))) is not None]
        for current in told:
            current.cancel()
        # Of a batch it ends when the last one is cancelled.
        if told and (cancel := self._cancel) is not None and all(one.cancelled for one in running.values()):
            with suppress(RuntimeError):  # its loop has just been closed: the job has ended
                cancel()

    def _prepare(self, hello: Message) -> None:
        sys.path[:], sys.argv[:] = unpack(hello["path"]), unpack(hello["argv"])
        self._settings = hello["settings"]
        places.told = hello["told"]
        with _importing():
            for name in hello["modules"]:
                with suppress(BaseException):  # a job that needs it tries again, and says what was wrong
                    importlib.import_module(name)
        ignore_stop_signals()  # once more: what was imported may have put its own handlers in place

    # One job, or the jobs of one batch

    def _work(self, message: Message) -> None:
        jobs = list(map(read_job, message["jobs"]))
        self._keep = message["keep"]
        desk = self._own_desk()
        if message["batch"] is None:
            current = CurrentJob(jobs[0], self._extend, desk)
            self._began([current])
            problems: list[str] = []
            ended: list[End] = [(current, *self._call(jobs[0], current, message, problems), problems)]
        else:
            members = [BatchJob(job, self._extend, desk) for job in jobs]
            self._began(members)
            ended = self._call_batch(members, message)
        self._over(ended)

    def _began(self, jobs: Sequence[CurrentJob]) -> None:
        self._jobs = {(current.id, current.token): current for current in jobs}
        self._channel.send(began=True)

    def _over(self, ended: list[End]) -> None:
        self._jobs, self._cancel = {}, None
        self._trickle.flush()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        worn = any(isinstance(error, MemoryError) for _, _, error, _ in ended)
        for number, (current, outcome, error, problems) in enumerate(ended, 1):
            last = {"over": True, "worn": worn} if number == len(ended) else {}
            self._channel.send(
                id=current.id,
                token=current.token,
                outcome=outcome_message(outcome),
                error=None if error is None else one_line(describe(error).type),
                settling=current.stage.name,
                frees=current.frees,
                problems=problems,
                **last,
            )

    def _own_desk(self) -> Desk:
        """What handlers ask for, made at the first job: the settings come with the hello."""
        if self._desk is None:
            self._desk = Desk(
                load_settings(self._settings),
                connections=CONNECTIONS,
                keeps=lambda job: None if self._keep is None else float(self._keep[0]),
                report=lambda job, percent, text: self._trickle.put(job, progress=[percent, text]),
                missing=lambda job: self._channel.send(missing=True, id=job.id, token=job.token),
                settling=lambda current: self._channel.send(
                    settling=current.stage.name, id=current.id, token=current.token
                ),
            )
        if self._keep is not None:
            self._desk.settings = dataclasses.replace(self._desk.settings, max_result_bytes=int(self._keep[1]))
        return self._desk

    def _returned(self, current: CurrentJob, value: object) -> Outcome:
        return COMPLETED if self._keep is None else self._own_desk().returned(current, value)

    def _call_batch(self, jobs: list[BatchJob], message: Message) -> list[End]:
        """As _call, for the jobs of a batch; those whose arguments cannot be read fail alone."""
        try:
            task = self._find(jobs[0].task, message["place"], message["batch"])
        except BaseException as error:  # noqa: BLE001 - SystemExit too: a failed attempt, not the end of this process
            return [(job, verdict(job.job, error, prepared=False), error, []) for job in jobs]
        ended: list[End] = []
        ready: list[BatchJob] = []
        for job in jobs:
            try:
                fill_in(task, job)
            except BaseException as error:  # noqa: BLE001 - as above
                ended.append((job, verdict(job.job, error, prepared=False), error, []))
            else:
                ready.append(job)
        return ended + self._answered(task, Batch(ready), message) if ready else ended

    def _answered(self, task: BaseTask[..., Any], batch: Batch, message: Message) -> list[End]:
        timeout, value, failed = message["timeout"], None, None
        begin_clock(batch, timeout)
        try:
            with limited_memory(message["memory_limit"]):
                if task.is_async:
                    value = asyncio.run(self._awaited(call_async(task, batch, timeout), None, batch))
                else:
                    value = call(task, batch)
        except BaseException as error:  # noqa: BLE001 - as above
            failed = error
        ended: list[End] = []
        kept = results(batch, value, keeps=self._keep is not None)
        for (job, said), result in zip(answers(batch, failed), kept, strict=True):
            problems: list[str] = []
            if said is None:
                outcome = self._returned(job, result)
            else:
                outcome = verdict(job.job, said, prepared=True, task=task, tell=problems.append)
            ended.append((job, outcome, said, problems))
        return ended

    def _call(
        self, job: Job, current: CurrentJob, message: Message, problems: list[str]
    ) -> tuple[Outcome, BaseException | None]:
        task: BaseTask[..., Any] | None = None
        try:
            task, args, kwargs = prepare(lambda name: self._find(name, message["place"]), job)
            context = contextvars.copy_context()
            with limited_memory(message["memory_limit"]):
                if task.is_async:
                    context.run(enter, current)
                    work = call_coroutine(task, current, args, kwargs)
                    result = context.run(asyncio.run, self._awaited(work, job.timeout, current))
                else:
                    result = call_function(task, current, context, args, kwargs)
            return self._returned(current, result), None
        except BaseException as error:  # noqa: BLE001 - SystemExit too: a failed attempt, not the end of this process
            return verdict(job, error, prepared=task is not None, task=task, tell=problems.append), error

    def _find(self, name: str, place: list[str], batch: int | None = None) -> BaseTask[..., Any]:
        if (task := self._found.get((name, batch, *place))) is None:
            with _importing():
                task = self._found[name, batch, *place] = places.Place(*place).find(name, batch)
        app = getattr(task, "app", None)
        if isinstance(app, Core):
            self._move(app)
        return task

    def _move(self, app: Core) -> None:
        """Let the task enqueue where its worker works, though its module may name another database."""
        wanted = {name: value for name, value in self._settings.items() if getattr(app.settings, name) != value}
        if wanted:
            app.settings = dataclasses.replace(app.settings, **wanted)
            app._pool.settings = app.settings  # type: ignore[attr-defined]

    async def _awaited(self, work: Any, timeout: float | None, running: CurrentJob | Batch) -> Any:
        task = asyncio.current_task()
        if task is not None:
            self._cancel = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
            if running.cancelled:  # it was asked for before there was anything to cancel
                task.cancel()
        try:
            return await limited(work, timeout)
        finally:
            if self._desk is not None:
                await self._desk.close_async()  # its connections belong to this loop, which ends with the job

    def _extend(self, job: Job, seconds: float) -> None:
        with self._asking:
            self._channel.send(extend=validate_seconds("seconds", seconds), id=job.id, token=job.token)
            try:
                answer = self._answers.get(timeout=ANSWER)
            except queue.Empty:
                raise DatabaseUnavailable(f"the worker has not answered within {ANSWER:g} s") from None
        if answer == "lost":
            raise LeaseLost([job])
        if answer:
            raise DatabaseUnavailable(answer)


def end_at_once() -> None:
    """End this process and all in its group: what the job has started shall not outlive it."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def die_with(parent: int) -> None:
    """Have the kernel end this process together with its parent, where it can: a job may hold the interpreter for good, and
    then nobody here reads the end of the line."""
    with suppress(Exception):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        end_at_once()


def ignore_stop_signals() -> None:
    """By handlers that do nothing: unlike SIG_IGN, these are not inherited by the programs that a job starts."""
    for number in stop_signals():
        signal.signal(number, _ignored)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


def _ignored(number: int = 0, frame: FrameType | None = None) -> None: ...


def _usual_signals() -> None:
    for number in stop_signals():
        if signal.getsignal(number) == _ignored:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


@contextmanager
def _importing() -> Iterator[None]:
    places.importing = True
    try:
        yield
    finally:
        places.importing = False


@contextmanager
def limited_memory(more: int | None) -> Iterator[None]:
    """Let the address space of this process grow by at most `more` bytes during the block."""
    if more is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    given = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([_address_space() + more, *given]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def main(arguments: list[str]) -> None:
    """The program."""
    descriptor, parent = (int(word) for word in arguments)
    ignore_stop_signals()
    die_with(parent)
    channel = Channel(socket.socket(fileno=descriptor))
    # What a job forks must not speak for it, and must end by the usual signals.
    os.register_at_fork(after_in_child=channel.close)
    os.register_at_fork(after_in_child=_usual_signals)
    try:
        Child(channel).run()
    except ConnectionError:
        end_at_once()  # the parent is gone
    except OSError:
        os._exit(1)  # a job has closed the line: there is nobody to tell what came of it


if __name__ == "__main__":
    main(sys.argv[1:])

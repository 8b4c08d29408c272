"""Processes: stop signals as wake-ups, and the parent of ``--processes N``.

A parent talks with each child over a socket pair. The child says that it listens, and later that its worker has
started; the parent asks it to stop; and when the parent is gone, however it died, the child reads the end of the stream
and stops. Asking over the line rather than by signal keeps the parent's request apart from a signal that a supervisor
sent to the whole process group: both together are one request, not two.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import FrameType

from pgqueue import log

LISTENING, STARTED, STOP = b"?", b"+", b"."
LONGEST_PAUSE = 30.0
STEADY = 10.0
MOST_FAILURES = 5
LOOK = 1.0


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT and SIGHUP, as far as the platform has them. All three mean: stop gracefully."""
    names = ("SIGTERM", "SIGINT", "SIGHUP")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


class Stopped(SystemExit):
    """A stop signal came while the process was starting: there is nothing to finish."""


class Signals:
    """Turns signals into bytes on a socket pair, to be waited for together with other sockets. Not on a pipe: Windows cannot
    wait for one.

    Handlers do nothing by themselves. One that set a threading.Event would deadlock when it interrupts the thread that
    holds the lock of that event. While `starting`, a stop signal raises `Stopped` instead.
    """

    def __init__(self) -> None:
        self.starting = True
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._mask = threading.local()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._hold, after_in_parent=self._resume, after_in_child=self._forget)

    def install(self, *, children: bool = False) -> None:
        """Take over the stop signals, and SIGCHLD for a parent. A SIGHUP that nohup has switched off stays off."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in stop_signals():
            if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._heard)
        if children and hasattr(signal, "SIGCHLD"):
            signal.signal(signal.SIGCHLD, self._noticed)

    def wake(self) -> None:
        """End the current `wait`, from any thread."""
        with suppress(OSError):
            self._writer.send(b"\0")

    def wait(self, seconds: float, others: Iterable[socket.socket] = ()) -> tuple[int, list[socket.socket]]:
        """How many stop signals came, and which of `others` can be read; after `seconds` at the latest."""
        by_descriptor = {other.fileno(): other for other in others}
        ours = self._reader.fileno()
        readable, _, _ = select.select([ours, *by_descriptor], [], [], max(0.0, seconds))
        heard = 0
        if ours in readable:
            with suppress(BlockingIOError):
                heard = sum(byte in stop_signals() for byte in self._reader.recv(4096))
        return heard, [by_descriptor[descriptor] for descriptor in readable if descriptor in by_descriptor]

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.starting:
            raise Stopped(0)

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        """The byte on the socket is all that is needed."""

    # A process that a task forks shares the socket pair: its own SIGTERM would stop us, and would not end it. So it gets the
    # usual handlers, and signals wait from before the fork until it has them.

    def _hold(self) -> None:
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())

    def _resume(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _forget(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in stop_signals():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._resume()


class Line:
    """The child's end of the socket pair. `asked` counts the parent's requests to stop; a parent that is gone is one."""

    def __init__(self, descriptor: int) -> None:
        self._socket: socket.socket | None = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self.asked = 0

    def sockets(self) -> list[socket.socket]:
        """What to wait for."""
        return [self._socket] if self._socket else []

    def say(self, word: bytes) -> None:
        """Tell the parent: LISTENING, then STARTED."""
        with suppress(OSError):
            if self._socket:
                self._socket.send(word)

    def read(self) -> None:
        """Take in what came."""
        if self._socket is None:
            return
        try:
            data = self._socket.recv(64)
        except OSError:
            data = b""
        self.asked += data.count(STOP)
        if not data:
            self._socket.close()
            self._socket = None
            self.asked = max(1, self.asked)
            log.say(log.PARENT_GONE)


class Child:
    """One of the N places of a parent: the process in it, or when the next one is due."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None
        self.due: float | None = 0.0
        self.status = 0
        self.listening = False
        self.started = False
        self.failures = 0
        self.deaths = 0
        self.began = 0.0

    def start(self, command: Sequence[str]) -> int:
        """Start a process; returns its pid. In a session of its own: Ctrl-C in the terminal reaches the parent only."""
        self.line, theirs = socket.socketpair()
        with theirs:
            words = [*command, "--line", str(theirs.fileno())]
            self.process = subprocess.Popen(words, start_new_session=True, pass_fds=(theirs.fileno(),))
        self.due, self.listening, self.started, self.began = None, False, False, time.monotonic()
        return self.process.pid

    def ask(self) -> None:
        """Ask it to stop: over the line, or by SIGTERM, which ends it at once, while it does not listen yet."""
        if self.process is None:
            return
        if self.listening and self.line is not None:
            with suppress(OSError):
                self.line.send(STOP)
        else:
            self.process.terminate()

    def hear(self) -> None:
        """Take in what the child said; a line that has ended is closed, or the wait for it would never wait again."""
        if self.line is None:
            return
        with suppress(OSError):
            if said := self.line.recv(64):
                self.listening = True
                self.started = self.started or STARTED in said
                return
        self._hang_up()

    def leave(self) -> tuple[int, int] | None:
        """The pid and status of the process, once, when it has ended."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        if not self.started:
            self.hear()
        pid, self.process = self.process.pid, None
        self._hang_up()
        return pid, status

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.close()
            self.line = None

    def pause(self) -> float:
        """Seconds until the successor starts: longer each time one dies young."""
        self.deaths = self.deaths + 1 if time.monotonic() - self.began < STEADY else 0
        return min(LONGEST_PAUSE, 0.1 * 2.0**self.deaths)


class Parent:
    """Keeps N workers running: restarts what dies, passes stop requests on, and leaves when all have left.

    `command` starts a worker; `quiet` is added to it but for the very first process, so that what concerns all is said
    once. With `drain` nothing is restarted.
    """

    def __init__(
        self, command: Sequence[str], quiet: Sequence[str], count: int, signals: Signals, *, drain: bool
    ) -> None:
        self._command = command
        self._quiet = quiet
        self._signals = signals
        self._drain = drain
        self._stopping = False
        self._gave_up = 0
        self._children = [Child(number) for number in range(1, count + 1)]

    def run(self) -> int:
        """Returns 0 when every child left with 0, 2 when they were called wrongly, else 1."""
        while True:
            self._start_due()
            if all(child.process is None and child.due is None for child in self._children):
                return self._gave_up or int(any(child.status for child in self._children))
            lines = {child.line: child for child in self._children if child.line is not None and not child.started}
            heard, readable = self._signals.wait(self._until_due(), lines)
            for line in readable:
                lines[line].hear()
            for _ in range(heard):
                log.say(log.STOP_NOW if self._stopping else log.STOP_REQUESTED)
                self._stop()
            for child in self._children:
                self._reap(child)

    def _start_due(self) -> None:
        for child in self._children:
            if child.due is not None and child.due <= time.monotonic():
                pid = child.start([*self._command, *self._quiet] if child.began or child.number > 1 else self._command)
                log.say(log.PROCESS_STARTED, parent=os.getpid(), number=child.number, pid=pid)

    def _until_due(self) -> float:
        due = [child.due - time.monotonic() for child in self._children if child.due is not None]
        return min([LOOK, *due])

    def _stop(self) -> None:
        self._stopping = True
        for child in self._children:
            child.due = None
            child.ask()

    def _reap(self, child: Child) -> None:
        left = child.leave()
        if left is None:
            return
        pid, status = left
        facts: dict[str, object] = {"parent": os.getpid(), "number": child.number, "pid": pid, "status": _shown(status)}
        if self._stopping or self._drain:
            # Killed by our own SIGTERM before it could listen: it had nothing to finish.
            child.status = 0 if self._stopping and not child.started and status == -signal.SIGTERM else status
            log.say(log.PROCESS_LEFT, **facts)
            return
        child.failures = child.failures + 1 if status == 1 and not child.started else 0
        if status == 2 or child.failures >= MOST_FAILURES:
            log.say(log.PROCESSES_GIVEN_UP, **facts)
            self._gave_up = status
            self._stop()
            return
        pause = child.pause()
        child.due = time.monotonic() + pause
        log.say(log.PROCESS_DIED, pause=pause, **facts)


def _shown(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


PROGRAM = [sys.executable, "-m", "pgqueue"]
"""How this program was started, before its arguments; a framework's command has another beginning."""


def this_program(arguments: Sequence[str]) -> list[str]:
    """The command line that runs pgqueue with these arguments in another process."""
    return [*PROGRAM, *arguments]

"""A child process as its worker sees it: started, spoken to, and killed together with all that it has started."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from pgqueue.worker.channel import Channel, Message
from pgqueue.worker.processes import stop_signals

MOST = 1024 * 1024
"""Bytes of a message from a child: what it says of its job is bounded, so more is no message."""
SEND = 30.0
"""Seconds that a child may take to read what it is sent: it does nothing else while it waits for a job."""
EXIT = 0.5
"""Seconds between the end of a dying process's line and its exit status."""
POLITE = 1.0
BABBLE = "its process has written something else into its line to the worker"
LONGEST_WAIT = 3600.0


class ChildGone(Exception):
    """The child process has ended, or does not make sense any more; the text says how."""


class ChildProcess:
    """Belongs to the thread that made it, which must outlive it: on Linux a child is killed when that thread ends. `bell`
    ends a wait in `receive` when it can be read."""

    def __init__(self, bell: socket.socket, *, largest_result: int = 0) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "pgqueue.worker.child", str(theirs.fileno()), str(os.getpid())]
            # A stop signal to the whole service must not end it before it can ignore signals: it inherits the mask.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
            try:
                self._process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
                )
            except BaseException:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        ours.settimeout(SEND)
        self._bell = bell
        self._channel = Channel(ours, most=MOST + 2 * largest_result)  # as a text in JSON it may take twice its bytes
        self._handle = _handle(self._process.pid)
        self._poll = select.poll()
        for descriptor in (ours.fileno(), bell.fileno(), self._handle):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def send(self, **message: Any) -> None:
        """Send a message; ChildGone when nobody reads it."""
        try:
            self._channel.send(**message)
        except OSError as error:
            raise ChildGone("its process does not read what the worker says") from error

    def receive(self, until: float) -> list[Message]:
        """What the child says; nothing when the bell rang or it is `until` on the monotonic clock. ChildGone when the
        process has ended."""
        try:
            self._channel.check()  # nonsense that came together with a message is read already: no wait would end for it
        except ValueError as error:
            raise ChildGone(BABBLE) from error
        seconds = min(LONGEST_WAIT, max(0.0, until - time.monotonic()))
        ready = {descriptor for descriptor, _ in self._poll.poll(seconds * 1000 + 1)}
        if self._bell.fileno() in ready:
            self._bell.recv(4096)
        if self._channel.fileno() in ready:  # before the exit: its last words may be waiting
            try:
                return self._channel.receive()
            except ValueError as error:
                raise ChildGone(BABBLE) from error
            except (EOFError, OSError) as error:
                raise ChildGone(self._how()) from error
        if self._handle in ready:
            raise ChildGone(self._how())
        return []

    def kill(self) -> None:
        """Kill the process and its group, and wait until it is gone; afterwards nothing else may be asked of it."""
        # Before the status is taken: until then no other process can have this number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def end(self) -> None:
        """Let it leave by itself, within a second; then kill what is left."""
        with suppress(OSError):
            self._channel.send(end=True)
            self._exited(POLITE)
        self.kill()

    def _how(self) -> str:
        if not self._exited(EXIT):
            return "its process has closed its line to the worker"
        status = _status(self.pid)
        if status is None:
            return "its process has ended"
        if status >= 0:
            return f"its process has ended with status {status}"
        with suppress(ValueError):
            return f"its process was killed by {signal.Signals(-status).name}"
        return f"its process was killed by signal {-status}"

    def _exited(self, seconds: float) -> bool:
        """Wait for the exit, without taking the status."""
        if self._handle is not None:
            exit_only = select.poll()
            exit_only.register(self._handle, select.POLLIN)
            return bool(exit_only.poll(seconds * 1000))
        end = time.monotonic() + seconds
        while _status(self.pid) is None:
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)
        return True


def _handle(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended, where there are such; the end of the line says it elsewhere,
    unless the job has left a process that holds it open."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _status(pid: int) -> int | None:
    """The exit status, negative for a signal, of a process that nobody has waited for; None while it runs."""
    if not hasattr(os, "waitid"):
        return None
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # the application lets the system forget its children
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

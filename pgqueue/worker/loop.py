"""The contract of every control loop: start, started, stop; one turn after another; supervised.

A turn that fails on the database is tried again for ever, with back-off: the database will come back. A turn that fails in
any other way is a fault of ours: it is tried again a few times, and then the worker leaves with a non-zero status rather
than live on without one of its parts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import ClassVar

import psycopg

from pgqueue.drivers.execute import first_line
from pgqueue.errors import PgQueueError
from pgqueue.events import Bus, EventName
from pgqueue.failure import one_line

LONGEST_PAUSE = 2.0
MOST_CRASHES = 5


class Loop:
    """A named daemon thread that takes turns until it is stopped."""

    name: ClassVar[str] = "loop"

    def __init__(self, events: Bus, fatal: Callable[[str, BaseException], None]) -> None:
        self.events = events
        self.started = threading.Event()
        self.stopping = threading.Event()
        self._fatal = fatal
        self._failures = 0
        self._crashes = 0
        self._thread = threading.Thread(target=self._run, name=f"pgqueue-{self.name}", daemon=True)

    def turn(self) -> None:
        """One turn: does a bounded piece of work, waits at most about a second, returns."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Called after a failed turn: drop what may be broken."""

    def finish(self) -> None:
        """Called in the loop's thread at its end."""

    def start(self) -> None:
        """Start the thread; `started` is set once the first turn went well."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the loop to end after its turn; a second call does nothing."""
        self.stopping.set()

    def join(self, seconds: float) -> bool:
        """Wait for the end; False when it has not come within `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._turn()
        except BaseException as error:  # noqa: BLE001 - a worker without one of its parts must not look alive
            self._fatal(self.name, error)
        finally:
            self.finish()

    def _turn(self) -> None:
        try:
            self.turn()
        except (psycopg.Error, PgQueueError, OSError) as error:
            self._crashes = 0
            self._pause(error)
        except Exception as error:
            self._crashes += 1
            self._pause(error)
            if self._crashes >= MOST_CRASHES:
                raise
        else:
            self._well()

    def _pause(self, error: Exception) -> None:
        self._failures += 1
        self.give_up()
        if self.stopping.is_set():
            return
        pause = min(LONGEST_PAUSE, 0.05 * 2.0 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
        self.events.emit(
            EventName.LOOP_FAILED, loop=self.name, error=type(error).__name__, detail=_detail(error), retry_in=pause
        )
        self.stopping.wait(pause)

    def _well(self) -> None:
        if self._failures:
            self.events.emit(EventName.LOOP_RECOVERED, loop=self.name, failures=self._failures)
        self._failures = self._crashes = 0
        if not self.started.is_set():
            self.started.set()


def _detail(error: Exception) -> str:
    # A database error is cut to its first sentence: the others may repeat parameters.
    return one_line(first_line(error) if isinstance(error, psycopg.Error) else str(error))

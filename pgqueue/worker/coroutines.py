"""One event loop in one thread for `async def` tasks."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pgqueue.current import CurrentJob, enter
from pgqueue.drivers.pool import is_proactor
from pgqueue.outcome import COMPLETED, Outcome
from pgqueue.task import BaseTask
from pgqueue.worker.batch_call import BatchCall, rescue
from pgqueue.worker.batches import Group
from pgqueue.worker.execution import Runner, limited, prepare
from pgqueue.worker.ledger import Held
from pgqueue.worker.wrapping import call_coroutine

LAST_CLOSE = 0.2
"""Seconds for closing the connections of transaction blocks."""


class CoroutineRunner(Runner):
    """At most `concurrency` jobs at once; each in a task and context of its own, so that it can be cancelled alone."""

    def __init__(self, *shared: Any, **more: Any) -> None:
        super().__init__(*shared, **more)
        self.count = 0
        self.seconds = 0.0
        self._waiting: deque[Held | Group] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._ended = False
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="pgqueue-event-loop", daemon=True)

    def start(self) -> None:
        """Start the thread and its loop."""
        self._thread.start()

    def submit(self, items: Sequence[Held | Group]) -> None:
        """Hand jobs or batches over, from any thread."""
        # Counted at once: a loop that is blocked by a handler accepts nothing, and must not look hungry.
        self._waiting.extend(items)
        self._loop.call_soon_threadsafe(self._fill)

    def cancel(self, held: Held) -> None:
        """Cancel the asyncio task of a running job, or of a batch whose last job this is, from any thread."""
        task = held.stop
        if isinstance(task, asyncio.Task):
            self._loop.call_soon_threadsafe(task.cancel)
        elif isinstance(task, BatchCall):
            task.cancel()

    def running(self) -> int:
        """How many jobs or batches run now."""
        return len(self._running)

    def waiting(self) -> int:
        """How many jobs or batches wait in the buffer."""
        return len(self._waiting)

    def idle(self) -> bool:
        """True when nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def stop(self) -> None:
        """Cancel what runs and end the loop."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end)

    def join(self, seconds: float) -> None:
        """Wait for the thread."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while not self._ended:
                # A task that a handler started by itself may raise SystemExit, which asyncio lets end the loop; what else
                # runs in it has nothing to do with that.
                with suppress(SystemExit, KeyboardInterrupt):
                    self._loop.run_forever()
            self._loop.run_until_complete(asyncio.wait_for(self._loop.shutdown_asyncgens(), 1.0))
            with suppress(Exception):
                self._loop.run_until_complete(asyncio.wait_for(self.desk.close_async(), LAST_CLOSE))
        finally:
            self._loop.close()

    def _end(self) -> None:
        self._ended = True
        for task in self._running:
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.concurrency:
            item = self._waiting.popleft()
            task = self._loop.create_task(self._job(item), context=contextvars.copy_context())
            item.stop = task
            self._running.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._fill()
        if len(self._waiting) <= self.low_mark:
            self.hungry()

    async def _job(self, item: Held | Group) -> None:
        try:
            await (self._guarded(item) if isinstance(item, Held) else self._batch(item))
        except BaseException as error:  # noqa: BLE001 - whatever escapes, the loop lives and the job gets an outcome
            rescue(self, item, error)

    async def _batch(self, group: Group) -> None:
        began = time.monotonic()
        call = BatchCall(self, group)
        if call.batch:
            await call.run_async()
            self.count += 1
            self.seconds += time.monotonic() - began

    async def _guarded(self, held: Held) -> None:
        current = self.begin(held)
        if current is None:
            return
        began = time.monotonic()
        outcome, error = await self._call(held, current)
        self.count += 1
        self.seconds += time.monotonic() - began
        self.end(held, outcome, error)

    async def _call(self, held: Held, current: CurrentJob) -> tuple[Outcome, BaseException | None]:
        task: BaseTask[..., Any] | None = None
        try:
            task, args, kwargs = prepare(self.registry.find, held.job)
            enter(current)
            result = await limited(call_coroutine(task, current, args, kwargs), held.job.timeout)
            if task.keeps is not None:
                return self.desk.returned(current, result), None
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the loop and every job in it
            return self.raised(held, task, error), error
        return COMPLETED, None


def _new_loop() -> asyncio.AbstractEventLoop:
    """The loop that the policy chooses, unless an AsyncPgQueue could not connect in it."""
    loop = asyncio.new_event_loop()
    if not is_proactor(loop):
        return loop
    loop.close()
    return asyncio.SelectorEventLoop()

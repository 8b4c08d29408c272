"""The two loops that do what a plan asks for, and the event loop of a test that has none."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from typing import Any, TypeVar

from pgqueue.errors import ConfigurationError
from pgqueue.testing.calling import Ask, Await, Guard, Plan

T = TypeVar("T")
IN_A_LOOP = (
    "an `async def` task needs an event loop of its own here, and one runs in this thread already: "
    "await run_jobs_async(…), or enqueue by an AsyncPgQueue in the inline mode"
)


def driven(plan: Plan[T], answer: Callable[[Ask | Await | Guard], Any]) -> T:
    """Do a plan to its end; what it returns."""
    with closing(plan):
        try:
            wish = next(plan)
            while True:
                try:
                    said = answer(wish)
                except BaseException as error:  # noqa: BLE001 - the plan's affair
                    wish = plan.throw(error)
                else:
                    wish = plan.send(said)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


async def driven_async(plan: Plan[T], answer: Callable[[Ask | Await | Guard], Awaitable[Any]]) -> T:
    """The same in the running loop."""
    with closing(plan):
        try:
            wish = next(plan)
            while True:
                try:
                    said = await answer(wish)
                except BaseException as error:  # noqa: BLE001 - the plan's affair
                    wish = plan.throw(error)
                else:
                    wish = plan.send(said)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


async def in_new_task(work: Awaitable[Any]) -> Any:
    """Await in an asyncio task and context of its own, in which nothing is set, as in a worker."""

    async def alone() -> Any:
        return await work

    return await asyncio.create_task(alone(), context=contextvars.Context())


class Loop:
    """An event loop in this thread, made when it is needed."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, work: Awaitable[Any]) -> Any:
        """Run this to its end; ConfigurationError in a thread in which a loop runs already."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            # With a factory, so that it does not touch the event loop that a plugin of pytest has set for this thread.
            self._runner = self._runner or asyncio.Runner(loop_factory=asyncio.new_event_loop)
            return self._runner.run(in_new_task(work))
        if hasattr(work, "close"):
            work.close()
        raise ConfigurationError(IN_A_LOOP)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End it, after this was awaited in it; nothing is where none was made."""
        if self._runner is not None:
            if last is not None:
                self._runner.run(last())
            self._runner.close()

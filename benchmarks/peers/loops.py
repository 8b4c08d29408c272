"""An event loop that a synchronous producer enters call by call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Loop:
    """Runs coroutines on one loop."""

    def __init__(self) -> None:
        self._loop = new_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Until it is done."""
        return self._loop.run_until_complete(coroutine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

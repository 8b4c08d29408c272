"""Waiting for a condition, never for an amount of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE = 0.02


def wait_until(condition: Callable[[], T], seconds: float, what: str) -> T:
    """The first true answer of `condition`; AssertionError, naming `what`, when none comes within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what} (last answer: {answer!r})")
        time.sleep(PAUSE)

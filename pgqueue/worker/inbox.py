"""A box that many threads put into and one empties."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """`put` takes no lock and wakes nobody unless the reader sleeps; `take` takes all that is there. One reader only.

    A queue with a lock costs both sides a hand-over per item, and under load each of those may cost a turn of the scheduler.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._bell = threading.Event()
        self._asleep = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item, from any thread."""
        self._items.append(item)
        if self._asleep:
            self.ring()

    def ring(self) -> None:
        """End the reader's wait, with or without an item."""
        self._asleep = False
        self._bell.set()

    def take(self, most: int, *, timeout: float) -> list[T]:
        """Up to `most` items, oldest first; waits up to `timeout` seconds for the first one."""
        if not self._items:
            # In this order: an item that comes after the second look finds the reader asleep.
            self._asleep = True
            if not self._items:
                self._bell.wait(timeout)
            self._asleep = False
            self._bell.clear()
        return [self._items.popleft() for _ in range(min(most, len(self._items)))]

"""The operations of the queue, sans I/O.

An operation is a generator: it yields a `Step` (the name of a statement and its parameters), is sent the rows, and returns
a value. It never sees a connection, so that all control flow exists once for sync and async and is tested without a server.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")
Rows: TypeAlias = list[tuple[Any, ...]]


class Int8s(list[int]):
    """Numbers that a driver binds as bigint[], in binary."""

    __slots__ = ()


class Texts(list[str | None]):
    """Texts that a driver binds as text[], in binary."""

    __slots__ = ()


class Step(NamedTuple):
    """One statement to run: its name in `pgqueue.sql` and its parameters."""

    name: str
    params: dict[str, Any]


Op: TypeAlias = Generator[Step, Rows, T]

__all__ = ["Int8s", "Op", "Rows", "Step", "Texts"]

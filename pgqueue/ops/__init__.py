"""The operations of the queue, sans I/O.

An operation is a generator: it yields a `Step` (the name of a statement and its parameters), is sent the rows, and returns
a value. It never sees a connection, so that all control flow exists once for sync and async and is tested without a server.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
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
    """One statement to run: its name in `pgqueue.sql` and its parameters. `silent`: it has no answer (BEGIN, COMMIT)."""

    name: str
    params: dict[str, Any]
    silent: bool = False


class Stream(NamedTuple):
    """Statements that do not wait for each other's answers; the answer to all of them is their rows, in order.

    A driver sends one while the server runs the one before: making the next parameters costs no time of its own.
    """

    steps: Iterable[Step]


Op: TypeAlias = Generator[Step | Stream, Rows, T]


def relayed(op: Op[T], answer: Callable[[Step | Stream], Op[Rows]]) -> Op[T]:
    """The same operation, in which `answer` stands for each step: it may look at the rows, or leave the step out."""
    try:
        step = next(op)
        while True:
            try:
                rows = yield from answer(step)
            except Exception as error:  # noqa: BLE001 - the operation says what comes of it
                step = op.throw(error)
            else:
                step = op.send(rows)
    except StopIteration as ended:
        return ended.value  # type: ignore[no-any-return]
    finally:
        op.close()


__all__ = ["Int8s", "Op", "Rows", "Step", "Stream", "Texts", "relayed"]

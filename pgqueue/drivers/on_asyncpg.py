"""SQLAlchemy's async engines on asyncpg: our statements in a transaction that another driver holds.

They go through SQLAlchemy's own cursor, which begins the transaction that its commit will end. asyncpg takes the types of
parameters from the server; every parameter of every statement has a cast, so the server knows them. Times are sent as text,
as psycopg does: asyncpg has no word for "-infinity".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from types import MappingProxyType
from typing import Any

import psycopg

from pgqueue.drivers.execute import Foreign
from pgqueue.ops import Rows, Step
from pgqueue.sql import statements

_PARAMETER = re.compile(r"%\((\w+)\)[sb]")
_TIME = re.compile(r"(\$\d+)::timestamptz\b")
_WITH_VALUE = re.compile(r"(invalid input for query argument \$\d+): .*", re.DOTALL)
"""What asyncpg says before it sends anything: the value follows, and may be a payload."""


@functools.cache
def numbered(schema: str) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """Every statement with $1, $2 and so on, and the names of its parameters in that order."""
    return MappingProxyType({name: _numbered(text.decode()) for name, text in statements(schema).items()})


def _numbered(text: str) -> tuple[str, tuple[str, ...]]:
    names = tuple(dict.fromkeys(_PARAMETER.findall(text)))
    numbered = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", text).replace("%%", "%")
    return _TIME.sub(r"\1::text::timestamptz", numbered), names


def _as_text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


class OnAsyncpg(Foreign):
    """An AsyncConnection of SQLAlchemy; `adapted` is the connection of its dialect beneath, `raw` asyncpg's own."""

    def __init__(self, connection: Any, adapted: Any, raw: Any) -> None:
        self._connection = connection
        self._adapted = adapted
        self._raw = raw

    @property
    def commits_by_itself(self) -> bool:
        """See Foreign."""
        return bool(self._adapted.autocommit and not self._raw.is_in_transaction())

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """See Foreign."""
        transaction: AbstractAsyncContextManager[object] = self._raw.transaction()
        return transaction

    async def rows(self, step: Step, schema: str) -> Rows:
        """See Foreign."""
        text, names = numbered(schema)[step.name]
        try:
            result = await self._connection.exec_driver_sql(text, tuple(_as_text(step.params[name]) for name in names))
        except Exception as error:
            if (ours := _as_psycopg(error)) is None:
                raise
            raise ours from None  # SQLAlchemy's own message shows the parameters
        return [tuple(row) for row in result] if result.returns_rows else []


def _as_psycopg(error: Exception) -> psycopg.Error | None:
    """The same error as psycopg would raise it, without what may repeat a payload; None for one that is not the driver's."""
    adapted = getattr(error, "orig", None)
    if adapted is None:
        return None
    said = adapted.__cause__ or adapted
    message = _WITH_VALUE.sub(r"\1", str(said.args[0] if said.args else said))
    state = getattr(adapted, "sqlstate", None)
    if state is None:
        return psycopg.OperationalError(message)
    try:
        return psycopg.errors.lookup(state)(message)
    except KeyError:
        return psycopg.DatabaseError(message)

"""Arrays in binary, packed at once.

psycopg's own dumper for lists calls Python once per element, which at a thousand ids per statement costs more than the
statement; and it picks the smallest type that fits, so that one statement is prepared several times over. These two kinds of
list say what they are. The layout is that of PostgreSQL's array_recv (src/backend/utils/adt/arrayfuncs.c).
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import Any

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import Dumper
from psycopg.pq import Format

from pgqueue.ops import Int8s, Texts

INT8_OID, INT8_ARRAY_OID = 20, 1016
TEXT_OID, TEXT_ARRAY_OID = 25, 1009
_HEADER = struct.Struct(">iiIii")  # dimensions, has nulls, element type, length, lower bound
_EMPTY = struct.Struct(">iiI")
_LENGTH = struct.Struct(">i")
_NULL = _LENGTH.pack(-1)


class Int8sDumper(Dumper):
    """bigint[], without nulls."""

    format = Format.BINARY
    oid = INT8_ARRAY_OID

    def dump(self, obj: Any) -> bytes:
        """One pack call: a length of eight before every element."""
        count = len(obj)
        if not count:
            return _EMPTY.pack(0, 0, INT8_OID)
        words = [8] * (2 * count)
        words[1::2] = obj
        return _HEADER.pack(1, 0, INT8_OID, count, 1) + struct.pack(">" + "iq" * count, *words)


class TextsDumper(Dumper):
    """text[], with nulls where there is None."""

    format = Format.BINARY
    oid = TEXT_ARRAY_OID

    def __init__(self, cls: type, context: AdaptContext | None = None) -> None:
        super().__init__(cls, context)
        self._encoding = self.connection.info.encoding if self.connection else "utf-8"

    def dump(self, obj: Any) -> bytes:
        """Each element behind its length in bytes."""
        count = len(obj)
        if not count:
            return _EMPTY.pack(0, 0, TEXT_OID)
        if not any(map(_is_text, obj)):
            return _HEADER.pack(1, 1, TEXT_OID, count, 1) + b"".join(repeat(_NULL, count))
        parts: list[bytes] = []
        for text in obj:
            if text is None:
                parts.append(_NULL)
            else:
                data = text.encode(self._encoding)
                parts.append(_LENGTH.pack(len(data)))
                parts.append(data)
        return _HEADER.pack(1, 1, TEXT_OID, count, 1) + b"".join(parts)


def _is_text(element: str | None) -> bool:
    return element is not None


def register() -> None:
    """Teach psycopg the two types; a second call changes nothing.

    They are ours alone, so nothing that a host passes is dumped in another way.
    """
    psycopg.adapters.register_dumper(Int8s, Int8sDumper)
    psycopg.adapters.register_dumper(Texts, TextsDumper)

"""The statements: one ``-- name:`` block each in the .sql files beside this module; only the schema name is put in."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

_BLOCK = re.compile(r"^-- name: (\w+)\n(.*?)(?=^-- name: |\Z)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^\s*--.*\n", re.MULTILINE)
FILES = (
    "enqueue.sql",
    "keyed.sql",
    "admission.sql",
    "unique.sql",
    "claim.sql",
    "limit.sql",
    "settle.sql",
    "rescue.sql",
    "dead_letter.sql",
    "schedule.sql",
    "worker.sql",
    "status.sql",
    "pause.sql",
    "expiry.sql",
    "ageing.sql",
    "cancel.sql",
    "reader.sql",
    "result.sql",
    "topic.sql",
    "message.sql",
)


def blocks(file: str) -> dict[str, str]:
    """The statements of one file by name, without their comments."""
    found: dict[str, str] = {}
    for name, body in _BLOCK.findall((files(__package__) / file).read_text(encoding="utf-8")):
        if name in found:
            raise ValueError(f"two statements are named {name}")
        # Comments stay in the file: on the wire they would cost bytes at every execution that is not prepared.
        found[name] = _COMMENT.sub("", body).strip()
    return found


def _load() -> dict[str, str]:
    statements: dict[str, str] = {}
    for file in FILES:
        for name, body in blocks(file).items():
            if name in statements:
                raise ValueError(f"two statements are named {name}")
            statements[name] = body
    return statements


TEXTS: Mapping[str, str] = MappingProxyType(_load())


@functools.cache
def statements(schema: str) -> Mapping[str, bytes]:
    """Every statement by name, ready to execute in `schema`."""
    return MappingProxyType({name: text.replace("{schema}", f'"{schema}"').encode() for name, text in TEXTS.items()})

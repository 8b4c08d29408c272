"""Which rights a statement takes, read from its text: for the sentence that a role without them gets to see."""

from __future__ import annotations

import re

from pgqueue.sql import TEXTS

_OURS = r"\{schema\}\.(?P<thing>\w+)"
# A locked row: the clause stands at the indentation of its FROM.
_LOCKED = re.compile(
    rf"^(?P<at> *)(?:SELECT .*)?FROM {_OURS}(?:.|\n(?!(?P=at)FROM))*?\n(?P=at)FOR (?:NO KEY )?UPDATE", re.MULTILINE
)
_TOUCHES = (
    (re.compile(rf"(?:FROM|JOIN) {_OURS}"), "SELECT"),
    (re.compile(rf"INSERT INTO {_OURS}"), "INSERT"),
    (re.compile(rf"INSERT INTO {_OURS}(?:(?!INSERT INTO)[^;])*DO UPDATE"), "UPDATE"),
    (re.compile(rf"\bUPDATE {_OURS}"), "UPDATE"),
    (_LOCKED, "UPDATE"),
    (re.compile(rf"DELETE FROM {_OURS}"), "DELETE"),  # noqa: S608 - a pattern, not a statement
    (re.compile(rf"nextval\('{_OURS}'"), "USAGE"),
    (re.compile(rf"SELECT {_OURS}\("), "EXECUTE"),
)


def rights(name: str) -> dict[str, tuple[str, ...]]:
    """The rights that statement `name` takes, by table, sequence or function of ours.

    Left out is what the server's own message names: the sequence behind a default, and single columns of RETURNING.
    """
    needed: dict[str, list[str]] = {}
    for pattern, right in _TOUCHES:
        for found in pattern.finditer(TEXTS[name]):
            some = needed.setdefault(found["thing"], [])
            if right not in some:
                some.append(right)
    for some in needed.values():
        if "SELECT" not in some and ("UPDATE" in some or "DELETE" in some):  # every one of them looks for its rows
            some.insert(0, "SELECT")
    return {thing: tuple(some) for thing, some in sorted(needed.items())}


def rights_in_words(name: str) -> str:
    """The same as "INSERT on job, USAGE on job_id_seq"."""
    return ", ".join(f"{' and '.join(some)} on {thing}" for thing, some in rights(name).items())

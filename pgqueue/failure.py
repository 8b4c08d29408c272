"""What an exception leaves behind: text that PostgreSQL can always store and a terminal can always show.

The bookkeeping of a failed job must not depend on the text of the failure. So everything here is cleaned (no NUL, no
other control characters, no lone surrogates), bounded in bytes and in time, and `describe` never raises, whatever it is
given. The one thing it cannot bound is a `__str__` that does not return.

Tracebacks hold file, line, function and source line, never the values of local variables.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import orjson

_TYPE_BYTES, _SUMMARY_BYTES = 200, 500
_MAX_CHAIN, _MAX_FRAMES, _MAX_GROUP_DEPTH, _MAX_GROUP_WIDTH, _MAX_NOTES, _MAX_REPORTED = 8, 30, 3, 5, 5, 40
_HEADLINE_BYTES = 500
# C0 without newline and tab, DEL, C1 (U+009B starts an escape sequence on some terminals), surrogates.
_UNSTORABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_CUT = "…"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as cleaned text: qualified class name, message, and traceback (innermost frames last)."""

    type: str
    message: str
    traceback: str = ""

    def to_json(self, *, attempt: int) -> str:
        """The JSON object to append to the job's errors; the database adds the time. Always storable."""
        record = {
            "attempt": attempt,
            "type": _storable(self.type),
            "message": _storable(self.message),
            "traceback": _storable(self.traceback),
        }
        return orjson.dumps(record).decode()

    @property
    def summary(self) -> str:
        """``ValueError: message`` on one line, control characters escaped, at most 500 bytes."""
        return one_line(f"{self.type}: {self.message}" if self.message else self.type, _SUMMARY_BYTES)


PLACEHOLDER: Final = Failure(type="unknown", message="the text of this error could not be stored")


def describe(error: BaseException, *, max_bytes: int = 8192) -> Failure:
    """What is worth keeping of `error`, at most `max_bytes` bytes of UTF-8 in all. Never raises.

    The class name gets 200 bytes, the message a quarter of the whole, the traceback the rest; a traceback is cut at its
    head, so that the last frames stay. Chains and groups of exceptions are followed only so far.
    """
    try:
        max_bytes = max(0, max_bytes)
        kind = clean(_guarded(lambda: _type_name(error), "unknown"), min(_TYPE_BYTES, max_bytes))
        text = _guarded(lambda: _message(error), "(the text of this error could not be read)")
        message = clean(text, min(max_bytes // 4, max_bytes - _size(kind)))
        frames = _guarded(lambda: "\n".join(_report(error, 0, iter(range(_MAX_REPORTED)))), "")
        return Failure(kind, message, _clean_tail(frames, max_bytes - _size(kind) - _size(message)))
    except BaseException:  # noqa: BLE001 (the text of a failure must not become a second failure)
        return PLACEHOLDER


def clean(text: str, max_bytes: int) -> str:
    """`text` as PostgreSQL can store it, cut at its end to `max_bytes` bytes of UTF-8; what is cut ends in an ellipsis.

    Newlines and tabs stay; other control characters and lone surrogates become U+FFFD.
    """
    head = _storable(text[: max(0, max_bytes) + 1])
    if _size(head) <= max_bytes:
        return head
    room = max_bytes - _size(_CUT)
    return _first_bytes(head, room) + _CUT if room >= 0 else _first_bytes(head, max_bytes)


def one_line(text: str, max_bytes: int = 200) -> str:
    """`text` for a log line or a terminal, at most `max_bytes` bytes: all that is not printable is escaped.

    That covers newlines, ANSI sequences, lone surrogates and the characters that reverse the direction of writing.
    """
    head = text[: max(0, max_bytes) + 1]
    if not head.isprintable():
        head = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in head)
    return clean(head, max_bytes)


def _clean_tail(text: str, max_bytes: int) -> str:
    tail = _storable(text[-max_bytes - 1 :])
    if _size(tail) <= max_bytes:
        return tail
    room = max_bytes - _size(_CUT)
    return _CUT + tail.encode()[_size(tail) - room :].decode(errors="ignore") if room >= 0 else ""


def _storable(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", str.__str__(text))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _first_bytes(text: str, room: int) -> str:
    return text.encode()[: max(0, room)].decode(errors="ignore")


def _guarded(read: Callable[[], str], instead: str) -> str:
    # BaseException: a task's own __str__ may call sys.exit(), and that is still only the text of a failure.
    try:
        return read()
    except BaseException:  # noqa: BLE001
        return instead


def _message(error: BaseException) -> str:
    return str.__str__(str(error))


def _type_name(error: object) -> str:
    # Read past the metaclass, which may answer anything; a class body may also set __module__ to what is not text.
    kind = type(error)
    name: str = type.__dict__["__qualname__"].__get__(kind)
    module: Any = type.__dict__["__module__"].__get__(kind)
    return name if module == "builtins" or not isinstance(module, str) else f"{module}.{name}"


def _own(error: BaseException, name: str) -> Any:
    """An attribute as BaseException stores it, whatever property a subclass puts over it."""
    return BaseException.__dict__[name].__get__(error)


def _headline(error: BaseException) -> str:
    name = _guarded(lambda: _type_name(error), "unknown")
    message = _guarded(lambda: clean(_message(error), _HEADLINE_BYTES), "(the text of this error could not be read)")
    return f"{name}: {message}" if message else name


def _report(error: BaseException, depth: int, budget: Iterator[int]) -> Iterator[str]:
    """The lines of a traceback, the root cause first, as Python prints it but bounded in every direction.

    `budget` runs out after `_MAX_REPORTED` exceptions: chains inside groups inside chains multiply.
    """
    chain: list[tuple[BaseException, str]] = []
    link: str = ""
    following, seen = error, set[int]()
    while following is not None and id(following) not in seen:
        if len(chain) == _MAX_CHAIN:
            yield "(earlier exceptions left out)\n"
            break
        seen.add(id(following))
        chain.append((following, link))
        following, link = _before(following)
    for part, link_to_next in reversed(chain):
        if next(budget, None) is None:
            yield "(more exceptions left out)"
            return
        yield from _one(part, depth, budget)
        if link_to_next:
            yield f"\n{link_to_next}\n"


def _before(error: BaseException) -> tuple[Any, str]:
    cause = _own(error, "__cause__")
    if cause is not None or _own(error, "__suppress_context__"):
        return cause, "The above exception was the direct cause of the following exception:"
    return _own(error, "__context__"), "During handling of the above exception, another exception occurred:"


def _one(error: BaseException, depth: int, budget: Iterator[int]) -> Iterator[str]:
    frames = _guarded(lambda: _frames(_own(error, "__traceback__")), "  (frames not readable)")
    if frames:
        yield "Traceback (most recent call last):"
        yield frames
    yield _headline(error)
    yield from _guarded(lambda: _notes(error), "").splitlines()
    if not issubclass(type(error), BaseExceptionGroup):
        return
    members: tuple[BaseException, ...] = BaseExceptionGroup.__dict__["exceptions"].__get__(error)
    if depth >= _MAX_GROUP_DEPTH:
        yield f"  ({len(members)} inner exception(s) left out)"
        return
    for number, member in enumerate(members[:_MAX_GROUP_WIDTH], 1):
        yield f"  ---------------- {number} of {len(members)} ----------------"
        for part in _report(member, depth + 1, budget):
            yield from (f"  {line}" for line in part.splitlines())


def _frames(trace: TracebackType | None) -> str:
    # A negative limit keeps the innermost frames; without it a RecursionError would read a thousand source lines.
    return "".join(traceback.extract_tb(trace, limit=-_MAX_FRAMES).format()).rstrip("\n")


def _notes(error: BaseException) -> str:
    notes: Any = getattr(error, "__notes__", ())
    kept = list(notes)[:_MAX_NOTES] if isinstance(notes, (list, tuple)) else []
    return "\n".join(clean(note, _HEADLINE_BYTES) for note in kept if isinstance(note, str))

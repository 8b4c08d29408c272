"""Arguments as JSON text: what the handler receives equals what was passed, or enqueue refuses.

Accepted are None, bool, int in the signed 64-bit range, finite float, str without NUL and without lone surrogates,
list, and dict with str keys. Subclasses of str, int, list and dict are accepted when they are not Enum members: they
arrive as the plain type, and only if they compare equal to it. All else is refused, nothing is converted: a tuple
would come back as a list, a datetime as text, an int key as "1". The sequence of positional arguments may be a tuple.

Reading keeps the same rule for rows that were written by hand: what JSON text would lose on its way into Python (an
integer beyond 64 bits, one of two equal keys) or what enqueue never writes (NUL, a lone surrogate, nesting beyond 254)
is a PayloadDecodeError. A number with a fraction or an exponent is read as the nearest double.

Error messages name a path, a type or a size, never a value: a value may be a secret.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import pathlib
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import islice
from math import isfinite
from typing import Any

import orjson

from pgqueue.errors import PayloadDecodeError, PayloadError

DEFAULT_MAX_BYTES = 1024 * 1024
MAX_DEPTH = 100
_MIN_INT, _MAX_INT, _MAX_DECODED_INT = -(2**63), 2**63 - 1, 2**64 - 1
_NUL_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # not the text backslash-u0000, whose backslash is doubled
_CONSTANTS = frozenset({bool, type(None)})
_ISO = "is not JSON: pass value.isoformat() and parse it in the task"
_INSTEAD: tuple[tuple[tuple[type, ...], str], ...] = (
    ((enum.Enum,), "would arrive as a bare value: pass value.value and look the member up in the task"),
    ((tuple,), "would arrive as a list: pass list(value)"),
    ((set, frozenset), "is not JSON: pass sorted(value) and make it a set again in the task"),
    ((bytes, bytearray, memoryview), "is not JSON: pass value.hex(), or a reference to where the bytes are stored"),
    ((datetime.date, datetime.time), _ISO),
    ((datetime.timedelta,), "is not JSON: pass value.total_seconds()"),
    ((uuid.UUID,), "is not JSON: pass str(value) and parse it in the task"),
    ((decimal.Decimal,), "is not JSON: pass str(value) and make it a Decimal again in the task"),
    ((pathlib.PurePath,), "is not JSON: pass str(value)"),
    ((float,), "would arrive as a plain float: pass float(value)"),
)


def encode_args(args: Sequence[Any], *, max_bytes: int = DEFAULT_MAX_BYTES) -> str | None:
    """The JSON list of the positional arguments, at most `max_bytes` bytes; None for none. Raises PayloadError."""
    return encode_call(args, {}, max_bytes=max_bytes)[0]


def encode_kwargs(kwargs: Mapping[str, Any], *, max_bytes: int = DEFAULT_MAX_BYTES) -> str | None:
    """The JSON object of the keyword arguments, at most `max_bytes` bytes; None for none. Raises PayloadError."""
    return encode_call((), kwargs, max_bytes=max_bytes)[1]


def encode_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, max_bytes: int = DEFAULT_MAX_BYTES
) -> tuple[str | None, str | None]:
    """Both halves of a call, as `encode_args` and `encode_kwargs` write them; `max_bytes` bounds their sum.

    Raises PayloadError, whose `path` is the offending value's or, when the call is too large, the largest argument's.
    """
    positional = keyword = b""
    try:
        if args:
            positional = _encode("args", _as_list(args), max_bytes)
        if kwargs:
            keyword = _encode("kwargs", _as_dict("kwargs", kwargs), max_bytes)
    except _TooLarge:
        raise _size_error({"args": args, "kwargs": kwargs}, None, max_bytes) from None
    size = len(positional) + len(keyword)
    if size > max_bytes:
        raise _size_error({"args": args, "kwargs": kwargs}, size, max_bytes)
    return positional.decode() or None, keyword.decode() or None


def encode_object(name: str, value: Mapping[str, Any], *, max_bytes: int = DEFAULT_MAX_BYTES) -> str | None:
    """A JSON object beside the arguments; None when empty. `name` is the root of the paths in its PayloadErrors."""
    return _bounded(name, _as_dict(name, value), value, max_bytes).decode() if value else None


def encode_result(value: Any, *, max_bytes: int) -> str:
    """What a handler returned, any one value; PayloadError names paths that begin with ``result[0]``."""
    return _bounded("result", (value,), (value,), max_bytes, brackets=2)[1:-1].decode()


def _bounded(name: str, value: Any, given: Any, max_bytes: int, *, brackets: int = 0) -> bytes:
    try:
        raw = _encode(name, value, max_bytes + brackets)
    except _TooLarge:
        raise _size_error({name: given}, None, max_bytes) from None
    if len(raw) > max_bytes + brackets:
        raise _size_error({name: given}, len(raw) - brackets, max_bytes)
    return raw


def decode_args(text: str | None) -> list[Any]:
    """The positional arguments; an empty list for None. Raises PayloadDecodeError, and nothing else, for a bad row."""
    decoded: list[Any] = [] if text is None else _decode("args", text, list)
    return decoded


def decode_kwargs(text: str | None) -> dict[str, Any]:
    """The keyword arguments; an empty dict for None. Raises PayloadDecodeError, and nothing else, for a bad row."""
    return decode_object("kwargs", text)


def decode_object(name: str, text: str | None) -> dict[str, Any]:
    """A JSON object; an empty dict for None. Raises PayloadDecodeError, and nothing else, for a bad row."""
    decoded: dict[str, Any] = {} if text is None else _decode(name, text, dict)
    return decoded


def _as_list(args: Sequence[Any]) -> list[Any] | tuple[Any, ...]:
    if type(args) is tuple or type(args) is list:
        return args
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes, bytearray, memoryview)):
        raise PayloadError("args", "the positional arguments come as a list or a tuple")
    return list(args)


def _as_dict(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if type(value) is dict:
        return value
    if not isinstance(value, Mapping):
        raise PayloadError(name, "named values come as a dict")
    return dict(value)


def _encode(root: str, value: list[Any] | tuple[Any, ...] | dict[str, Any], max_bytes: int) -> bytes:
    # Two passes on purpose: the first only answers "surely fine", without paths, and is all that most calls pay for.
    values: Iterable[Any] = (value,) if type(value) is dict else value
    if _room_left(values, -1 if type(value) is dict else 0, max_bytes) >= 0:
        try:
            raw = orjson.dumps(value)
        except TypeError:
            pass  # a lone surrogate: the exact pass says where
        else:
            if b"\\u0000" not in raw:  # a NUL, or the harmless text of its escape: the exact pass tells them apart
                return raw
    return orjson.dumps(_PlainCopy(root, max_bytes).of(value))


def _room_left(values: Iterable[Any], depth: int, room: int) -> int:
    """How many of `room` bytes these values leave at most; negative when they need the exact pass.

    The least number of bytes is taken off as the walk goes, so that neither 300 MB of text nor a small object that
    repeats itself 2**100 times is encoded before it is refused.
    """
    for value in values:
        kind = type(value)
        if kind is str:
            room -= len(value) + 1
        elif kind is int:
            if not _MIN_INT <= value <= _MAX_INT:
                return -1
        elif kind is list or kind is dict:
            room -= (2 if kind is list else 5) * len(value)
            if depth >= MAX_DEPTH or room < 0:
                return -1
            if kind is dict:
                for key in value:
                    if type(key) is not str:
                        return -1
                    room -= len(key)
                room = _room_left(value.values(), depth + 1, room)
            else:
                room = _room_left(value, depth + 1, room)
            if room < 0:
                return -1
        elif kind is float:
            if not isfinite(value):
                return -1
        elif kind not in _CONSTANTS:
            return -1
    return room


def _size_error(parts: dict[str, Any], size: int | None, max_bytes: int) -> PayloadError:
    sizes: dict[str, int] = {}
    for root, part in parts.items():
        items = part.items() if isinstance(part, Mapping) else enumerate(part)
        for key, value in items:
            sizes[_join_path(root, [key])] = _measure(value, max_bytes)
    largest = max(sizes, key=lambda path: sizes[path], default=next(iter(parts)))
    amount = f"{size} bytes" if size is not None else f"at least {sum(sizes.values())} bytes"
    whole = "the arguments are" if "args" in parts else "the values are"
    return PayloadError(
        largest,
        f"{whole} {amount} as JSON and the limit is {max_bytes}, this being the largest of them:"
        " store the data elsewhere and pass a reference to it",
    )


def _decode(name: str, text: str, kind: type) -> Any:
    if type(text) is not str:
        raise PayloadDecodeError(f"{name}: JSON arrives as text, not as {type(text).__name__}")
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise PayloadDecodeError(f"{name}: not readable as JSON: {error}") from None
    if type(value) is not kind:
        wanted = "list" if kind is list else "object"
        raise PayloadDecodeError(f"{name}: a JSON {wanted} is needed, the row holds a {type(value).__name__}")
    if "\\u0000" in text and _NUL_ESCAPE.search(text):
        raise PayloadDecodeError(f"{name}: holds a NUL character")
    try:
        again = orjson.dumps(value).decode()
    except TypeError:
        raise PayloadDecodeError(f"{name}: nested too deep") from None
    # Text that comes back the same lost nothing. Writing is four times faster than reading, and it spares what enqueue
    # wrote the audit, which is several times slower.
    if again != text:
        _audit(name, text)
    return value


def _audit(name: str, text: str) -> None:
    """Refuse text that holds more than orjson makes of it."""

    def whole_int(digits: str) -> int:
        # The length comes first because int() itself refuses 4,301 digits.
        if len(digits) > 20 or not _MIN_INT <= int(digits) <= _MAX_DECODED_INT:
            raise PayloadDecodeError(f"{name}: holds an integer beyond 64 bits")
        return 0

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise PayloadDecodeError(f"{name}: an object holds the same key twice")
        return members

    try:
        json.loads(text, parse_int=whole_int, object_pairs_hook=distinct)
    except RecursionError:
        raise PayloadDecodeError(f"{name}: nested too deep for the stack that is left") from None


class _TooLarge(Exception):
    """The value cannot fit, whatever the rest of it holds."""


class _PlainCopy:
    """The exact pass: a copy in plain types, or PayloadError with the path."""

    def __init__(self, root: str, room: int) -> None:
        self.root, self.room = root, room
        self.trail: list[str | int] = []
        self.open: set[int] = set()

    def of(self, value: list[Any] | tuple[Any, ...] | dict[str, Any]) -> list[Any] | dict[str, Any]:
        return self._dict(value) if isinstance(value, dict) else self._items(value)

    def _refuse(self, reason: str) -> PayloadError:
        return PayloadError(_join_path(self.root, self.trail), reason)

    def _value(self, value: Any) -> Any:
        kind = type(value)
        plain: Any
        if kind in _CONSTANTS:
            return value
        if kind is float:
            if not isfinite(value):
                raise self._refuse("NaN and infinity are not JSON: pass None or a text")
            return value
        if issubclass(kind, enum.Enum):
            raise self._refuse(_instead(kind))
        if issubclass(kind, str):
            plain = self._text(value)
        elif issubclass(kind, int):
            plain = int.__int__(value)
            if not _MIN_INT <= plain <= _MAX_INT:
                raise self._refuse("an integer beyond 64 bits would lose digits: pass str(value)")
        elif issubclass(kind, (list, dict)):
            plain = self._container(value)
        else:
            raise self._refuse(_instead(kind))
        if type(plain) is not kind and not _equal(plain, value):
            raise self._refuse(f"a {_name(kind)} does not equal the plain value that would arrive: pass that one")
        return plain

    def _text(self, value: str) -> str:
        plain = str.__str__(value)
        self._take(len(plain))
        if "\0" in plain:
            raise self._refuse("the text holds a NUL character, which PostgreSQL cannot store: remove it")
        try:
            plain.isascii() or plain.encode()
        except UnicodeEncodeError:
            raise self._refuse(
                "the text holds a lone surrogate, which is no character: decode its source with errors='replace'"
            ) from None
        return plain

    def _container(self, value: list[Any] | dict[str, Any]) -> list[Any] | dict[str, Any]:
        if id(value) in self.open:
            raise self._refuse("a list or dict that contains itself is not JSON")
        if len(self.open) >= MAX_DEPTH:
            raise self._refuse(f"nested more than {MAX_DEPTH} deep: pass a flatter structure")
        self.open.add(id(value))
        plain = self._dict(value) if isinstance(value, dict) else self._items(list.__iter__(value))
        self.open.remove(id(value))
        return plain

    def _items(self, values: Iterable[Any]) -> list[Any]:
        plain: list[Any] = []
        for index, value in enumerate(values):
            self.trail.append(index)
            self._take(1)
            plain.append(self._value(value))
            self.trail.pop()
        return plain

    def _dict(self, value: dict[str, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for key, member in dict.items(value):
            kind = type(key)
            if not issubclass(kind, str) or issubclass(kind, enum.Enum):
                raise self._refuse(f"a key of type {_name(kind)} would arrive as text: use keys of type str")
            self.trail.append(str.__str__(key))
            self._take(1)
            plain[self._text(key)] = self._value(member)
            self.trail.pop()
        if len(plain) < dict.__len__(value):
            raise self._refuse("two keys are the same text")
        return plain

    def _take(self, room: int) -> None:
        self.room -= room
        if self.room < 0:
            raise _TooLarge


def _equal(plain: Any, value: Any) -> bool:
    try:
        return bool(plain == value)
    except Exception:  # noqa: BLE001 (whatever a subclass does in __eq__)
        return False


def _instead(kind: type) -> str:
    for kinds, reason in _INSTEAD:
        if issubclass(kind, kinds):
            return f"a {_name(kind)} {reason}"
    with suppress(Exception):  # a metaclass may answer the question with anything
        if is_dataclass(kind):
            return f"the dataclass {_name(kind)} is not JSON: pass dataclasses.asdict(value), or an id to load it by"
    return f"a {_name(kind)} is not JSON: pass an id to load it by, or the plain values to build it from"


def _name(kind: type) -> str:
    name = str(type.__dict__["__qualname__"].__get__(kind))[
        :100
    ]  # a metaclass may answer kind.__qualname__ with anything
    return name if name.isprintable() else ascii(name)


def _join_path(root: str, trail: Iterable[Any]) -> str:
    path = root
    for step in trail:
        if isinstance(step, int):
            path += f"[{step}]"
        elif isinstance(step, str) and step.isidentifier() and len(step) <= 40:
            path += f".{step}"
        else:
            key = str(step) if len(str(step)) <= 40 else str(step)[:39] + "…"
            path += f"[{json.dumps(key, ensure_ascii=not key.isprintable())}]"
    return path if len(path) <= 500 else f"{path[:249]}…{path[-250:]}"


def _measure(value: Any, enough: int) -> int:
    """The bytes of this value as JSON, roughly and from below; stops counting above `enough`."""
    size, waiting = 0, [value]
    while waiting and size <= enough:
        item = waiting.pop()
        kind = type(item)
        if issubclass(kind, str):
            size += str.__len__(item) + 2
        elif issubclass(kind, list):
            size += list.__len__(item) + 1
            waiting.extend(islice(list.__iter__(item), enough + 1))
        elif issubclass(kind, dict):
            for key, member in islice(dict.items(item), enough + 1):
                size += (str.__len__(key) if isinstance(key, str) else 0) + 4
                waiting.append(member)
        else:
            size += 1
    return size

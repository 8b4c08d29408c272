"""The codec: what the handler receives equals what was passed, or enqueue refuses."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.errors import PayloadDecodeError, PayloadError
from pgqueue.payload import (
    decode_args,
    decode_kwargs,
    decode_object,
    encode_args,
    encode_call,
    encode_kwargs,
    encode_object,
)

NAIVE = datetime.datetime(2024, 1, 1)  # noqa: DTZ001


class Text(str):
    __slots__ = ("note",)


class Number(int):
    pass


class Real(float):
    pass


class Items(list[Any]):
    pass


class Members(dict[Any, Any]):
    pass


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


@dataclasses.dataclass
class Photo:
    taken_at: str


class NeverEqual(str):
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return False


class RaisesOnEqual(Items):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparing")


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def same(left: Any, right: Any) -> bool:
    """Equal, in types and in the sign of zero as well."""
    if type(left) is not type(right):
        return False
    if type(left) is float:
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    if type(left) is list:
        return len(left) == len(right) and all(map(same, left, right))
    if type(left) is dict:
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def refusal(value: Any, **options: Any) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        encode_args([value], **options)
    return caught.value


characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
texts = st.text(characters)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
payloads = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20)
junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters()),
        st.binary(),
        st.datetimes(),
        st.uuids(),
        st.decimals(),
        st.complex_numbers(),
        st.sampled_from(
            [Colour.RED, Level.LOW, Word.YES, Text("a"), Text("\0"), Number(7), Real(1.5), Photo("x"), object, ...]
        ),
        st.builds(NeverEqual, st.text()),
    ),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner),
        st.builds(Items, st.lists(inner)),
        st.dictionaries(st.text() | st.integers() | st.booleans() | st.none() | st.builds(Text, st.text()), inner),
        st.builds(Members, st.dictionaries(st.text(), inner)),
    ),
    max_leaves=10,
)


@given(st.lists(payloads), st.dictionaries(texts, payloads))
def test_what_is_accepted_comes_back_equal_and_of_the_same_types(args: list[Any], kwargs: dict[str, Any]) -> None:
    positional, keyword = encode_call(args, kwargs)
    assert same(decode_args(positional), args)
    assert same(decode_kwargs(keyword), kwargs)


@given(junk)
def test_anything_else_is_refused_or_comes_back_equal(value: Any) -> None:
    try:
        text = encode_args([value])
    except PayloadError:
        return
    (back,) = decode_args(text)
    assert back == value
    assert value == back


@given(st.text())
def test_reading_any_text_returns_a_list_or_raises_the_one_error(text: str) -> None:
    with suppress(PayloadDecodeError):
        assert type(decode_args(text)) is list


@given(payloads, st.booleans())
def test_text_that_another_json_writer_made_is_read_the_same(value: Any, ascii_only: bool) -> None:
    assert same(decode_args(json.dumps([value], ensure_ascii=ascii_only, indent=1)), [value])


def test_no_arguments_are_stored_as_nothing() -> None:
    assert encode_call((), {}) == (None, None)
    assert encode_args([]) is None
    assert encode_kwargs({}) is None
    assert encode_object("headers", {}) is None
    assert decode_args(None) == []
    assert decode_kwargs(None) == {}
    assert decode_object("headers", None) == {}


def test_the_arguments_themselves_may_be_a_tuple() -> None:
    assert encode_args((1, "a")) == '[1,"a"]'


@pytest.mark.parametrize("args", ["abc", b"abc", {1, 2}, 5, iter([1])])
def test_arguments_that_are_no_sequence_are_refused(args: Any) -> None:
    with pytest.raises(PayloadError, match=r"^args: "):
        encode_args(args)


@pytest.mark.parametrize("text", ["\\u0000", "\\\\u0000", "🦆", "é", "e\u0301", "\x7f\x1b\u2028", '"\\/', "\U0010ffff"])
def test_unusual_text_survives_as_value_and_as_key(text: str) -> None:
    assert decode_args(encode_args([text])) == [text]
    assert decode_kwargs(encode_kwargs({text: text})) == {text: text}


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, -0.0, 1e16, 1.0, 5e-324, 1.7976931348623157e308, True, None])
def test_numbers_keep_type_sign_and_every_digit(value: Any) -> None:
    (back,) = decode_args(encode_args([value]))
    assert same(back, value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Text("a"), "a"),
        (Number(7), 7),
        (Items([Text("b")]), ["b"]),
        (Members({Text("k"): Number(1)}), {"k": 1}),
        (OrderedDict(a=1), {"a": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
    ],
)
def test_a_subclass_arrives_as_the_plain_type(value: Any, plain: Any) -> None:
    (back,) = decode_args(encode_args([value]))
    assert same(back, plain)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ((1, 2), "list(value)"),
        ({1}, "sorted(value)"),
        (frozenset(), "sorted(value)"),
        (b"x", "value.hex()"),
        (bytearray(b"x"), "value.hex()"),
        (NAIVE, "a datetime is not JSON: pass value.isoformat() and parse it in the task"),
        (datetime.datetime.now(datetime.UTC), "value.isoformat()"),
        (datetime.date(2024, 1, 1), "value.isoformat()"),
        (datetime.time(1), "value.isoformat()"),
        (datetime.timedelta(1), "value.total_seconds()"),
        (uuid.uuid4(), "str(value)"),
        (decimal.Decimal("1.1"), "str(value)"),
        (Path("/tmp"), "str(value)"),
        (Colour.RED, "value.value"),
        (Level.LOW, "value.value"),
        (Word.YES, "value.value"),
        (Photo("x"), "dataclasses.asdict(value)"),
        (Real(1.5), "float(value)"),
        (math.nan, "None"),
        (-math.inf, "None"),
        (2**63, "str(value)"),
        (-(2**63) - 1, "str(value)"),
        (10**5000, "str(value)"),
        (Number(2**70), "str(value)"),
        ("a\0b", "remove it"),
        ("\ud800", "errors='replace'"),
        (Text("\ud800"), "errors='replace'"),
        ({1: "a"}, "keys of type str"),
        ({1: "a", "1": "b"}, "keys of type str"),
        ({None: 1}, "keys of type str"),
        ({True: 1}, "keys of type str"),
        ({Word.YES: 1}, "keys of type str"),
        ({"\0": 1}, "remove it"),
        ({"\ud800": 1}, "errors='replace'"),
        ({NeverEqual("a"): 1, "a": 2}, "same text"),
        (NeverEqual("a"), "does not equal"),
        (RaisesOnEqual(), "does not equal"),
        (object(), "an id to load it by"),
        (1j, "an id to load it by"),
        (range(3), "an id to load it by"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_would_change_is_refused_with_advice(value: Any, advice: str) -> None:
    assert advice in refusal(value).reason
    assert advice in refusal({"deep": [value]}).reason


def test_the_path_leads_to_the_value() -> None:
    when = NAIVE
    assert refusal({"photos": [0, 1, 2, {"taken_at": when}]}).path == "args[0].photos[3].taken_at"
    with pytest.raises(PayloadError) as caught:
        encode_kwargs({"user": {"a b": {"x\n\x1b[0m\u202e": when}}})
    assert caught.value.path == 'kwargs.user["a b"]["x\\n\\u001b[0m\\u202e"]'
    with pytest.raises(PayloadError, match=r"^headers\.trace: "):
        encode_object("headers", {"trace": when})


def test_long_keys_and_long_paths_are_cut() -> None:
    value: Any = object()
    for _ in range(90):
        value = {"k" * 10_000: value}
    assert len(refusal({"k" * 10_000: object()}).path) < 60
    assert len(refusal(value).path) <= 500


@pytest.mark.parametrize("hide", [lambda s: s.encode(), lambda s: (s,), lambda s: s + "\0", Photo, NeverEqual])
def test_no_message_repeats_the_value(hide: Callable[[str], Any]) -> None:
    assert "hunter2" not in str(refusal(hide("hunter2")))


def test_no_decode_message_repeats_the_value() -> None:
    for text in ['["hunter2', '"hunter2"', '["hunter2\\u0000"]', "[99999999999999999999999]", "hunter2"]:
        with pytest.raises(PayloadDecodeError) as caught:
            decode_args(text)
        assert "hunter2" not in str(caught.value)
        assert "99999" not in str(caught.value)

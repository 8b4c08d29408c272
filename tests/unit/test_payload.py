"""The codec: what the handler receives equals what was passed, or enqueue refuses."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
import time
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
    DEFAULT_MAX_BYTES,
    MAX_DEPTH,
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


def test_a_type_with_a_hostile_name_is_named_safely() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError

    assert "Hidden" in refusal(Meta("Hidden", (), {})()).reason
    forged = type("a\n\x1b[2J" + "b" * 5000, (), {})
    assert refusal(forged()).reason.isprintable()
    assert len(refusal(forged()).reason) < 400


def test_a_value_that_lies_about_its_class_is_seen_through() -> None:
    class Liar:
        __class__ = str  # type: ignore[assignment]

    assert "Liar" in refusal(Liar()).reason


def test_nesting_is_accepted_to_the_limit_and_refused_beyond() -> None:
    deepest = nested(MAX_DEPTH)
    assert decode_args(encode_args([deepest])) == [deepest]
    assert decode_kwargs(encode_kwargs({"a": deepest})) == {"a": deepest}
    assert "deep" in refusal(nested(MAX_DEPTH + 1)).reason
    assert "deep" in refusal(nested(100_000)).reason
    with pytest.raises(PayloadError, match="deep"):
        encode_kwargs({"a": nested(MAX_DEPTH + 1)})


def test_a_cycle_is_refused() -> None:
    items: list[Any] = []
    items.append({"again": items})
    assert "contains itself" in refusal(items).reason
    assert refusal(items).path == "args[0][0].again"


def test_one_list_in_two_places_is_no_cycle() -> None:
    shared = [1]
    assert decode_args(encode_args([shared, shared, Items([shared])])) == [[1], [1], [[1]]]


def test_a_small_object_that_unfolds_without_end_is_refused_quickly() -> None:
    for kind in (list, Items):
        value: Any = "x"
        for _ in range(90):
            value = kind([value, value])
        started = time.thread_time()
        assert "bytes" in refusal(value).reason
        assert time.thread_time() - started < 10


def test_the_limit_counts_bytes_and_is_inclusive() -> None:
    assert encode_args(["é" * 10], max_bytes=24) == '["éééééééééé"]'
    error = refusal("é" * 10, max_bytes=23)
    assert "24 bytes" in error.reason
    assert "23" in error.reason


@given(payloads, st.integers(0, 40))
def test_nothing_larger_than_the_limit_is_ever_written_and_nothing_smaller_refused(value: Any, limit: int) -> None:
    text = encode_args([value])
    assert text is not None
    if len(text.encode()) <= limit:
        assert encode_args([value], max_bytes=limit) == text
    else:
        assert "the limit is" in refusal(value, max_bytes=limit).reason


def test_a_call_is_bounded_as_a_whole_and_the_largest_argument_named() -> None:
    args, kwargs = ["a" * 10, "b" * 30], {"small": 1, "large": ["c" * 40]}
    positional, keyword = encode_call(args, kwargs, max_bytes=200)
    size = len(positional or "") + len(keyword or "")
    assert encode_call(args, kwargs, max_bytes=size) == (positional, keyword)
    for limit in (size - 1, 60, 5, 0):
        with pytest.raises(PayloadError) as caught:
            encode_call(args, kwargs, max_bytes=limit)
        assert caught.value.path == ("kwargs.large" if limit > 30 else caught.value.path)
        assert str(limit) in caught.value.reason


def test_a_huge_text_is_refused_before_it_is_encoded() -> None:
    huge = "x" * 300_000_000
    started = time.thread_time()
    with pytest.raises(PayloadError) as caught:
        encode_call([1], {"n": 1, "document": huge})
    assert time.thread_time() - started < 0.2
    assert caught.value.path == "kwargs.document"
    assert "3000000" in caught.value.reason
    assert str(DEFAULT_MAX_BYTES) in caught.value.reason


def test_a_huge_key_is_refused_before_it_is_encoded() -> None:
    assert "bytes" in refusal({"k" * 10_000_000: 1}).reason


def test_the_payload_is_a_snapshot() -> None:
    value = {"a": [1]}
    text = encode_args([value])
    value["a"].append(2)
    assert decode_args(text) == [{"a": [1]}]


@pytest.mark.parametrize(
    "text",
    [
        "null",
        "1",
        '"a"',
        "{}",
        "",
        " ",
        "[",
        "[1]x",
        "[NaN]",
        "[Infinity]",
        "[1e400]",
        "[01]",
        "\ufeff[]",
        "[" + "1" * 5000 + "]",
        "[" + "1" * 20_000_000 + "]",
        "[18446744073709551616]",
        "[-9223372036854775809]",
        '[{"a":[99999999999999999999]}]',
        '["\\u0000"]',
        '[{"\\u0000":1}]',
        '["\\ud800"]',
        '["\\udc00\\ud800"]',
        '["\ud800"]',
        '[{"a":1,"a":2}]',
        "[" * 255 + "]" * 255,
        "[" * 255 + " " + "]" * 255,
        '["\\\\\\u0000"]',
        "[" * 900 + "]" * 900,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000,
    ],
    ids=lambda text: ascii(text[:30]),
)
def test_a_row_that_is_no_list_of_arguments_is_one_clear_error(text: str) -> None:
    with pytest.raises(PayloadDecodeError):
        decode_args(text)


@pytest.mark.parametrize("text", ["null", "[]", "3", '{"a":1,"a":1}', '{"a":1e999}'])
def test_a_row_that_is_no_object_of_keywords_is_one_clear_error(text: str) -> None:
    with pytest.raises(PayloadDecodeError, match=r"^kwargs: "):
        decode_kwargs(text)
    with pytest.raises(PayloadDecodeError, match=r"^headers: "):
        decode_object("headers", text)


@pytest.mark.parametrize("value", [b"[]", [1], {"a": 1}, 5, bytearray(b"[]")])
def test_a_value_that_is_no_text_is_the_same_error(value: Any) -> None:
    with pytest.raises(PayloadDecodeError):
        decode_args(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" [ 1 , 2 ] ", [1, 2]),
        ("[1.0e3, 1E2]", [1000.0, 100.0]),
        ('["\\ud83e\\udd86 \\u00e9 \\/"]', ["🦆 é /"]),
        ('["\\\\u0000"]', ["\\u0000"]),
        ("[18446744073709551615, 9223372036854775808]", [2**64 - 1, 2**63]),
        ("[18446744073709551615]", [2**64 - 1]),
        ('[{"b": 1, "a": {"b": 2}}]', [{"b": 1, "a": {"b": 2}}]),
        ("[" * 254 + "]" * 254, nested(254)),
        ("[" * 254 + " " + "]" * 254, nested(254)),
        ('["\\\\\\\\u0000"]', ["\\\\u0000"]),
        ('["[[[[' + "[" * 200 + '"]', ["[[[[" + "[" * 200]),
    ],
)
def test_a_row_written_by_hand_is_read_when_it_loses_nothing(text: str, value: Any) -> None:
    assert same(decode_args(text), value)

"""What payloads are refused for: depth, size, cycles; and rows that hold something else."""

from __future__ import annotations

import time
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
)
from tests.unit.test_payload import Items, nested, payloads, refusal, same


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

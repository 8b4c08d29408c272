"""The text of a failure: bounded, storable, and never a second failure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.failure import PLACEHOLDER, Failure, clean, describe, one_line

E = TypeVar("E", bound=BaseException)


class BrokenTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __repr__(self) -> str:
        raise RuntimeError("no text either")


class ExitingTextError(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


class NoTextError(Exception):
    __str__: Any = object  # what it returns is no text


class BrokenClassError(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no traceback")

    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no cause")

    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no notes")


class HidingMeta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError("no attributes")


class HiddenError(Exception, metaclass=HidingMeta):
    pass


class StrangeModuleError(Exception):
    __module__ = 5  # type: ignore[assignment]


class RaisesOnEverythingError(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise KeyboardInterrupt


def raised(error: E, cause: BaseException | None = None) -> E:
    with suppress(BaseException):
        raise error from cause
    return error


def deep_group(levels: int) -> BaseException:
    error: BaseException = ValueError("the seed")
    for level in range(levels):
        error = BaseExceptionGroup(f"level {level}", [error])
    return raised(error)


def wide_groups() -> BaseException:
    error: BaseException = ValueError("the seed")
    for _ in range(30):
        error = raised(BaseExceptionGroup("wide", [error] * 1000), cause=error)
    return error


def long_chain() -> BaseException:
    error: BaseException = ValueError("the first")
    for number in range(5000):
        error = raised(RuntimeError(f"number {number}"), cause=error)
    return error


def looped_chain() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def endless_recursion() -> BaseException:
    def again() -> None:
        again()

    try:
        again()
    except RecursionError as error:
        return error
    raise AssertionError


HOSTILE: list[Callable[[], Any]] = [
    lambda: ValueError("a\0b\x1b[2J\x07"),
    lambda: ValueError("\ud800"),
    lambda: ValueError("x" * 50_000_000),
    lambda: ValueError("\ud800\0é" * 10_000_000),
    lambda: ValueError(b"\xff\0"),
    BrokenTextError,
    ExitingTextError,
    NoTextError,
    BrokenClassError,
    lambda: HiddenError("x"),
    lambda: StrangeModuleError("x"),
    RaisesOnEverythingError,
    lambda: type("N" * 100_000 + "\n", (Exception,), {})("x"),
    lambda: type("é" * 5000, (Exception,), {})("é" * 5000),
    lambda: deep_group(2000),
    wide_groups,
    long_chain,
    looped_chain,
    endless_recursion,
    lambda: SystemExit(0),
    KeyboardInterrupt,
    GeneratorExit,
    lambda: SyntaxError("bad", ("f.py", 1, 1, "x" * 1_000_000, 1, 2)),
    lambda: UnicodeDecodeError("utf-8", b"\xff" * 1000, 0, 1, "bad"),
    lambda: None,
    object,
    lambda: "text",
]


@pytest.mark.parametrize("make", HOSTILE)
@pytest.mark.parametrize("max_bytes", [8192, 100, 7, 0])
def test_any_exception_becomes_bounded_storable_text_in_bounded_time(make: Callable[[], Any], max_bytes: int) -> None:
    error = make()
    started = time.thread_time()
    failure = describe(error, max_bytes=max_bytes)
    assert time.thread_time() - started < 1
    parts = [failure.type, failure.message, failure.traceback]
    assert sum(len(part.encode()) for part in parts) <= max_bytes
    assert len(failure.type.encode()) <= 200
    assert len(failure.message.encode()) <= 2048
    for part in parts:
        assert clean(part, 100_000) == part
    record = json.loads(failure.to_json(attempt=3))
    assert record == {"attempt": 3, "type": failure.type, "message": failure.message, "traceback": failure.traceback}
    assert len(failure.summary.encode()) <= 500
    assert failure.summary.isprintable()


def test_an_ordinary_exception_reads_as_python_prints_it() -> None:
    failure = describe(raised(ValueError("no such photo")))
    assert failure.type == "ValueError"
    assert failure.message == "no such photo"
    assert failure.summary == "ValueError: no such photo"
    lines = failure.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith("in raised")
    assert lines[2] == "    raise error from cause"
    assert lines[-1] == "ValueError: no such photo"


def test_a_class_outside_builtins_is_named_with_its_module() -> None:
    assert describe(json.JSONDecodeError("bad", "x", 0)).type == "json.decoder.JSONDecodeError"
    assert describe(BrokenTextError()).type == f"{__name__}.BrokenTextError"
    assert describe(HiddenError("x")).type == f"{__name__}.HiddenError"
    assert describe(StrangeModuleError("x")).type == "StrangeModuleError"


def test_an_exception_whose_text_cannot_be_read_keeps_its_type_and_its_frames() -> None:
    for kind in (BrokenTextError, ExitingTextError, NoTextError):
        failure = describe(raised(kind()))
        assert failure.type.endswith(kind.__name__)
        assert failure.message == "(the text of this error could not be read)"
        assert "in raised" in failure.traceback


def test_properties_over_the_exceptions_own_attributes_are_read_past() -> None:
    failure = describe(raised(BrokenClassError("still here")))
    assert failure.message == "still here"
    assert "in raised" in failure.traceback


def test_an_exception_without_text_has_its_type_for_a_summary() -> None:
    assert describe(KeyboardInterrupt()).summary == "KeyboardInterrupt"


def test_the_chain_is_told_from_the_root_cause_on() -> None:
    text = describe(raised(RuntimeError("later"), cause=raised(ValueError("earlier")))).traceback
    assert text.index("ValueError: earlier") < text.index("direct cause") < text.index("RuntimeError: later")
    implicit = raised(RuntimeError("later"))
    implicit.__context__, implicit.__suppress_context__ = ValueError("earlier"), False
    text = describe(implicit).traceback
    assert text.index("earlier") < text.index("During handling") < text.index("later")
    suppressed = raised(RuntimeError("later"))
    suppressed.__context__, suppressed.__suppress_context__ = ValueError("earlier"), True
    assert "earlier" not in describe(suppressed).traceback


def test_a_group_shows_its_first_members() -> None:
    group = raised(ExceptionGroup("two things", [raised(ValueError("one")), ExceptionGroup("in", [KeyError("two")])]))
    text = describe(group).traceback
    assert "ExceptionGroup: two things (2 sub-exceptions)" in text
    assert "    ValueError: one" not in text
    assert "  ValueError: one" in text
    assert "    KeyError: 'two'" in text


def test_notes_are_kept() -> None:
    error = ValueError("x")
    error.add_note("upload 7")
    assert "upload 7" in describe(error).traceback


def test_local_values_are_never_in_the_traceback() -> None:
    def handler(password: str) -> None:
        copy = password  # noqa: F841
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused") as caught:
        handler("hunter" + "2")
    assert "in handler" in describe(caught.value).traceback
    assert "hunter2" not in describe(caught.value).to_json(attempt=1)


def test_the_last_frames_stay_when_a_traceback_is_cut() -> None:
    def down(levels: int) -> None:
        if levels == 0:
            raise ValueError("at the bottom")
        down(levels - 1)

    try:
        down(200)
    except ValueError as error:
        failure = describe(error, max_bytes=300)
    assert failure.traceback.startswith("…")
    assert failure.traceback.endswith("ValueError: at the bottom")
    assert 'raise ValueError("at the bottom")' in failure.traceback


def test_a_failure_is_described_even_at_the_end_of_the_stack() -> None:
    def descend() -> Failure:
        try:
            return descend()
        except RecursionError as error:
            return describe(error)

    assert descend().type in ("RecursionError", "unknown")


def test_text_from_elsewhere_is_storable_too() -> None:
    record = json.loads(Failure(type="a\0", message="\ud800", traceback="\x1b[0m\n\t").to_json(attempt=1))
    assert record == {"attempt": 1, "type": "a\ufffd", "message": "\ufffd", "traceback": "\ufffd[0m\n\t"}


def test_the_placeholder_says_that_the_text_is_missing() -> None:
    assert json.loads(PLACEHOLDER.to_json(attempt=2))["attempt"] == 2
    assert "could not be stored" in PLACEHOLDER.summary


@given(st.text(st.characters()), st.integers(0, 60))
def test_clean_text_is_valid_bounded_and_otherwise_unchanged(text: str, max_bytes: int) -> None:
    result = clean(text, max_bytes)
    assert len(result.encode()) <= max_bytes
    assert not any(c in result for c in "\0\x1b\r\x7f\x9b")
    if text.isprintable() and len(text.encode()) <= max_bytes:
        assert result == text


@given(st.text(st.characters()), st.integers(0, 60))
def test_one_line_is_one_printable_line(text: str, max_bytes: int) -> None:
    result = one_line(text, max_bytes)
    assert result.isprintable()
    assert len(result.encode()) <= max_bytes


def test_one_line_shows_what_it_escapes() -> None:
    assert one_line("a\nb\x1b[31m\0\u202eé🦆") == "a\\nb\\x1b[31m\\x00\\u202eé🦆"


def test_cut_text_ends_in_an_ellipsis_and_never_inside_a_character() -> None:
    assert clean("abcdef", 6) == "abcdef"
    assert clean("abcdefg", 6) == "abc…"
    assert clean("ééé", 5) == "é…"
    assert clean("ééé", 2) == "é"
    assert clean("ééé", 0) == ""
    assert clean("ééé", -5) == ""


def test_huge_text_is_cut_before_it_is_looked_at() -> None:
    huge = "\0" * 300_000_000
    started = time.thread_time()
    assert len(clean(huge, 100)) < 100
    assert len(one_line(huge)) <= 200
    assert time.thread_time() - started < 0.1

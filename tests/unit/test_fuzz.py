"""Whatever comes in: a value, or the one error that is promised; bounded, and never a secret."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from pgqueue.cli import enqueue as enqueue_command
from pgqueue.cli.database import check_url
from pgqueue.cli.errors import UsageMistake, hide_passwords, sentence
from pgqueue.config import (
    load_settings,
    validate_count,
    validate_name,
    validate_priority,
    validate_schema,
    validate_seconds,
)
from pgqueue.drivers import pool
from pgqueue.errors import ConfigurationError, PayloadDecodeError, PayloadError
from pgqueue.failure import clean, describe, one_line
from pgqueue.migrate_connection import describe as describe_dsn
from pgqueue.payload import decode_args, decode_kwargs, encode_args, encode_kwargs
from pgqueue.retry import DEFAULT_POLICY, MAX_DELAY, Delays, Exponential, Fixed, Linear, from_json, seconds, to_json
from tests.fuzzing import any_text, fuzz, json_like, json_texts

SECRET = "hunter2"


def attempt(call: Callable[[], Any], refusal: type[Exception]) -> tuple[Any, str]:
    """What the call returns, or the words of its refusal; any other error is the test's failure."""
    try:
        return call(), ""
    except refusal as error:
        return None, str(error)


def hostile(name: str) -> Any:
    """An object that raises when it is looked at in this way."""

    def raises(*_: Any, **__: Any) -> Any:
        raise RuntimeError(SECRET)

    members: dict[str, dict[str, Any]] = {
        "repr raises": {"__repr__": raises},
        "has no text": {"__str__": raises, "__repr__": lambda _: 5},
        "compares with nothing": {"__eq__": raises, "__hash__": raises, "__lt__": raises, "__le__": raises},
        "is false and has no length": {"__bool__": raises, "__len__": raises, "__iter__": raises},
        "is anything": {"__getattr__": raises, "__index__": raises, "__float__": raises, "__int__": raises},
    }
    return type("Hostile", (), members[name])()


hostile_objects = st.sampled_from(
    [
        *("repr raises", "has no text", "compares with nothing"),
        *("is false and has no length", "is anything"),
    ]
).map(hostile)
anything = st.one_of(
    json_like, st.binary(), st.decimals(), st.timedeltas(), st.complex_numbers(), hostile_objects, st.just(10**6000)
)


@fuzz()
@given(st.lists(json_like, max_size=4))
def test_what_is_encoded_comes_back_equal(args: list[Any]) -> None:
    try:
        text = encode_args(args)
    except PayloadError:
        return
    assert decode_args(text) == args
    assert text is None or json.loads(text) == args


@fuzz()
@given(st.one_of(anything, st.lists(anything, max_size=3), st.dictionaries(any_text, anything, max_size=3)))
def test_any_object_is_encoded_or_refused_with_a_payload_error(value: Any) -> None:
    ways = [lambda: encode_args([value]), lambda: encode_kwargs({"value": value})]
    if type(value) in (list, dict, str, bytes):
        ways += [lambda: encode_args(value), lambda: encode_kwargs(value)]
    for encode in ways:
        text, refusal = attempt(encode, PayloadError)
        assert SECRET not in refusal
        assert len(refusal) < 2000
        assert text is None or "\0" not in text.encode().decode()


@fuzz()
@given(st.one_of(json_texts, anything))
def test_any_row_is_decoded_or_refused_with_a_decode_error(text: Any) -> None:
    for decode in (decode_args, decode_kwargs):
        with suppress(PayloadDecodeError):
            assert isinstance(decode(text), (list, dict))


@fuzz()
@given(json_texts)
def test_the_json_of_the_command_line_is_a_value_or_a_mistake_of_usage(text: str) -> None:
    for option, kind in (("--args", list), ("--kwargs", dict)):
        value, refusal = attempt(partial(enqueue_command.parsed, option, text, kind, "thing"), UsageMistake)
        assert refusal.startswith(option) if refusal else type(value) is kind
        assert "\n" not in sentence(UsageMistake(refusal))


@fuzz()
@given(anything)
@example(10**6000)
@example(-(10**6000))
@example(math.nan)
@example(-math.inf)
@example(True)
@example(timedelta.max)
def test_a_duration_is_seconds_or_a_configuration_error(value: Any) -> None:
    for read in (lambda: seconds("delay", value), lambda: validate_seconds("lease", value)):
        found, refusal = attempt(read, ConfigurationError)
        assert len(refusal) < 400
        assert SECRET not in refusal
        assert refusal or (type(found) is float and 0 <= found <= MAX_DELAY)


@fuzz()
@given(st.one_of(anything, any_text, st.text(max_size=300)))
def test_a_name_or_a_number_is_taken_or_refused_in_one_bounded_line(value: Any) -> None:
    for check in (
        lambda: validate_name("queue", value),
        lambda: validate_schema(value),
        lambda: validate_count("limit", value),
        lambda: validate_priority(value),
    ):
        found, refusal = attempt(check, ConfigurationError)
        assert refusal.isprintable()
        assert len(refusal) < 400
        assert refusal or found is value


policies = st.one_of(
    st.builds(Fixed, st.floats(0, MAX_DELAY)),
    st.builds(Linear, st.floats(0, MAX_DELAY), st.floats(0, MAX_DELAY)),
    st.builds(Exponential, st.floats(1, MAX_DELAY), st.floats(0, MAX_DELAY), st.booleans()),
    st.lists(st.floats(0, MAX_DELAY), min_size=1, max_size=100).map(lambda delays: Delays(*delays)),
)
policy_texts = st.one_of(
    json_texts,
    json_like.map(lambda value: json.dumps(value)),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["fixed", "linear", "exponential", "delays", "", None])},
        optional=dict.fromkeys(("delay", "step", "cap", "base", "jitter", "delays", "extra"), json_like),
    ).map(json.dumps),
)


@fuzz()
@given(policies, st.integers(-(2**70), 2**70), st.floats())
def test_a_stored_policy_comes_back_and_its_delay_is_finite(policy: Any, attempt: int, random: float) -> None:
    assert from_json(to_json(policy)) == policy
    assert 0 <= policy.delay(attempt, random) <= MAX_DELAY


@fuzz()
@given(policy_texts, st.integers(), st.floats(0, 1))
def test_whatever_is_stored_as_a_policy_gives_a_delay(text: str, attempt: int, random: float) -> None:
    policy = from_json(text)
    assert 0 <= policy.delay(attempt, random) <= MAX_DELAY
    assert from_json(None) is DEFAULT_POLICY


def hostile_error(members: dict[str, Any], text: str, notes: Any) -> BaseException:
    error = type("E", (Exception,), members)(text)
    with suppress(BaseException):
        error.__notes__ = notes
    return error  # type: ignore[no-any-return]


def _exit(*_: Any) -> Any:
    raise SystemExit(SECRET)


# Made inside the test: where it fails, its arguments are printed.
error_parts = st.tuples(
    st.dictionaries(
        st.sampled_from(
            ["__str__", "__repr__", "__module__", "__cause__", "__traceback__", "__getattribute__", "args"]
        ),
        st.sampled_from([_exit, None, 5, property(_exit), lambda *_: "\0\ud800\x1b[2J\u202e" * 50]),
        max_size=4,
    ),
    st.one_of(any_text, st.just("x" * 1_000_000), st.just("\ud800" * 50_000)),
    st.one_of(st.lists(any_text), st.none(), st.integers(), st.just([5, None])),
)


@fuzz()
@given(error_parts, st.integers(-5, 20_000))
def test_any_exception_is_described_in_bounded_storable_text(parts: tuple[Any, Any, Any], most: int) -> None:
    failure = describe(hostile_error(*parts), max_bytes=most)
    texts = (failure.type, failure.message, failure.traceback)
    for text in texts:
        assert not any(ord(c) < 32 and c not in "\n\t" for c in text)
        text.encode()
    assert sum(len(text.encode()) for text in texts) <= max(most, 100)
    assert failure.summary.isprintable()
    assert "\\u0000" not in failure.to_json(attempt=1)


@fuzz()
@given(any_text | st.text("\x1b[31m\r\n\u202e\u2066\ufeff", max_size=50), st.integers(-5, 300))
def test_a_text_is_one_printable_line_of_so_many_bytes(text: str, most: int) -> None:
    line = one_line(text, most)
    assert line.isprintable()
    assert len(line.encode()) <= max(0, most)
    assert len(clean(text, most).encode()) <= max(0, most)


junk = st.text(st.sampled_from("ab@:/?#%&=[] '\\,;.0"), max_size=6)
secret_urls = st.one_of(
    st.builds(lambda a, b: f"postgresql://me:{a}{SECRET}{b}@host:5432/db", junk, junk),
    st.builds(lambda a, b: f"postgres://me:{SECRET}@host{a}/db{b}", junk, junk),
    st.builds(lambda a, b: f"postgresql+psycopg://me:{a}{SECRET}{b}@host/db", junk, junk),
    st.builds(lambda a, b: f"host=h user=u password={a}{SECRET}{b}", junk, junk),
    st.builds(lambda a, b: f"password='{a}{SECRET}{b}' host=h port=x", junk, junk),
)


@fuzz(3)
@given(secret_urls)
@example(f"postgresql://me:p@{SECRET}@host/db")
@example(f"postgresql://me:p/{SECRET}@host/db")
@example(f"postgresql://me:p?{SECRET}@host/db")
@example(f"postgresql://me:p@{SECRET}@host:5432/db?x")
@example(f"postgresql://me:?@{SECRET}@host:5432/db")
@example(f"postgresql://me:{SECRET}%a0@host:5432/db")
def test_no_part_of_a_url_that_is_shown_holds_its_password(url: str) -> None:
    settings, refusal = attempt(lambda: load_settings({"database_url": url}, {}), ConfigurationError)
    assert SECRET not in repr(settings) + refusal
    for show in (pool.describe, describe_dsn, check_url) if settings else (describe_dsn,):
        shown, refusal = attempt(partial(show, url), ConfigurationError)
        assert SECRET not in f"{shown}{refusal}"


@fuzz()
@given(st.text(st.characters(exclude_characters=" \t\n@/", categories=["L", "N", "P"]), max_size=8))
def test_a_url_in_a_message_loses_its_password(noise: str) -> None:
    for text in (
        f"cannot open postgresql://me:{SECRET}{noise}@host/db now",
        f"conn failed: host=h password={SECRET} user=u",
        f"password='{SECRET} two words' host=h",
    ):
        assert SECRET not in hide_passwords(text)

"""The decision about a run: pure, total, and honest about attempts."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.errors import ConfigurationError
from pgqueue.job import Job
from pgqueue.outcome import DeadLetter, Discard, Outcome, OutcomeKind, Retry, Signal, Snooze, decide
from pgqueue.retry import Delays, Fixed, to_json


def make_job(attempt: int = 1, max_attempts: int = 3, retry_json: str | None = to_json(Delays(10, 20))) -> Job:
    return Job(
        id=1,
        queue="images",
        task="t",
        token=7,
        attempt=attempt,
        max_attempts=max_attempts,
        lost=0,
        priority=0,
        position=1,
        timeout=None,
        created_utc=datetime.now(UTC),
        args_json=None,
        kwargs_json=None,
        retry_json=retry_json,
        headers_json=None,
    )


class BrokenClassError(Exception):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class BareSnooze(Snooze):
    def __init__(self) -> None:
        pass


class BareRetry(Retry):
    def __init__(self) -> None:
        pass


ORDINARY: list[Callable[[], BaseException]] = [
    lambda: ValueError("a\0b"),
    lambda: SystemExit(0),
    lambda: SystemExit("x"),
    KeyboardInterrupt,
    GeneratorExit,
    StopIteration,
    asyncio.CancelledError,
    TimeoutError,
    MemoryError,
    lambda: BaseExceptionGroup("g", [KeyboardInterrupt()]),
    BrokenClassError,
    Signal,
    BareSnooze,
]


def test_a_handler_that_returns_completes_the_job() -> None:
    assert decide(make_job(), None, random=0.5) == Outcome(OutcomeKind.COMPLETED)


@pytest.mark.parametrize("make", ORDINARY)
def test_any_exception_is_one_failed_attempt(make: Callable[[], BaseException]) -> None:
    error = make()
    outcome = decide(make_job(attempt=2), error, random=0.5)
    assert outcome.kind is OutcomeKind.RETRY
    assert json.loads(outcome.error_json or "")["attempt"] == 2
    assert decide(make_job(attempt=3), error, random=0.5).kind is OutcomeKind.DEAD


def test_the_stored_policy_decides_the_delay() -> None:
    assert decide(make_job(attempt=1), ValueError(), random=0.5).delay == 10
    assert decide(make_job(attempt=2), ValueError(), random=0.5).delay == 20
    assert decide(make_job(retry_json=None), ValueError(), random=0.5).delay == 1
    assert decide(make_job(retry_json="{garbled"), ValueError(), random=0.5).delay == 1


@pytest.mark.parametrize(("attempt", "limit"), [(1, 1), (3, 3), (5, 3), (1, 0), (1, -1)])
def test_the_last_attempt_and_any_beyond_it_end_among_the_dead_letters(attempt: int, limit: int) -> None:
    for error in (ValueError("bad\nday"), Retry(delay=1, reason="bad\nday")):
        outcome = decide(make_job(attempt, limit), error, random=0.5)
        assert outcome.kind is OutcomeKind.DEAD
        assert outcome.delay == 0
        assert outcome.reason is not None
        assert outcome.reason.endswith(": bad\\nday")
        assert json.loads(outcome.error_json or "")["message"] == "bad\nday"


def test_retry_brings_its_own_delay_or_asks_the_policy() -> None:
    assert decide(make_job(), Retry(delay=7), random=0.5).delay == 7
    assert decide(make_job(), Retry(delay=timedelta(minutes=1)), random=0.5).delay == 60
    assert decide(make_job(), Retry(delay=0), random=0.5).delay == 0
    assert decide(make_job(), Retry(), random=0.5).delay == 10
    assert decide(make_job(), BareRetry(), random=0.5).delay == 10
    assert json.loads(decide(make_job(), Retry(reason="busy"), random=0.5).error_json or "")["message"] == "busy"


def test_snooze_keeps_the_attempt_even_on_the_last_one() -> None:
    outcome = decide(make_job(attempt=3), Snooze(timedelta(hours=1)), random=0.5)
    assert outcome == Outcome(OutcomeKind.SNOOZE, delay=3600)


def test_discard_ends_the_job_with_a_one_line_reason() -> None:
    outcome = decide(make_job(), Discard("not\nneeded"), random=0.5)
    assert outcome == Outcome(OutcomeKind.DISCARD, reason="not\\nneeded")
    assert decide(make_job(), Discard(), random=0.5) == Outcome(OutcomeKind.DISCARD)
    long = decide(make_job(), Discard("x" * 50_000_000), random=0.5).reason
    assert long is not None
    assert len(long.encode()) <= 500


def test_a_reason_that_is_no_text_still_discards() -> None:
    outcome = decide(make_job(), Discard(ValueError("why")), random=0.5)  # type: ignore[arg-type]
    assert outcome == Outcome(OutcomeKind.DISCARD, reason="why")


def test_dead_letter_does_not_wait_for_the_last_attempt() -> None:
    outcome = decide(make_job(attempt=1), DeadLetter("wrong customer"), random=0.5)
    assert outcome.kind is OutcomeKind.DEAD
    assert outcome.reason == "pgqueue.outcome.DeadLetter: wrong customer"
    assert json.loads(outcome.error_json or "")["message"] == "wrong customer"


@pytest.mark.parametrize("delay", [True, math.nan, -1, 10**9, "5", timedelta(days=-1)])
def test_a_bad_delay_is_refused_where_it_is_written(delay: Any) -> None:
    with pytest.raises(ConfigurationError):
        Retry(delay=delay)
    with pytest.raises(ConfigurationError):
        Snooze(delay)


def test_a_bad_delay_set_afterwards_never_reaches_the_database() -> None:
    snooze, again = Snooze(1), Retry(delay=1)
    snooze.delay = again.delay = math.nan
    assert decide(make_job(), snooze, random=0).kind is OutcomeKind.RETRY
    assert decide(make_job(), again, random=0.5).delay == 10


@given(st.integers(), st.integers(), st.text(), st.floats())
def test_the_decision_never_raises(attempt: int, limit: int, retry_json: str, random: float) -> None:
    attempt = max(-(2**31), min(attempt, 2**31 - 1))
    outcome = decide(make_job(attempt, limit, retry_json), ValueError("x"), random=random)
    assert outcome.kind is (OutcomeKind.DEAD if attempt >= limit else OutcomeKind.RETRY)
    assert 0 <= outcome.delay <= 3600


@pytest.mark.parametrize("signal", [Retry(delay=3, reason="busy"), Snooze(3), Discard("no"), DeadLetter("no")])
def test_a_signal_survives_copying_and_pickling(signal: Signal) -> None:
    job = make_job(retry_json=to_json(Fixed(1)))
    for twin in (copy.copy(signal), pickle.loads(pickle.dumps(signal))):
        assert decide(job, twin, random=0.5) == decide(job, signal, random=0.5)


def test_the_text_of_a_signal_is_its_reason() -> None:
    assert [str(signal) for signal in (Retry(reason="a"), Snooze(1), Discard("b"), DeadLetter())] == ["a", "", "b", ""]

"""Retry rules: the nearest class decides, and whatever an application answers, the job gets an outcome."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import pgqueue
from pgqueue import rules
from pgqueue.job import Job
from pgqueue.outcome import OutcomeKind
from pgqueue.retry import from_json

JOB = Job(1, "q", "t", 1, 2, 3, 0, 0, 1, None, datetime.now(UTC), None, None, None, None)


class Hostile(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("no")

    def __hash__(cls) -> int:
        raise RuntimeError("no")

    @property
    def __mro__(cls) -> tuple[type, ...]:  # type: ignore[override]
        raise RuntimeError("no")


class Odd(Exception, metaclass=Hostile):
    pass


BY = pgqueue.ByException(
    {
        Exception: pgqueue.Fixed(1),
        OSError: "dead",
        ConnectionError: pgqueue.Delays(10, 20, 30),
        KeyError: "discard",
        TimeoutError: pgqueue.Snooze(60),
        ValueError: 5,
        UnicodeError: timedelta(minutes=1),
        SystemExit: "dead",
    },
    default=pgqueue.Fixed(7),
)


@pytest.mark.parametrize(
    ("error", "kind", "delay"),
    [
        (RuntimeError(), OutcomeKind.RETRY, 1),
        (OSError(), OutcomeKind.DEAD, 0),
        (ConnectionError(), OutcomeKind.RETRY, 20),
        (ConnectionResetError(), OutcomeKind.RETRY, 20),
        (PermissionError(), OutcomeKind.DEAD, 0),
        (KeyError("k"), OutcomeKind.DISCARD, 0),
        (LookupError(), OutcomeKind.RETRY, 1),
        (TimeoutError(), OutcomeKind.SNOOZE, 60),
        (ValueError(), OutcomeKind.RETRY, 5),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), OutcomeKind.RETRY, 60),
        (SystemExit(3), OutcomeKind.DEAD, 0),
    ],
)
def test_the_nearest_class_of_an_exception_decides(error: BaseException, kind: OutcomeKind, delay: float) -> None:
    outcome, problem = rules.apply(BY, JOB, error, random=0.5)
    assert problem == ""
    assert outcome is not None
    assert (outcome.kind, outcome.delay) == (kind, delay)
    assert (outcome.error_json is not None) == (kind in (OutcomeKind.RETRY, OutcomeKind.DEAD))
    assert (outcome.reason is not None) == (kind in (OutcomeKind.DISCARD, OutcomeKind.DEAD))


def test_what_has_no_rule_and_what_the_handler_says_itself_is_not_decided_here() -> None:
    for error in (KeyboardInterrupt(), pgqueue.Snooze(1), pgqueue.Discard(), pgqueue.DeadLetter(), pgqueue.Retry()):
        assert rules.apply(BY, JOB, error, random=0.5) == (None, "")


def test_a_rule_does_not_run_a_job_more_often_than_its_maximum() -> None:
    outcome, _ = rules.apply(BY, JOB._replace(attempt=3), ValueError(), random=0.5)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.DEAD
    outcome, _ = rules.apply(BY, JOB._replace(attempt=3), TimeoutError(), random=0.5)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.SNOOZE  # burns no attempt


async def coroutine(job: Job, error: BaseException) -> float:
    return 1.0


def leaves(job: Job, error: BaseException) -> float:
    raise SystemExit(1)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda job, error: "dad", "must be a policy"),
        (lambda job, error: -1, "negative"),
        (lambda job, error: float("nan"), "NaN"),
        (lambda job, error: float("inf"), "ten years"),
        (lambda job, error: True, "must be a number"),
        (lambda job, error: [1], "must be a policy"),
        (lambda job, error: pgqueue.Exponential, "must be a policy"),
        (lambda job, error: Odd(), "must be a policy"),
        (lambda job, error: 1 / 0, "ZeroDivisionError"),
        (lambda: 1, "TypeError"),
        (leaves, "SystemExit"),
        (coroutine, "must be a policy"),
    ],
)
def test_a_function_that_raises_or_answers_nonsense_leaves_it_to_the_stored_policy(function: Any, problem: str) -> None:
    outcome, said = rules.apply(function, JOB, ValueError("secret"), random=0.5)
    assert outcome is None
    assert problem in said
    assert "secret" not in said


def test_a_function_answers_as_a_rule_does_or_not_at_all() -> None:
    for answer, kind in (
        (3, OutcomeKind.RETRY), (pgqueue.Fixed(3), OutcomeKind.RETRY), (timedelta(seconds=3), OutcomeKind.RETRY),
        ("dead", OutcomeKind.DEAD), ("discard", OutcomeKind.DISCARD), (pgqueue.Snooze(3), OutcomeKind.SNOOZE),
    ):  # fmt: skip
        outcome, problem = rules.apply(lambda job, error, answer=answer: answer, JOB, ValueError(), random=0.5)
        assert problem == ""
        assert outcome is not None
        assert outcome.kind is kind
    assert rules.apply(lambda job, error: None, JOB, ValueError(), random=0.5) == (None, "")


def test_an_exception_of_a_hostile_class_is_left_to_the_stored_policy() -> None:
    outcome, problem = rules.apply(BY, JOB, Odd(), random=0.5)
    assert (outcome, problem) == (None, "RuntimeError")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "needs a mapping"), (5, "needs a mapping"), ({"ValueError": "dead"}, "class of exceptions"),
        ({ValueError: "deda"}, "the rule for ValueError"), ({ValueError: -1}, "the rule for ValueError"),
        ({int: "dead"}, "class of exceptions"), ({pgqueue.Snooze: "dead"}, "answer of the handler"),
        ({ValueError: None}, "the rule for ValueError"), ({ValueError: pgqueue.Fixed}, "the rule for ValueError"),
    ],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused_at_their_definition(given: Any, match: str) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match=match):
        pgqueue.ByException(given)


@pytest.mark.parametrize("retry", [5, "dead", pgqueue.Exponential, pgqueue.ByException, None, ValueError])
def test_a_retry_option_that_is_no_policy_and_no_function_is_refused(retry: Any) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="retry must be"):
        pgqueue.PgQueue().task(name="t", retry=retry)(lambda: None)


def test_a_rule_belongs_to_the_task_and_its_default_is_what_is_stored() -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    task = pq.task(name="t", retry=BY)(lambda: None)
    assert from_json(task.retry_json) == pgqueue.Fixed(7)
    assert task.options(priority=3).rule is BY
    assert pq.task(name="f", retry=lambda job, error: 1)(lambda: None).retry_json is None
    for rule in (BY, lambda job, error: 1):
        for refused in (lambda rule=rule: task.options(retry=rule), lambda rule=rule: pq.enqueue("x", retry=rule)):
            with pytest.raises(pgqueue.ConfigurationError, match="belongs to the task"):
                refused()
    with pytest.raises(pgqueue.ConfigurationError, match="default must be a policy"):
        pgqueue.ByException({ValueError: "dead"}, default="dead")  # type: ignore[arg-type]

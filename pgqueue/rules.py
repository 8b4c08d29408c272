"""What becomes of a job by the exception that its attempt ended with: rules and functions of the application.

Exceptions are classes of the worker's process, so a rule belongs to the task as the worker knows it, and is stored with no
job. Stored is the policy that a rule falls back to; a process that knows nothing better goes by that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from pgqueue.config import shown
from pgqueue.errors import ConfigurationError
from pgqueue.failure import describe, one_line
from pgqueue.job import Job
from pgqueue.outcome import REASON_BYTES, Outcome, OutcomeKind, Signal, Snooze, after_failure, buried
from pgqueue.retry import DEFAULT_POLICY, Delays, Exponential, Fixed, Linear, Policy, seconds, to_json

DEAD, DISCARD = "dead", "discard"
Answer: TypeAlias = Policy | float | timedelta | Snooze | str
"""A policy, or the seconds to wait: retry. `Snooze(…)`: later, with no attempt burned. "dead": the dead letters at once.
"discard": finish it."""


class ByException:
    """A retry policy for each class of exception: ``ByException({ConnectionError: Fixed(5), ValueError: "dead"})``.

    The class of the exception, or the nearest of its base classes that has a rule, decides. A rule is a policy or a number
    of seconds (retry), ``Snooze(60)`` (later, with no attempt burned), "dead" (the dead letters at once) or "discard".
    `default` decides about everything else; it is stored with jobs. Raises ConfigurationError.
    """

    __slots__ = ("default", "rules")

    def __init__(self, rules: Mapping[type[BaseException], Answer], *, default: Policy = DEFAULT_POLICY) -> None:
        if not isinstance(rules, Mapping) or not rules:
            raise ConfigurationError("ByException needs a mapping of exception classes to what shall be done")
        if not isinstance(default, Policy):
            raise ConfigurationError(f"default must be a policy such as Exponential(), not {shown(default)}")
        for kind, answer in rules.items():
            if not isinstance(kind, type) or not issubclass(kind, BaseException):
                raise ConfigurationError(f"a rule is for a class of exceptions, not for {shown(kind)}")
            if issubclass(kind, Signal):
                raise ConfigurationError(f"{kind.__name__} is an answer of the handler, which no rule changes")
            try:
                read(answer)
            except ConfigurationError as error:
                raise ConfigurationError(f"the rule for {kind.__name__}: {error}") from None
        self.default = default
        self.rules = MappingProxyType(dict(rules))

    def choose(self, error: BaseException) -> Answer | None:
        """The answer for this exception; None where no rule is for it."""
        for kind in type.__dict__["__mro__"].__get__(type(error)):  # past a metaclass, which may answer anything
            if kind in self.rules:
                return self.rules[kind]
        return None


PolicyFunction: TypeAlias = Callable[[Job, BaseException], Any]
"""Asked after each attempt that failed; answers as a rule does, or None for the stored policy."""
RetryRule: TypeAlias = Policy | ByException | PolicyFunction


class Ruled(NamedTuple):
    """What a rule says; `outcome` None: nothing, so the stored policy decides. `problem`: what was wrong with it."""

    outcome: Outcome | None
    problem: str = ""


def is_rule(value: object) -> bool:
    """Whether this is a rule of the worker's process. A class is none: somebody forgot to make an instance of it."""
    return isinstance(value, ByException) or (callable(value) and not isinstance(value, type))


def stored_policy(rule: RetryRule) -> Policy:
    """The policy that is stored with a job."""
    if isinstance(rule, ByException):
        return rule.default
    return rule if isinstance(rule, Policy) else DEFAULT_POLICY


def stored_json(rule: RetryRule) -> str | None:
    """That policy as it is stored; None for the default, which is not."""
    policy = stored_policy(rule)
    return None if policy == DEFAULT_POLICY else to_json(policy)


def apply(rule: ByException | PolicyFunction, job: Job, error: BaseException, *, random: float) -> Ruled:
    """What becomes of the job after this exception. Never raises."""
    if issubclass(type(error), Signal):
        return Ruled(None)
    try:
        answer = rule.choose(error) if isinstance(rule, ByException) else rule(job, error)
        if inspect.iscoroutine(answer):
            answer.close()
        return Ruled(None if answer is None else _outcome(read(answer), job, error, random))
    except ConfigurationError as problem:
        return Ruled(None, one_line(str(problem), REASON_BYTES))
    except BaseException as problem:  # noqa: BLE001 - a function of the application: whatever it raises, the job gets an outcome
        return Ruled(None, one_line(describe(problem).type, REASON_BYTES))


def read(answer: Any) -> Policy | Snooze | str:
    """The answer, numbers as policies; ConfigurationError for what is none."""
    if isinstance(answer, (Fixed, Linear, Exponential, Delays, Snooze)) or answer in (DEAD, DISCARD):
        return answer  # type: ignore[no-any-return]
    if isinstance(answer, (int, float, timedelta)):
        return Fixed(seconds("a delay", answer))
    raise ConfigurationError(
        f'it must be a policy, a number of seconds, Snooze(…), "{DEAD}" or "{DISCARD}", not {shown(answer)}'
    )


def _outcome(answer: Policy | Snooze | str, job: Job, error: BaseException, random: float) -> Outcome:
    if isinstance(answer, Snooze):
        return Outcome(OutcomeKind.SNOOZE, delay=seconds("delay", answer.delay))
    failure = describe(error)
    if answer == DISCARD:
        return Outcome(OutcomeKind.DISCARD, reason=one_line(failure.summary, REASON_BYTES))
    if isinstance(answer, str):
        return buried(job, failure)
    return after_failure(job, failure, answer.delay(job.attempt, random))

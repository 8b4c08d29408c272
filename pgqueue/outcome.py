"""What becomes of a job after a run: the signals a handler raises, and the decision as a value.

Nothing here touches the database. `decide` is pure; the settler writes what it says.

| the handler                       | outcome  | attempt | error kept |
|-----------------------------------|----------|---------|------------|
| returns                           | COMPLETED| spent   | no         |
| raises `Snooze`                   | SNOOZE   | kept    | no         |
| raises `Discard`                  | DISCARD  | spent   | no         |
| raises `DeadLetter`               | DEAD     | spent   | yes        |
| raises `Retry` or anything else   | RETRY    | spent   | yes        |
| the same, on the last attempt     | DEAD     | spent   | yes        |

RELEASE is the worker's own answer when it stops before a job has started: nothing is spent.
"""

from __future__ import annotations

import dataclasses
import enum
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeGuard, TypeVar

from pgqueue.errors import ConfigurationError
from pgqueue.failure import Failure, describe, one_line
from pgqueue.job import Job
from pgqueue.result import Kept
from pgqueue.retry import DEFAULT_POLICY, from_json, seconds

REASON_BYTES = 500
_S = TypeVar("_S", bound="Signal")


class Signal(Exception):
    """The root of what a handler raises to steer its own job: answers, not errors."""

    reason: str = ""

    def __str__(self) -> str:
        """The reason, which is also the message where a signal is kept as an error."""
        return str(self.reason)


class Retry(Signal):
    """Run this job again after `delay` (seconds or a timedelta; None asks the retry policy), as after a failure.

    The attempt is spent; on the last one the job goes to the dead letters. Raises ConfigurationError for a bad delay.
    """

    delay: float | None = None

    def __init__(self, *, delay: float | timedelta | None = None, reason: str = "") -> None:
        super().__init__()
        self.delay = None if delay is None else seconds("delay", delay)
        self.reason = reason


class Snooze(Signal):
    """Run this job again after `delay` (seconds or a timedelta); the attempt is not counted.

    Raises ConfigurationError for a bad delay.
    """

    def __init__(self, delay: float | timedelta) -> None:
        super().__init__(delay)
        self.delay = seconds("delay", delay)


class Discard(Signal):
    """This job is of no use any more: finish it without result and without retry."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class DeadLetter(Signal):
    """No retry can help: put this job into the dead-letter table now, whatever attempts it has left."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Failed(Exception):
    """Stands for an error that came as text: pq.fail(job, "the printer is on fire")."""


class OutcomeKind(enum.StrEnum):
    """What the settler does with a job after a run; the table above says when."""

    COMPLETED = "completed"
    RETRY = "retry"
    SNOOZE = "snooze"
    DISCARD = "discard"
    DEAD = "dead"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision about one run.

    `delay` is in seconds, for RETRY and SNOOZE. `error_json` is the entry for the job's errors, for RETRY and DEAD.
    `reason` is one line of at most 500 bytes, always there for DEAD. `steered`: the handler itself asked for the retry and
    named its delay, so this run says nothing about the health of anything. `kept`: the result, for COMPLETED, where the task
    keeps results. `lost`: it ran in a batch whose process has gone, for RETRY.
    """

    kind: OutcomeKind
    delay: float = 0.0
    error_json: str | None = None
    reason: str | None = None
    steered: bool = False
    kept: Kept | None = None
    lost: bool = False


COMPLETED = Outcome(OutcomeKind.COMPLETED)
RELEASED = Outcome(OutcomeKind.RELEASE)


def decide(job: Job, error: BaseException | None, *, random: float) -> Outcome:
    """What becomes of `job` after its handler ended with `error`, None meaning that it returned. Never raises.

    `random`, from 0 to 1, is the jitter of the retry policy.
    """
    if error is None:
        return COMPLETED
    try:
        return _decide(job, error, random)
    except Exception:  # noqa: BLE001 (a signal with broken attributes is still a failed run)
        return after_failure(job, describe(error), DEFAULT_POLICY.delay(job.attempt, random))


def _decide(job: Job, error: BaseException, random: float) -> Outcome:
    if _is(error, Snooze):
        return Outcome(OutcomeKind.SNOOZE, delay=seconds("delay", error.delay))
    if _is(error, Discard):
        return Outcome(OutcomeKind.DISCARD, reason=one_line(describe(error).message, REASON_BYTES) or None)
    failure = describe(error)
    if _is(error, DeadLetter):
        return buried(job, failure)
    if _is(error, Retry) and error.delay is not None:
        with suppress(ConfigurationError):  # set by hand after construction: the policy's delay stands
            return dataclasses.replace(after_failure(job, failure, seconds("delay", error.delay)), steered=True)
    return after_failure(job, failure, from_json(job.retry_json).delay(job.attempt, random))


def _is(error: BaseException, kind: type[_S]) -> TypeGuard[_S]:
    # Not isinstance: it reads error.__class__, which a task's exception may define as it likes.
    return issubclass(type(error), kind)


def after_failure(job: Job, failure: Failure, delay: float) -> Outcome:
    """A retry after `delay` seconds, or the dead letters after the last attempt."""
    if job.attempt >= job.max_attempts:
        return buried(job, failure)
    return Outcome(OutcomeKind.RETRY, delay=delay, error_json=failure.to_json(attempt=job.attempt))


def buried(job: Job, failure: Failure) -> Outcome:
    """The dead letters."""
    return Outcome(OutcomeKind.DEAD, error_json=failure.to_json(attempt=job.attempt), reason=failure.summary)

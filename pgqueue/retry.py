"""Retry policies: how long a job waits after an attempt that failed.

A policy is a frozen value. It is stored with the job as JSON, because the process that records the failure may be
another one than the process that knows the task. `delay` is pure: the caller brings the random number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

import orjson

from pgqueue.errors import ConfigurationError

DEFAULT_MAX_ATTEMPTS: Final = 20
MAX_DELAY: Final = timedelta(days=3653).total_seconds()
_MAX_DELAYS = 100


def seconds(name: str, value: float | timedelta) -> float:
    """A number or a timedelta, from zero to ten years, as seconds. Raises ConfigurationError naming `name`."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError(f"{name} must be a number of seconds or a timedelta, not a {type(value).__name__}")
    if isinstance(value, float) and math.isnan(value):
        raise ConfigurationError(f"{name} must be a number of seconds, not NaN")
    if value < 0:
        raise ConfigurationError(f"{name} must not be negative")
    if value > MAX_DELAY:
        raise ConfigurationError(f"{name} must not be longer than ten years")
    return float(value) + 0.0  # -0.0 becomes 0.0


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same delay after every attempt: `delay` in seconds or a timedelta. Raises ConfigurationError."""

    seconds: float

    def __init__(self, delay: float | timedelta) -> None:
        object.__setattr__(self, "seconds", seconds("delay", delay))

    def delay(self, attempt: int, random: float) -> float:
        """Seconds to wait after attempt number `attempt` (the first is 1) failed."""
        return self.seconds


@dataclass(frozen=True, slots=True)
class Linear:
    """`step` longer after every attempt, up to `cap`: seconds or timedeltas. Raises ConfigurationError."""

    step: float
    cap: float

    def __init__(self, step: float | timedelta, cap: float | timedelta = 3600.0) -> None:
        object.__setattr__(self, "step", seconds("step", step))
        object.__setattr__(self, "cap", seconds("cap", cap))

    def delay(self, attempt: int, random: float) -> float:
        """Seconds to wait after attempt number `attempt` (the first is 1) failed."""
        try:
            return min(self.cap, self.step * max(1, attempt))
        except OverflowError:  # an attempt no float can hold
            return self.cap if self.step else 0.0


@dataclass(frozen=True, slots=True)
class Exponential:
    """`base` times longer after every attempt, up to `cap` (seconds or a timedelta). Raises ConfigurationError.

    With `jitter` the delay is ``random() * min(cap, base ** attempt)``: the "full jitter" of Marc Brooker,
    "Exponential Backoff And Jitter", AWS Architecture Blog, 2015, there found to spread contending clients best.
    Without it the delay is ``min(cap, base ** attempt)``. `base` is at least 1.
    """

    base: float
    cap: float
    jitter: bool

    def __init__(self, base: float | timedelta = 2.0, cap: float | timedelta = 3600.0, jitter: bool = True) -> None:
        base = seconds("base", base)
        if base < 1:
            raise ConfigurationError("base must be at least 1, or the delay would shrink from attempt to attempt")
        if not isinstance(jitter, bool):
            raise ConfigurationError("jitter must be True or False")
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "cap", seconds("cap", cap))
        object.__setattr__(self, "jitter", jitter)

    def delay(self, attempt: int, random: float) -> float:
        """Seconds to wait after attempt number `attempt` (the first is 1) failed; `random` is from 0 to 1."""
        try:
            ceiling = min(self.cap, self.base ** max(1, attempt))
        except OverflowError:
            ceiling = self.cap if self.base > 1 else min(self.cap, 1.0)
        if not self.jitter:
            return ceiling
        return ceiling * (random if 0 <= random <= 1 else 1.0)


@dataclass(frozen=True, slots=True)
class Delays:
    """The delays one by one (seconds or timedeltas, at most 100); the last one repeats. Raises ConfigurationError."""

    seconds: tuple[float, ...]

    def __init__(self, *delays: float | timedelta) -> None:
        if not 1 <= len(delays) <= _MAX_DELAYS:
            raise ConfigurationError(f"Delays needs from 1 to {_MAX_DELAYS} delays, not {len(delays)}")
        object.__setattr__(self, "seconds", tuple(seconds(f"delay {n}", d) for n, d in enumerate(delays, 1)))

    def delay(self, attempt: int, random: float) -> float:
        """Seconds to wait after attempt number `attempt` (the first is 1) failed."""
        return self.seconds[min(max(1, attempt), len(self.seconds)) - 1]


Policy: TypeAlias = Fixed | Linear | Exponential | Delays

DEFAULT_POLICY: Final = Exponential()


def to_json(policy: Policy) -> str:
    """The policy as it is stored with a job. Raises ConfigurationError for what is no policy of this module."""
    record: dict[str, Any]
    match policy:
        case Fixed():
            record = {"kind": "fixed", "delay": policy.seconds}
        case Linear():
            record = {"kind": "linear", "step": policy.step, "cap": policy.cap}
        case Exponential():
            record = {"kind": "exponential", "base": policy.base, "cap": policy.cap, "jitter": policy.jitter}
        case Delays():
            record = {"kind": "delays", "delays": policy.seconds}
        case _:
            raise ConfigurationError("retry must be one of Fixed, Linear, Exponential and Delays")
    return orjson.dumps(record).decode()


def from_json(text: str | None) -> Policy:
    """The policy stored with a job; DEFAULT_POLICY for None and for whatever cannot be read. Never raises."""
    if text is None:
        return DEFAULT_POLICY
    try:
        record = orjson.loads(text)
        kind = record.pop("kind")
        if kind == "delays":
            return Delays(*record["delays"])
        policy: Policy = {"fixed": Fixed, "linear": Linear, "exponential": Exponential}[kind](**record)
    except Exception:  # noqa: BLE001 (a row may hold anything, and a job whose policy is lost must still be settled)
        return DEFAULT_POLICY
    return policy

"""A limit of a queue or of a key as it is said: how many at once, and how often."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import orjson

from pgqueue.config import shown, validate_count
from pgqueue.errors import ConfigurationError

MOST_RATE, LEAST_RATE = 1e9, 1e-9
"""Per second."""
MOST_BURST = 2**31 - 1
SOON, LONGEST_WAIT = 0.02, 5.0
"""Seconds that a claimer waits for more than one token, where the bucket does not run over meanwhile; and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """So many a second on average, and at most `burst` at once after a time without any; made by `rate_of`."""

    rate: float
    burst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a queue is limited to: jobs that run at once, starts a second, and starts at once; None where it is not."""

    running: int | None = None
    rate: float | None = None
    burst: int | None = None

    def said(self) -> dict[str, Any]:
        """What it says, without what it leaves open."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def fingerprint(self) -> str:
        """The same for the same limit, in every process and release."""
        return hashlib.sha256(orjson.dumps(self.said(), option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def limit_of(
    running: int | None = None,
    *,
    rate: float | None = None,
    per: float | timedelta = 1.0,
    burst: int | None = None,
) -> Limit:
    """ConfigurationError, in one sentence, for numbers that cannot be, and where neither `running` nor `rate` is given."""
    if running is None and rate is None:
        raise ConfigurationError("limited to what? give running, rate or both")
    if running is not None:
        validate_count("running", running)
    pace = rate_of(rate, per=per, burst=burst)
    return Limit(running=running, rate=None if pace is None else pace.rate, burst=None if pace is None else pace.burst)


def rate_of(rate: float | None, *, per: float | timedelta = 1.0, burst: int | None = None) -> Rate | None:
    """`rate` starts in `per` seconds; `burst` is what a second brings, and at least one, unless given. None without rate."""
    if rate is None:
        if burst is not None:
            raise ConfigurationError("burst belongs to a rate: give both")
        return None
    seconds = _number("per", per.total_seconds() if isinstance(per, timedelta) else per)
    each = _number("rate", rate) / seconds
    if not LEAST_RATE <= each <= MOST_RATE:
        raise ConfigurationError(
            f"rate must be between one in {1 / LEAST_RATE:,.0f} seconds and {MOST_RATE:,.0f} a second, not {each:g} a second"
        )
    if burst is not None:
        validate_count("burst", burst, most=MOST_BURST)
    return Rate(rate=each, burst=max(1, math.ceil(round(each, 9))) if burst is None else burst)


def wait_for_token(tokens: float, rate: float, burst: int) -> float:
    """Seconds until it is worth asking again: until the next token, and a little longer where many come in a moment and the
    bucket has room for them."""
    if not rate > 0:  # written by hand
        return LONGEST_WAIT
    one = max(0.0, 1.0 - tokens) / rate
    full = max(0.0, burst - tokens) / rate
    return min(LONGEST_WAIT, max(one, min(SOON, full / 2)))


def _number(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{what} must be a number above zero, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigurationError(f"{what} must be a smaller number, not {shown(value)}") from None

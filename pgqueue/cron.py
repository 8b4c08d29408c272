"""When a schedule ticks: cron texts on the wall clock of a zone, and intervals of real time. No clock is read here.

cronsim says which wall-clock times a text names. How these become instants is decided here, for five and six fields
alike: its own rules for changes of the clock hold for five only. An instant is an aware datetime in UTC.
"""

from __future__ import annotations

import difflib
import enum
import itertools
import re
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from cronsim import CronSim, CronSimError

from pgqueue.config import shown, validate_seconds
from pgqueue.errors import ConfigurationError

MOST_TICKS = 1_000
"""How many ticks one plan holds, and how far it counts those that it leaves out."""
SHORTEST = 1.0
_LONGEST_TEXT = 200
_NAMED = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_WORDS = re.compile(r"[0-9A-Za-z*,/#-]+(?: [0-9A-Za-z*,/#-]+){4,5}")
_SECOND, _DAY = timedelta(seconds=1), timedelta(days=1)
_TINY = timedelta(microseconds=1)
_SOME_DAY = datetime(2000, 1, 1, tzinfo=UTC)


class Missed(enum.StrEnum):
    """What becomes of ticks that nobody could make within their grace time.

    `SKIP`: nothing. `ONCE`: all that is due makes one job, for the latest tick. `ALL`: each makes its job.
    """

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


class Cron:
    """A cron text: five fields, or six with the seconds first. ConfigurationError says what is wrong with text or zone.

    Where neither minute nor hour begins with ``*`` the text names times of the day. Each comes once a day: at its first
    occurrence where the clock is set back, and at the moment of the change where the clock skips it. Any other text goes
    on in real time: it matches whatever the clock shows, twice in a repeated hour and never in a skipped one.
    """

    def __init__(self, text: str, zone: str = "UTC") -> None:
        self.text = text
        self._words = _words(text)
        self._zone = _zone(zone)
        minute, hour = self._words.split(" ")[-5:-3]
        self._of_the_day = not minute.startswith("*") and not hour.startswith("*")

    def after(self, instant: datetime) -> datetime | None:
        """The first tick after `instant`; None when there is none in the next fifty years."""
        instant = instant.astimezone(UTC).replace(microsecond=0)
        try:
            return self._of_day(instant) if self._of_the_day else self._in_real_time(instant)
        except OverflowError:  # beyond the last year of Python
            return None

    def _named(self, wall: datetime) -> Iterator[datetime]:
        """The wall-clock times after `wall` that the text names."""
        return CronSim(self._words, wall)

    def _offset(self, instant: datetime) -> timedelta:
        offset = instant.astimezone(self._zone).utcoffset()
        return offset or timedelta()

    def _of_day(self, instant: datetime) -> datetime | None:
        for wall in self._named(_naive(instant + self._offset(instant))):
            tick = self._first(wall)
            if tick > instant:  # in a repeated hour the first occurrences are over
                return tick
        return None

    def _first(self, wall: datetime) -> datetime:
        """When the clock first shows `wall`, or jumps over it."""
        local = wall.replace(tzinfo=self._zone)
        instant = local.astimezone(UTC)
        if _naive(instant + self._offset(instant)) == wall:
            return instant
        return self._change(local.replace(fold=1).astimezone(UTC) - _SECOND, instant)

    def _in_real_time(self, instant: datetime) -> datetime | None:
        start, offset = instant, self._offset(instant)
        while True:
            wall = next(self._named(_naive(start + offset)), None)
            if wall is None:
                return None
            tick = wall.replace(tzinfo=UTC) - offset
            change = self._next_change(start, offset, tick)
            if change is None:
                return tick
            # What the clock shows from there on is another matter, and its first second may match.
            start, offset = change - _SECOND, self._offset(change)

    def _next_change(self, start: datetime, offset: timedelta, end: datetime) -> datetime | None:
        """The first instant in (start, end] with another offset than `offset`."""
        while start < end:
            step = min(start + _DAY, end)
            if self._offset(step) != offset:
                return self._change(start, step, offset)
            start = step
        return None

    def _change(self, low: datetime, high: datetime, before: timedelta | None = None) -> datetime:
        """The first second after `low`, up to `high`, whose offset is not `before` (that of `low`)."""
        before = self._offset(low) if before is None else before
        seconds = (high - low) // _SECOND
        first = 1
        while first < seconds:
            middle = (first + seconds) // 2
            if self._offset(low + middle * _SECOND) != before:
                seconds = middle
            else:
                first = middle + 1
        return low + first * _SECOND


@dataclass(frozen=True)
class Every:
    """Real time: `start` and any number of periods of `seconds`."""

    seconds: float
    start: datetime

    def after(self, instant: datetime) -> datetime | None:
        """The first tick after `instant`; None beyond the last year of Python."""
        period = timedelta(seconds=self.seconds)
        try:
            return self.start + period * ((instant - self.start) // period + 1)
        except OverflowError:
            return None


Timing: TypeAlias = Cron | Every


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done now: a job for each of `ticks`, and nothing for `skipped` others (at most MOST_TICKS are counted).

    Everything up to `ticked_to` is decided then; `next_at` is the next tick, which may be due already.
    """

    ticks: list[datetime]
    skipped: int
    ticked_to: datetime
    next_at: datetime | None


def plan(timing: Timing, ticked_to: datetime, now: datetime, *, missed: Missed, grace: float) -> Plan:
    """What to do about the ticks after `ticked_to`, up to `now`. One that is more than `grace` seconds old is missed."""
    due = list(itertools.islice(_ticks(timing, ticked_to, now), MOST_TICKS + 1))
    more, due = len(due) > MOST_TICKS, due[:MOST_TICKS]
    on_time = now - timedelta(seconds=grace)
    kept, skipped = due, 0
    if due and due[0] < on_time and missed is not Missed.ALL:
        if missed is Missed.ONCE:
            kept = [_last(timing, due[-1], now) if more else due[-1]]
            skipped = len(due) - (not more)
        else:
            kept = list(itertools.islice(_ticks(timing, max(ticked_to, on_time - _TINY), now), MOST_TICKS))
            skipped = sum(tick < on_time for tick in due)
    done = kept[-1] if kept else now if skipped else ticked_to
    return Plan(ticks=kept, skipped=skipped, ticked_to=done, next_at=timing.after(done if kept else max(done, now)))


def timing(cron: str | None, every: float | timedelta | None, zone: str, start: datetime = _SOME_DAY) -> Timing:
    """What ticks, checked as a definition; ConfigurationError in one sentence."""
    if (cron is None) == (every is None):
        raise ConfigurationError("a schedule has a cron text or every=, one of the two")
    if cron is None:
        if zone != "UTC":
            raise ConfigurationError("every= is real time and has no time zone; tz belongs to a cron text")
        given = every.total_seconds() if isinstance(every, timedelta) else every
        return Every(validate_seconds("every", given, least=SHORTEST), start)
    ticking = Cron(cron, zone)
    if ticking.after(_SOME_DAY) is None:
        raise ConfigurationError(f"cron {shown(cron)} names no time that ever comes")
    return ticking


def validate_missed(value: str) -> Missed:
    """Return the policy; ConfigurationError for anything else."""
    try:
        return Missed(value)
    except ValueError:
        raise ConfigurationError(f'missed must be "skip", "once" or "all", not {shown(value)}') from None


def _ticks(timing: Timing, after: datetime, until: datetime) -> Iterator[datetime]:
    tick = timing.after(after)
    while tick is not None and tick <= until:
        yield tick
        tick = timing.after(tick)


def _last(timing: Timing, low: datetime, high: datetime) -> datetime:
    """The last tick up to `high`, where `low` is one: by halves, however many there are."""
    until = high
    while True:
        tick = timing.after(low)
        if tick is None or tick > until:
            return low
        low = tick
        later = timing.after(low + (high - low) / 2)
        if later is not None and later <= until:
            low = later
        else:
            high = low + (high - low) / 2


def _naive(instant: datetime) -> datetime:
    return instant.replace(tzinfo=None)


def _words(text: str) -> str:
    if not isinstance(text, str):
        raise ConfigurationError(f"a cron text is a string, not {shown(text)}")
    if len(text) > _LONGEST_TEXT:
        raise ConfigurationError(f"a cron text has at most {_LONGEST_TEXT} characters")
    words = " ".join(text.split())
    words = _NAMED.get(words.lower(), words)
    if not _WORDS.fullmatch(words):
        raise ConfigurationError(
            f"cron {shown(text)}: five fields (minute, hour, day of month, month, day of week), "
            f"or six with the seconds first, or one of {', '.join(_NAMED)}"
        )
    try:
        CronSim(words, _naive(_SOME_DAY))
    except CronSimError as error:
        raise ConfigurationError(f"cron {shown(text)}: {str(error).lower()}") from None
    except (
        ValueError,
        TypeError,
        AssertionError,
        LookupError,
    ):  # what it does not expect, such as steps of a last weekday
        raise ConfigurationError(f"cron {shown(text)} cannot be read") from None
    return words


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        if name == "localtime":
            raise ValueError
        return zoneinfo.ZoneInfo(name)
    except (ValueError, KeyError, OSError, TypeError, AttributeError):
        raise ConfigurationError(f"there is no time zone {shown(name)}{_near(name)}") from None


def _near(name: str) -> str:
    if not isinstance(name, str) or len(name) > _LONGEST_TEXT:
        return ""
    near = difflib.get_close_matches(name, sorted(zoneinfo.available_timezones() - {name}), n=3)
    return f"; similar: {', '.join(near)}" if near else "; zones are named as Europe/Berlin is"

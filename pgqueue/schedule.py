"""A schedule as it is defined: when it ticks, and which job a tick makes."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import orjson

from pgqueue import cron as crons
from pgqueue.config import validate_name, validate_seconds
from pgqueue.errors import ConfigurationError

GRACE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """When a schedule ticks, and what becomes of ticks that were missed; made by `rhythm`, which checks it."""

    cron: str | None
    every: float | None
    tz: str
    missed: str
    grace: float
    overlap: bool


def rhythm(
    cron: str | None = None,
    *,
    every: float | timedelta | None = None,
    tz: str | ZoneInfo = "UTC",
    missed: str = "once",
    grace: float | timedelta = GRACE,
    overlap: bool = True,
) -> Rhythm:
    """ConfigurationError, in one sentence, for a text, zone, interval or policy that cannot be."""
    zone = str(tz.key) if isinstance(tz, ZoneInfo) else tz
    timing = crons.timing(cron, every, zone)
    if not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap must be True or False, not {overlap!r}")
    return Rhythm(
        cron=timing.text if isinstance(timing, crons.Cron) else None,
        every=timing.seconds if isinstance(timing, crons.Every) else None,
        tz=zone,
        missed=crons.validate_missed(missed).value,
        grace=validate_seconds("grace", grace.total_seconds() if isinstance(grace, timedelta) else grace),
        overlap=overlap,
    )


def check_changes(changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `changes`; ConfigurationError unless they are parts of a Rhythm, and any at all."""
    known = list(Rhythm.__dataclass_fields__)
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigurationError(f"a schedule can change its {', '.join(known)}, not {name!r}{hint}")
    if not changes:
        raise ConfigurationError(f"change what? a schedule can change its {', '.join(known)}")
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One schedule. `job`: what its jobs are enqueued with, encoded: queue, task, args and so on."""

    name: str
    rhythm: Rhythm
    job: Mapping[str, Any]

    def __post_init__(self) -> None:
        validate_name("schedule", self.name)

    def params(self) -> dict[str, Any]:
        """What the statements that write a schedule are given."""
        timing = {name: getattr(self.rhythm, name) for name in Rhythm.__dataclass_fields__}
        return {"name": self.name, **timing, **self.job}

    def fingerprint(self) -> str:
        """The same for the same definition, in every process and release."""
        # What is not given is left out, so that an option which a later release adds changes no fingerprint.
        said = {name: value for name, value in self.params().items() if value is not None}
        return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]

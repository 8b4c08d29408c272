"""Topics as they are spoken of: what a subscription is defined with, where it starts, and what a publish answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import orjson

from pgqueue.config import shown, validate_count, validate_name, validate_seconds
from pgqueue.errors import ConfigurationError
from pgqueue.keys import CONTINUE, PARK

NEW, BEGINNING = "new", "beginning"
MOST_KEPT = 10**12
Start = str | int | datetime
"""NEW, BEGINNING, an aware datetime, or the id of a message."""


class Published(NamedTuple):
    """What a publish made: jobs, one for each subscription, and the message's id where the topic keeps messages."""

    jobs: int
    message_id: int | None


class PublishedMany(NamedTuple):
    """The same of several messages, whose ids are in the order of the input."""

    jobs: int
    message_ids: list[int] | None


def validate_start(start: object) -> Start:
    """Return `start`; ConfigurationError for what no subscription can start from."""
    if isinstance(start, datetime):
        if start.utcoffset() is None:
            raise ConfigurationError(
                "start must be a datetime with a time zone: a naive one means another time elsewhere"
            )
        return start
    if isinstance(start, int) and not isinstance(start, bool):
        return validate_count("start, the id of a message,", start, most=2**63 - 1)
    if isinstance(start, str) and start in (NEW, BEGINNING):
        return start
    raise ConfigurationError(
        f'start must be "{NEW}", "{BEGINNING}", a datetime or the id of a message, not {shown(start)}'
    )


def validate_kept(count: object, age: object) -> tuple[int | None, float | None]:
    """How many messages are kept, and for how many seconds."""
    number = None if count is None else validate_count("count", count, most=MOST_KEPT)
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    return number, None if seconds is None else validate_seconds("age", seconds, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One subscription. `job`: what its jobs are made with, encoded: queue, task, priority and so on.

    `start` counts when the subscription begins to exist, and is not part of what is compared later.
    """

    topic: str
    group: str
    ordered: bool
    on_dead: str
    job: Mapping[str, Any]
    start: Start = NEW

    def __post_init__(self) -> None:
        validate_name("topic", self.topic)
        validate_name("group", self.group)
        validate_start(self.start)
        if not isinstance(self.ordered, bool):
            raise ConfigurationError(f"ordered must be True or False, not {shown(self.ordered)}")
        if self.on_dead not in (CONTINUE, PARK):
            raise ConfigurationError(f'on_dead must be "{CONTINUE}" or "{PARK}", not {shown(self.on_dead)}')
        if self.on_dead == PARK and not self.ordered:
            raise ConfigurationError(f'on_dead="{PARK}" stops a line of jobs: it needs ordered=True')

    def params(self) -> dict[str, Any]:
        """What the statements that write a subscription are given."""
        park = True if self.on_dead == PARK else None
        return {"topic": self.topic, "name": self.group, "ordered": self.ordered, "park": park, **self.job}

    def fingerprint(self) -> str:
        """The same for the same definition, in every process and release."""
        # What is not given is left out, so that an option which a later release adds changes no fingerprint.
        said = {name: value for name, value in self.params().items() if value is not None}
        return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]

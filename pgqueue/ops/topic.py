"""Topics and subscriptions: what code and operators say of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pgqueue.errors import ConfigurationError, UnknownSubscription, UnknownTopic
from pgqueue.ops import Op, Step, Texts
from pgqueue.ops.replay import look
from pgqueue.topic import NEW, Definition, Start

NOTICE = "topics changed"
"""What a listener hears when there is something to replay."""
AFFIRM_EVERY = 20.0
GONE = 60.0
"""Seconds without a process that says the same, after which a definition has no advocate any more."""
COUNTED = 10_000
AHEAD = 60.0
"""Seconds that a starting time may be ahead of the database's clock: clocks differ."""
Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as an operator sees it. `messages` are counted up to 10,000; the rest is None where none is kept."""

    name: str
    keep_count: int | None
    keep_age: float | None
    subscriptions: int
    messages: int
    oldest_id: int | None
    newest_id: int | None
    oldest_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A subscription as an operator sees it.

    `state`: live, replaying (new messages come meanwhile) or held (new ones wait for the end of the replay). `origin`: "run
    time", "code", or "not in code": it comes from code, but no worker whose code has it was seen for a minute.
    `replayed_to`: the last message that a replay has looked at.
    """

    topic: str
    group: str
    task: str
    queue: str
    priority: int
    max_attempts: int
    ordered: bool
    state: str
    origin: str
    replayed_to: int | None
    created_at: datetime


def topics(name: str | None = None) -> Op[list[Topic]]:
    """All topics by name, or this one."""
    rows = yield Step("topic_list", {"topic": name, "most": COUNTED})
    return [Topic(**dict(zip(Topic.__dataclass_fields__, row, strict=True))) for row in rows]


def subscriptions(topic: str | None = None, group: str | None = None) -> Op[list[Subscription]]:
    """All subscriptions, those of one topic, or the one of this group."""
    rows = yield Step("subscription_list", {"topic": topic, "name": group, "gone": GONE})
    return [Subscription(**dict(zip(Subscription.__dataclass_fields__, row, strict=True))) for row in rows]


def keep(topic: str, count: int | None, age: float | None, *, channel: str | None) -> Op[None]:
    """Keep so many messages, for so long; neither: none. In one transaction."""
    yield Step("topic_keep", {"topic": topic, "count": count, "age": age, "channel": channel, "notice": NOTICE})
    yield Step("topic_roll", {"topic": topic})


def subscribe(definition: Definition, *, channel: str | None) -> Op[bool]:
    """A new subscription, or other options of one that is there; False where it is the same. In one transaction."""
    if (yield from _alter(definition, None)):
        return True
    if (yield from subscriptions(definition.topic, definition.group)):
        return False
    yield from _check_start(definition.topic, definition.start)
    return (yield from _add(definition, None, channel))


def define(definitions: Mapping[Key, Definition], *, channel: str | None) -> Op[list[Key]]:
    """Write what the code says, where it says something new; returns what was written. Not on a caller's connection."""
    prints = {key: definition.fingerprint() for key, definition in definitions.items()}
    params = {
        "topics": Texts([topic for topic, _ in prints]),
        "names": Texts([group for _, group in prints]),
        "definitions": Texts(prints.values()),
        "often": AFFIRM_EVERY / 2,
        "gone": GONE,
    }
    written: list[Key] = []
    for topic, group in (yield Step("subscription_affirm", params)):
        definition, key = definitions[topic, group], (topic, group)
        yield Step("admission_begin", {}, silent=True)
        yield Step("topic_patience", {})
        if (yield from _alter(definition, prints[key])) or (yield from _add(definition, prints[key], channel)):
            written.append(key)
        yield Step("admission_commit", {}, silent=True)
    return written


def reset(topic: str, group: str, start: Start, *, channel: str | None) -> Op[None]:
    """Replay from there. In one transaction."""
    yield from _found(topic, group)
    yield from _check_start(topic, start)
    yield from _look(topic, channel)
    of = {"topic": topic, "name": group}
    if start == NEW:
        rows = yield Step("subscription_live", of)
    else:
        rows = yield Step("subscription_replay", {**of, **_place(start), "channel": channel, "notice": NOTICE})
    if not rows:
        yield from _found(topic, group)


def unsubscribe(topic: str, group: str) -> Op[None]:
    """End it; ConfigurationError while live code has it. In one transaction."""
    yield from _lock(topic)
    if not (yield Step("subscription_end", {"topic": topic, "name": group, "gone": GONE})):
        yield from _found(topic, group)
        raise ConfigurationError(
            f"subscription {group!r} of topic {topic!r} is in the code of live workers, which would write it again: "
            "remove it there, and then here when they have gone"
        )


def _alter(definition: Definition, fingerprint: str | None) -> Op[bool]:
    rows = yield Step("subscription_alter", {**definition.params(), "definition": fingerprint, "gone": GONE})
    return bool(rows)


def _add(definition: Definition, fingerprint: str | None, channel: str | None) -> Op[bool]:
    """False where another process was faster."""
    holds = None
    while holds is None:  # a topic that nobody uses may be forgotten between the two
        yield Step("topic_begin", {"topic": definition.topic})
        holds = yield from _lock(definition.topic)
    yield from look(definition.topic, holds, channel)
    # A topic that keeps nothing has nothing to replay; code may say a start all the same.
    place = _place(definition.start if holds else NEW)
    params = {**definition.params(), **place, "definition": fingerprint, "channel": channel, "notice": NOTICE}
    return bool((yield Step("subscription_add", params)))


def _lock(topic: str) -> Op[bool | None]:
    """Whether it may hold messages; None where there is no such topic."""
    rows = yield Step("topic_lock", {"topic": topic})
    return bool(rows[0][0]) if rows else None


def _look(topic: str, channel: str | None) -> Op[None]:
    holds = yield from _lock(topic)
    if holds is not None:
        yield from look(topic, holds, channel)


def _place(start: Start) -> dict[str, Any]:
    """Behind which message, and from which time on. `after` None: nothing is replayed."""
    if isinstance(start, datetime):
        return {"after": 0, "start_at": start}
    if isinstance(start, int):
        return {"after": start - 1, "start_at": None}
    return {"after": None if start == NEW else 0, "start_at": None}


def _check_start(topic: str, start: Start) -> Op[None]:
    if start == NEW:
        return
    if isinstance(start, datetime):
        now = (yield Step("clock", {}))[0][0]
        if (start - now).total_seconds() > AHEAD:
            raise ConfigurationError(
                f"start is {start.astimezone(UTC).isoformat(timespec='seconds')}, which is still to come"
            )
    known = yield from topics(topic)
    if not known or (known[0].keep_count is None and known[0].keep_age is None and not known[0].messages):
        raise ConfigurationError(
            f'topic {topic!r} keeps no messages: a subscription can only start with what is "{NEW}"; see keep_topic'
        )
    if isinstance(start, int):
        found, oldest = (yield Step("message_find", {"topic": topic, "id": start}))[0]
        if not found:
            if oldest is not None and start < oldest:
                raise ConfigurationError(
                    f"message {start} of topic {topic!r} is not kept any more: the oldest one that is has the id {oldest}"
                )
            raise ConfigurationError(f"topic {topic!r} holds no message {start}")


def _found(topic: str, group: str) -> Op[None]:
    """UnknownTopic or UnknownSubscription names near matches."""
    if (yield from subscriptions(topic, group)):
        return
    yield from known_topic(topic)
    groups = [one.group for one in (yield from subscriptions(topic))]
    raise UnknownSubscription(f"topic {topic!r} has no group {group!r}{_hint(group, groups)}")


def known_topic(name: str) -> Op[Topic]:
    """UnknownTopic names near matches."""
    found = yield from topics(name)
    if not found:
        known = [topic.name for topic in (yield from topics())]
        raise UnknownTopic(f"there is no topic {name!r}{_hint(name, known)}")
    return found[0]


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"; similar: {', '.join(near)}" if near else f"; known are {', '.join(known[:10])}" if known else ""

"""What topics that keep messages need now and then: looks for late messages, replays, and the roll.

Each turn is a short transaction that holds the topic's row. It moves a mark (the snapshot of the last look, the last message
that was replayed) and makes the jobs: a crash at any statement leaves both or neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgqueue.ops import Int8s, Op, Step

PIECE = 500
LOOK = 20_000
"""Messages that are replayed, and looked at, in one turn."""
PART = 5_000
"""Messages in one statement, where more than that came late at once."""
LOOK_EVERY = 4.0
ROLL_EVERY = 60.0


class Due(NamedTuple):
    """A topic that needs a turn: a replay is under way, or it is to be rolled; neither: late messages are looked for."""

    topic: str
    replays: bool
    rolls: bool


class Agenda(NamedTuple):
    """The topics that need a turn now. `kept`: False where no topic keeps messages, so that none will before it is told."""

    due: list[Due]
    kept: bool


class Replayed(NamedTuple):
    """A piece of a replay: so many messages of this group. `done`: it was the last one."""

    group: str
    jobs: int
    done: bool


class Turn(NamedTuple):
    """What a turn came to. `taken`: False where somebody else is at the topic. `late`: how many late messages reached a
    group."""

    taken: bool
    late: dict[str, int]
    replayed: Replayed | None


def agenda(*, now: bool = False) -> Op[Agenda]:
    """The topics that need a turn; `now`: all that keep messages, whenever they had the last one."""
    often, roll = (-1.0, -1.0) if now else (LOOK_EVERY, ROLL_EVERY)
    rows = yield Step("topic_agenda", {"often": often, "roll": roll})
    return Agenda([Due(*facts) for *facts, due in rows if due], bool(rows))


def turn(topic: str, *, channel: str | None, piece: int | None = None) -> Op[Turn]:
    """Look for late messages, and replay one piece, of PIECE messages unless fewer are wanted, in a transaction of its own:
    never on a caller's connection."""
    yield Step("admission_begin", {}, silent=True)
    rows = yield Step("topic_take", {"topic": topic})
    late: dict[str, int] = {}
    replayed: Replayed | None = None
    if rows:
        late = yield from look(topic, rows[0][0], channel)
        replayed = yield from _replay(topic, piece or PIECE, channel)
    yield Step("admission_commit", {}, silent=True)
    return Turn(bool(rows), late, replayed)


def roll(topic: str) -> Op[int]:
    """Make the tables that the topic needs and drop those that nobody keeps; returns how much has changed. In a transaction
    of its own, which is READ COMMITTED whatever the role's default: what has committed meanwhile must be seen."""
    yield Step("admission_begin", {}, silent=True)
    rows = yield Step("topic_roll", {"topic": topic})
    yield Step("admission_commit", {}, silent=True)
    return int(rows[0][0])


def forget() -> Op[None]:
    """Remove what has ended a day ago."""
    yield Step("topic_forget", {})


def look(topic: str, holds: bool, channel: str | None) -> Op[dict[str, int]]:
    """Make the jobs of messages that became visible since the last look, for subscriptions that their publish did not see;
    returns how many, by group. The caller holds the topic's row."""
    if not holds:
        return {}
    rows = yield Step("message_late", {"topic": topic})
    if any(foreign for *_, foreign in rows):
        yield Step("topic_adopt", {"topic": topic})
        rows = yield Step("message_late", {"topic": topic})
    found: dict[str, int] = {}
    for _, group, ids, _ in rows:
        if group is not None:
            yield from _deliver(topic, group, ids, channel)
            found[group] = len(ids)
    [now] = [now for now, *_ in rows if now is not None]
    yield Step("message_saw", {"topic": topic, "now": now})
    return found


def _replay(topic: str, piece: int, channel: str | None) -> Op[Replayed | None]:
    rows = yield Step("subscription_replaying", {"topic": topic})
    if not rows:
        return None
    group, held = rows[0]
    of = {"topic": topic, "name": group}
    [(ids, moved_to, ended)] = yield Step("replay_next", {**of, "look": max(1, LOOK * piece // PIECE), "limit": piece})
    yield from _deliver(topic, group, ids or (), channel)
    count = len(ids or ())
    if not ended:
        yield Step("replay_moved", {**of, "to": moved_to})
        return Replayed(group, count, done=False)
    if held:
        fresh = [row[0] for row in (yield Step("replay_fresh", {**of, "limit": piece + 1}))]
        if len(fresh) > piece:
            yield Step("replay_renew", {**of, "to": fresh[0] - 1})
            return Replayed(group, count, done=False)
        yield from _deliver(topic, group, fresh, channel)
        count += len(fresh)
    yield Step("subscription_live", of)
    return Replayed(group, count, done=True)


def _deliver(topic: str, group: str, ids: Sequence[int], channel: str | None) -> Op[None]:
    for start in range(0, len(ids), PART):
        part = Int8s(ids[start : start + PART])
        yield Step("message_deliver", {"topic": topic, "name": group, "ids": part, "channel": channel})

"""Topics, by every worker: whoever looks first replays, finds late messages, and trims."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psycopg

from pgqueue.events import Bus, EventName
from pgqueue.ops import replay as replay_ops
from pgqueue.ops import topic as topic_ops
from pgqueue.topic import Definition
from pgqueue.topic_methods import tell_roll, tell_turn
from pgqueue.worker.link import Link

PERIOD, QUIET_PERIOD, IDLE_PERIOD = 2.0, 5.0, 20.0
"""Seconds between looks; the second while notifications come through: replays are announced; the third where no topic
keeps messages: the first one that does is announced, too."""
PIECES = 10
"""Pieces of replays in one turn of maintenance, whose other work must not wait for long."""
FORGET_EVERY = 3600.0


class TopicKeeper:
    """A part of maintenance, on its connection. Where no topic keeps messages it is a small statement in twenty seconds."""

    def __init__(
        self,
        link: Link,
        definitions: Mapping[tuple[str, str], Definition],
        channel: str | None,
        events: Bus,
        *,
        wake: Callable[[], None],
        hearing: Callable[[], bool],
    ) -> None:
        self.link = link
        self.definitions = dict(definitions)
        self.channel = channel
        self.events = events
        self.wake = wake
        self.hearing = hearing
        self._piece = replay_ops.PIECE
        self._poked = False
        self._looked_at = time.monotonic()
        self._at = self._looked_at + random.uniform(0.0, PERIOD)
        self._define_at = time.monotonic() + topic_ops.AFFIRM_EVERY * random.uniform(0.5, 1.0)
        self._forget_at = time.monotonic() + FORGET_EVERY * random.uniform(0.0, 1.0)

    def poke(self) -> None:
        """Look now: there is something to replay, or to keep. From any thread."""
        self._poked = True

    def tend(self) -> float:
        """Do what is to be done now; returns the seconds until the next look."""
        now, hearing = time.monotonic(), self.hearing()
        at = self._at if hearing else min(self._at, self._looked_at + PERIOD)
        if now < at and not self._poked:
            return at - now
        self._poked, self._looked_at = False, now
        self._at = now + (QUIET_PERIOD if hearing else PERIOD) * random.uniform(0.8, 1.0)
        self._now_and_then(now)
        agenda = self.link.run(replay_ops.agenda())
        if not agenda.kept:
            self._at = min(now + IDLE_PERIOD * random.uniform(0.8, 1.0), self._next_now_and_then())
        failure: Exception | None = None
        for due in agenda.due:
            try:
                self._turn(due)
            except Exception as error:  # noqa: BLE001 - one topic's trouble must not stop the others; raised below
                failure = failure or error
        if failure is not None:
            raise failure
        return 0.0 if self._poked else max(0.0, self._at - time.monotonic())

    def _turn(self, due: replay_ops.Due) -> None:
        for _ in range(PIECES):
            turn = self._take(due.topic)
            if tell_turn(self.events, due.topic, turn):
                self.wake()
            if turn.replayed is None:
                break
        else:
            self._at = 0.0
        if due.rolls:
            tell_roll(self.events, due.topic, self.link.run(replay_ops.roll(due.topic)))

    def _take(self, topic: str) -> replay_ops.Turn:
        try:
            turn = self.link.run(replay_ops.turn(topic, channel=self.channel, piece=self._piece))
        except Exception:
            # One that takes longer than a worker waits for an answer would never succeed: less at once.
            self._piece = max(1, self._piece // 2)
            raise
        self._piece = min(replay_ops.PIECE, self._piece + 10)
        return turn

    def _next_now_and_then(self) -> float:
        return min(self._define_at, self._forget_at) if self.definitions else self._forget_at

    def _now_and_then(self, now: float) -> None:
        if self.definitions and now >= self._define_at:
            self._define_at = now + topic_ops.AFFIRM_EVERY * random.uniform(0.8, 1.0)
            define(self.link, self.definitions, self.channel, self.events)
        if now >= self._forget_at:
            self._forget_at = now + FORGET_EVERY * random.uniform(0.8, 1.0)
            self.link.run(replay_ops.forget())


def define_at_start(
    link: Link, definitions: Mapping[tuple[str, str], Definition], channel: str | None, events: Bus
) -> None:
    """The same for a worker that starts: what somebody holds in an open transaction is left to its maintenance."""
    with suppress(psycopg.errors.LockNotAvailable):
        define(link, definitions, channel, events)


def define(link: Link, definitions: Mapping[tuple[str, str], Definition], channel: str | None, events: Bus) -> None:
    """Write what the code says of subscriptions, where it says something new."""
    if not definitions:
        return
    written = link.run(topic_ops.define(definitions, channel=channel))
    if written:
        names = [f"{topic} {group}" for topic, group in written]
        events.emit(EventName.SUBSCRIPTION_DEFINED, subscriptions=names)

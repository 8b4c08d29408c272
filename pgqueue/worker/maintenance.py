"""Maintenance, by every worker: whoever comes first takes the work, nobody is needed for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from pgqueue.config import Settings
from pgqueue.errors import SchemaError
from pgqueue.events import Bus, EventName
from pgqueue.limit import Limit
from pgqueue.ops import Op
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import ageing as ageing_ops
from pgqueue.ops import expiry as expiry_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import result as result_ops
from pgqueue.ops import unique as unique_ops
from pgqueue.ops import worker as worker_ops
from pgqueue.ops.schedule import AFFIRM_EVERY
from pgqueue.topic import Definition
from pgqueue.version import SCHEMA_REVISION, __version__, runs_on
from pgqueue.worker.link import Link
from pgqueue.worker.loop import Loop
from pgqueue.worker.topics import TopicKeeper

PERIOD = 1.0
QUIET_PERIOD = 4.0
"""While notifications come through, what is due within `pgqueue.core.SOON` is announced, and the end of every longer lease
is seen beforehand. Never more than a fifth of the worker's own lease."""
TAKEN = 0.25
"""Seconds until the next look where the place of a key is about to be taken by somebody who has not committed."""
REPAIR_EVERY = 60.0
ARCHIVE_EVERY = 3600.0


def unfit_schema(link: Link) -> str | None:
    """What is wrong with the revision of the schema, and what to do; None when this version runs on it."""
    found, note = link.run(worker_ops.schema_version())
    if runs_on(found, note):
        return None
    return (
        f"schema {link.settings.schema!r} is at revision {found}, this pgqueue {__version__} needs "
        f"{SCHEMA_REVISION}: run `pgqueue migrate`, or upgrade the package if the schema is the newer one"
    )


class Maintenance(Loop):
    """Rescue, promotion, expiry and ageing of the worker's queues about once a second, and earlier when a job is due;
    topics every few seconds; adoption of orphans, old worker rows, expired results and the roll of the archive now and then.
    A schema on which this version does not run any more ends the worker."""

    name: ClassVar[str] = "maintenance"

    def __init__(
        self,
        link: Link,
        queues: Sequence[str],
        settings: Settings,
        channel: str | None,
        lease: float,
        events: Bus,
        wake: Callable[[], None],
        admit: Callable[[str], None],
        limit: Callable[[str, Limit], None],
        declare: Callable[[], Op[None]],
        hearing: Callable[[], bool],
        fatal: Callable[[str, BaseException], None],
        subscriptions: Mapping[tuple[str, str], Definition],
    ) -> None:
        super().__init__(events, fatal)
        self.link = link
        self.topics = TopicKeeper(link, subscriptions, channel, events, wake=wake, hearing=hearing)
        self.queues = queues
        self.settings = settings
        self.channel = channel
        self.quiet_period = min(QUIET_PERIOD, max(PERIOD, lease / 5))
        self.wake = wake
        self.admit = admit
        self.limit = limit
        self.declare = declare
        self.hearing = hearing
        self._poked = threading.Event()
        self._schema_at = time.monotonic() + REPAIR_EVERY
        self._repair_at = self._prune_at = 0.0
        self._repair_from: dict[str, str] = {}
        self._resumes: dict[str, float] = {}
        self._roll_at = time.monotonic() + random.uniform(0.0, 10.0)
        self._declare_at = time.monotonic() + AFFIRM_EVERY * random.uniform(0.8, 1.0)

    def turn(self) -> None:
        """Look at every queue, then wait for the next due time or the period, whichever is first."""
        self._poked.clear()
        self._look_at_the_schema()
        pause = (self.quiet_period if self.hearing() else PERIOD) * random.uniform(0.8, 1.0)
        failure: Exception | None = None
        for queue in self.queues:
            try:
                next_in = self._tend(queue)
            except Exception as error:  # noqa: BLE001 - one queue's trouble must not stop the others; raised below
                failure = failure or error
                continue
            pause = min(pause, max(0.01, next_in))
        if failure is not None:
            raise failure
        self._now_and_then()
        self._poked.wait(min(pause, max(0.01, self.topics.tend())))

    def poke(self) -> None:
        """Look now: something is due soon."""
        self._poked.set()

    def poke_topics(self) -> None:
        """Look now: there is something to replay."""
        self.topics.poke()
        self._poked.set()

    def stop(self) -> None:
        """End after the turn under way."""
        super().stop()
        self._poked.set()

    def give_up(self) -> None:
        """After a failure: it may be the schema that has changed."""
        self._schema_at = 0.0

    def finish(self) -> None:
        """Close the connection."""
        self.link.close()

    def _look_at_the_schema(self) -> None:
        if time.monotonic() >= self._schema_at:
            if unfit := unfit_schema(self.link):
                self._fatal(self.name, SchemaError(unfit))
            self._schema_at = time.monotonic() + REPAIR_EVERY

    def _tend(self, queue: str) -> float:
        """Do what is to be done now; returns the seconds until there is more, infinity when nothing is known."""
        agenda = self.link.run(rescue_ops.agenda(queue))
        self.limit(queue, agenda.limit)
        if agenda.expires_in is not None and agenda.expires_in < 0:
            self._rescue(queue)
        self._mind_pauses(queue, agenda.resume_in)
        if agenda.age_in is not None and agenda.age_in <= 0:
            self._age(queue)
        if agenda.late_in is not None and agenda.late_in <= 0:
            self._expire(queue)
            agenda = self.link.run(rescue_ops.agenda(queue))  # what expired may have had its key
        free = agenda.follow_in == 0
        followed = self._follow(queue) if free else []
        if followed or (agenda.due_in is not None and agenda.due_in <= 0):
            promoted = self.link.run(rescue_ops.promote(queue, channel=self.channel))
            if promoted:
                self.events.emit(EventName.JOBS_PROMOTED, queue=queue, count=len(promoted))
                self.wake()
            agenda = self.link.run(rescue_ops.agenda(queue))
        if agenda.admission_in is not None and agenda.admission_in <= 0:
            self.admit(queue)
        next_in = agenda.next_in()
        return min(next_in, TAKEN) if free and not followed else next_in

    def _rescue(self, queue: str) -> None:
        rescued = self.link.run(rescue_ops.rescue(queue, archive=self.settings.archive, channel=self.channel))
        if any(rescued):
            self.events.emit(
                EventName.JOBS_RESCUED,
                queue=queue,
                returned=rescued.returned,
                dead=rescued.dead,
                cancelled=rescued.cancelled,
                superseded=rescued.superseded,
            )
            self.wake()

    def _expire(self, queue: str) -> None:
        expired = self.link.run(expiry_ops.expire(queue, archive=self.settings.archive, channel=self.channel))
        if expired:
            self.events.emit(EventName.JOBS_EXPIRED, queue=queue, ids=expired, count=len(expired))

    def _age(self, queue: str) -> None:
        moved = self.link.run(ageing_ops.age(queue))
        if moved:
            self.events.emit(EventName.JOBS_AGED, queue=queue, count=moved)
            self.wake()  # they stand behind the marks now

    def _mind_pauses(self, queue: str, resume_in: float | None) -> None:
        """Wake claims when a pause has ended by itself: nobody says so, and an idle claimer looks rarely."""
        now, known = time.monotonic(), self._resumes.pop(queue, None)
        if known is not None and (resume_in is None or known <= now):
            self.wake()
        if resume_in is not None:
            self._resumes[queue] = now + resume_in

    def _follow(self, queue: str) -> list[int]:
        followed = self.link.run(unique_ops.follow(queue, archive=self.settings.archive, channel=self.channel))
        if followed:
            self.events.emit(EventName.JOBS_FOLLOWED, queue=queue, ids=followed, count=len(followed))
            self.wake()
        return followed

    def _now_and_then(self) -> None:
        now = time.monotonic()
        self._repair_lanes()
        if now >= self._repair_at:
            self._repair_at = now + REPAIR_EVERY * random.uniform(0.8, 1.2)
            for queue in self.queues:
                self._repair_from.setdefault(queue, "")
                adopted = self.link.run(rescue_ops.adopt(queue))
                if adopted:
                    self.events.emit(EventName.JOBS_ADOPTED, queue=queue, ids=adopted)
                self.link.run(unique_ops.prune(queue))
            self.link.run(worker_ops.prune())
        if now >= self._prune_at:
            self._prune_at = now + REPAIR_EVERY * random.uniform(0.8, 1.2)
            if self.link.run(result_ops.prune()):
                self._prune_at = now  # there is more than one piece of it
        if now >= self._declare_at:
            self._declare_at = now + AFFIRM_EVERY * random.uniform(0.8, 1.0)
            self.link.run(self.declare())
        if now >= self._roll_at:
            self._roll_at = now + ARCHIVE_EVERY * random.uniform(0.8, 1.2)
            self.link.run(rescue_ops.roll_archive(self.settings.archive_days))

    def _repair_lanes(self) -> None:
        # A part per turn: there may be a million lanes, and lost jobs must not wait for the end of the walk.
        for queue, begin in list(self._repair_from.items()):
            part = self.link.run(admission_ops.repair_part(queue, begin))
            if part.next is None:
                del self._repair_from[queue]
            else:
                self._repair_from[queue] = part.next

"""Maintenance of one queue: rescue, adoption of orphans, promotion of due jobs, and the roll of the archive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pgqueue.limit import Limit
from pgqueue.ops import Int8s, Op, Step

LEASES = 20
DUE = 500
HEAD = 10_000
BEGINNING = "-infinity"


class Rescued(NamedTuple):
    """What became of the jobs that lost workers held, by id."""

    returned: list[int]
    dead: list[int]
    cancelled: list[int]
    superseded: list[int]


def rescue(queue: str, *, archive: bool, channel: str | None = None) -> Op[Rescued]:
    """Take back what expired leases hold, round by round, until every expired lease was looked at once."""
    fates: dict[str, list[int]] = {"returned": [], "dead": [], "cancelled": [], "superseded": []}
    params = {"queue": queue, "limit": LEASES, "archive": archive, "channel": channel}
    after, seen = BEGINNING, Int8s()
    while True:
        rows = yield Step("job_rescue", {**params, "after": after, "seen": seen})
        leases = [row for row in rows if row[1] == "lease"]
        for row_id, fate, *_ in rows:
            if fate != "lease":
                fates[fate].append(row_id)
        if len(leases) < LEASES:
            return Rescued(**fates)
        last = [(lease, expired_at) for lease, *_, expired_at, is_last in leases if is_last]
        if last[0][1] != after:
            after, seen = last[0][1], Int8s()
        seen = Int8s([*seen, *(lease for lease, _ in last)])


def adopt(queue: str) -> Op[list[int]]:
    """Give orphans (running jobs without a lease row) an expired lease, so that the next rescue takes them back."""
    rows = yield Step("job_adopt", {"queue": queue, "limit": HEAD})
    return [job_id for (ids,) in rows for job_id in ids]


def promote(queue: str, *, channel: str | None) -> Op[list[int]]:
    """Put due jobs into line, until none is left; returns their ids."""
    promoted: list[int] = []
    while True:
        rows = yield Step("job_promote", {"queue": queue, "limit": DUE, "channel": channel})
        ids = rows[0][0] if rows else None
        promoted.extend(ids or ())
        if not ids or len(ids) < DUE:
            return promoted


def hasten(queue: str, ids: Sequence[int], *, channel: str | None) -> Op[list[int]]:
    """Put those of these jobs that wait for a time, a retry for instance, into line now; returns their ids."""
    rows = yield Step("job_hasten", {"queue": queue, "ids": Int8s(ids)})
    if rows:
        yield from promote(queue, channel=channel)
    return sorted(row[0] for row in rows)


class Agenda(NamedTuple):
    """Seconds until the next lease ends, the next job is due, a lane is to be looked at, a waiting job expires, a pause ends
    by itself, priorities age, and it is worth a look whether what waits behind the job of its unique key may go on (0: it
    may); 0 or less means now, None that there is none. `limit`: what the queue is limited to."""

    expires_in: float | None
    due_in: float | None
    admission_in: float | None
    late_in: float | None
    resume_in: float | None
    age_in: float | None
    follow_in: float | None
    limit: Limit

    def next_in(self) -> float:
        """Seconds until something is to be done that is not to be done now; infinity when nothing is known."""
        return min((seconds for seconds in self[:7] if seconds is not None and seconds > 0), default=math.inf)


def agenda(queue: str) -> Op[Agenda]:
    """What this queue needs now and next, by the database's clock."""
    rows = yield Step("queue_agenda", {"queue": queue})
    *seconds, running, rate, burst = rows[0]
    return Agenda._make([*seconds, Limit(running=running, rate=rate, burst=burst)])


def roll_archive(keep_days: float) -> Op[int]:
    """Make the partitions of the next days and drop those past `keep_days`; returns how many changed."""
    rows = yield Step("archive_roll", {"keep": keep_days * 86400.0})
    return int(rows[0][0])

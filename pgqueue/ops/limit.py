"""Limits of queues: claims within them, and what sets, declares and lists them. See limit.sql for the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pgqueue.config import validate_name
from pgqueue.job import Job
from pgqueue.limit import Limit, wait_for_token
from pgqueue.ops import Op, Step, Texts
from pgqueue.ops.claim import LowWater, in_line, looks_at
from pgqueue.ops.schedule import AFFIRM_EVERY, GONE

RUNNING, RATE = "running", "rate"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimit:
    """A queue that is limited: how many of its jobs run at once, how many start a second, and how many at a moment; None
    where it is not. `tokens`: how many may start now, as far as the rate goes. `in_code`: code declares a limit of it."""

    queue: str
    running: int | None
    rate: float | None
    burst: int | None
    tokens: float | None
    in_code: bool


class Granted(NamedTuple):
    """What a claim brought. `limited`: the queue has a limit. `bound`: what left no room for more, "running" or "rate"; None
    where there is room. `wait`: seconds until it is worth asking again for the sake of the rate; 0 where nobody knows.
    `busy`: nothing was asked, since somebody else was claiming."""

    jobs: list[Job]
    limited: bool
    bound: str | None
    wait: float
    busy: bool = False


class _Answer(NamedTuple):
    """The row of job_claim_limited. `jobs`: how many were claimed; `running`, `tokens`: the room that there was, None
    without such a limit; `allowed`: how many jobs were looked for; `left`: the tokens afterwards."""

    token: int | None
    jobs: int
    running: int | None
    tokens: int | None
    allowed: int
    left: float | None
    rate: float | None
    burst: int | None

    @property
    def bound(self) -> str | None:
        if self.running is not None and self.running <= self.jobs:
            return RUNNING
        return RATE if self.tokens is not None and self.tokens <= self.jobs else None

    def granted(self, jobs: list[Job]) -> Granted:
        limited = self.running is not None or self.tokens is not None
        wait = 0.0
        if self.bound == RATE and self.left is not None and self.rate is not None and self.burst is not None:
            wait = wait_for_token(self.left, self.rate, self.burst)
        return Granted(jobs, limited, self.bound, wait)


def claim(
    queue: str,
    limit: int,
    *,
    free: int,
    lease: float,
    low_water: LowWater,
    left_out: Sequence[str] = (),
    worker_id: int | None = None,
    wait: bool = True,
) -> Op[Granted]:
    """As ops.claim.claim, from a queue that is limited: up to `limit` jobs, and no more than its limits leave room for.
    Never on a caller's connection, which would keep the lock of the limit until its end.

    `free`: how many jobs the caller would start at once. Beyond that it gets a quarter of the room at most. Without `wait`
    somebody else's claim from this queue is not waited for.
    """
    taken: list[Job] = []
    answer = _Answer(None, 0, None, None, 0, None, None, None)
    while True:
        spans = low_water.spans()
        wanted = limit - len(taken)
        began = low_water.clock()
        params = looks_at(queue, wanted, lease, worker_id, spans, left_out)
        try:
            found = yield from _pass({**params, "free": max(0, free - len(taken))}, wait=wait)
        except Exception:
            if taken:
                break  # what the first pass claimed is committed: it must reach its caller
            raise
        if found is None:
            low_water.notified()  # this pass is still owed
            return answer.granted(in_line(taken))._replace(limited=True, busy=not taken)
        answer, jobs = found
        if answer.allowed or answer.bound is None:  # None without a place: the queue is paused, or nobody is free
            low_water.observe(jobs, full=spans is None, short=len(jobs) < answer.allowed, began=began)
        if not answer.allowed and spans is None:
            low_water.notified()  # nothing was looked at: the full pass is still owed
        taken.extend(jobs)
        if spans is None or len(jobs) >= answer.allowed or low_water.owed_in() != 0:
            break
    return answer.granted(in_line(taken))


def _pass(params: Mapping[str, object], *, wait: bool) -> Op[tuple[_Answer, list[Job]] | None]:
    """None where somebody else is claiming from the queue."""
    queue = params["queue"]
    # One by one: see ops.admission.
    yield Step("limit_begin", {}, silent=True)
    [(ours, *_)] = yield Step("limit_lock", {"queue": queue, "wait": wait})
    if not ours:
        yield Step("limit_commit", {}, silent=True)
        return None
    rows = yield Step("job_claim_limited", dict(params))
    yield Step("limit_commit", {}, silent=True)
    answer = _Answer(*rows[-1])
    if answer.token is None:
        return answer, []
    rows = yield Step("job_claimed", {"queue": queue, "token": answer.token})
    return answer, in_line(list(map(Job._make, rows)))


def is_limited(queue: str) -> Op[bool]:
    """Whether this queue is limited now."""
    return bool((yield from limits([queue])))


def waits(queue: str) -> Op[bool]:
    """Whether a job of this queue is ready."""
    rows = yield Step("limit_waits", {"queue": queue})
    return bool(rows[0][0])


def limits(queues: Sequence[str] | None = None) -> Op[list[QueueLimit]]:
    """The limits of these queues, or of all, by name; queues without a limit are left out."""
    rows = yield Step("limit_list", {"names": None if queues is None else Texts(queues)})
    return [QueueLimit(**dict(zip(QueueLimit.__dataclass_fields__, row, strict=True))) for row in rows]


def set_limit(queue: str, limit: Limit, *, channel: str | None) -> Op[None]:
    """Limit a queue to this from now on, and to nothing else."""
    validate_name("queue", queue)
    return _set_limit(queue, limit, channel)


def _set_limit(queue: str, limit: Limit, channel: str | None) -> Op[None]:
    yield Step("limit_set", {"queue": queue, **asdict(limit), "channel": channel})


def lift_limit(queue: str, *, channel: str | None) -> Op[bool]:
    """Take the limits of a queue back; False when there was none."""
    rows = yield Step("limit_lift", {"queue": queue, "channel": channel})
    return bool(rows)


def declare(limits: Mapping[str, Limit], *, channel: str | None) -> Op[list[str]]:
    """Write what the code says, where it says something new; returns the queues that were written."""
    prints = {queue: limit.fingerprint() for queue, limit in limits.items()}
    params = {"names": Texts(prints), "definitions": Texts(prints.values()), "often": AFFIRM_EVERY / 2, "gone": GONE}
    written = []
    for (queue,) in (yield Step("limit_affirm", params)):
        said = {"queue": queue, **asdict(limits[queue]), "definition": prints[queue], "gone": GONE, "channel": channel}
        written += [row[0] for row in (yield Step("limit_define", said))]
    return written

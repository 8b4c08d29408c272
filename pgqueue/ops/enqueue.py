"""Enqueue: one job, or any number of jobs that differ in their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime

from pgqueue.ops import Op, Step, Stream, Texts

CHUNK_JOBS = 5_000
CHUNK_BYTES = 1024 * 1024
Call = tuple[str | None, str | None]
Chunk = tuple[Texts, Texts | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Everything about a job but its arguments, validated and encoded. `channel` None means: wake nobody; `prefix` "due "
    wakes maintenance, which waits for the due time, instead of claims. `has_keys`: it has keys or expires, and takes the
    longer way into the queue. `alert`, `archive`: where and how the change of another job of its unique key is told and
    kept."""

    queue: str
    task: str
    priority: int
    max_attempts: int
    delay: float | None = None
    run_at: datetime | None = None
    timeout: float | None = None
    retry: str | None = None
    headers: str | None = None
    channel: str | None = None
    prefix: str = ""
    has_keys: bool = False
    lane_rank: int | None = None
    lane_width: int | None = None
    park: bool | None = None
    expires_in: float | None = None
    on_conflict: str = "skip"
    unique_for: float | None = None
    delay_limit: float | None = None
    alert: str | None = None
    archive: bool = True
    params: dict[str, object] = field(init=False, repr=False, compare=False)
    """What every enqueue statement is given."""
    keyed: dict[str, object] = field(init=False, repr=False, compare=False)
    """What those with keys are given beside it."""

    def __post_init__(self) -> None:
        params = {
            "queue": self.queue,
            "task": self.task,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "delay": 0.0 if self.delay is None else self.delay,
            "run_at": self.run_at,
            "timeout": self.timeout,
            "retry": self.retry,
            "headers": self.headers,
            "channel": self.channel,
            "prefix": self.prefix,
        }
        object.__setattr__(self, "params", params)
        keyed: dict[str, object] = {"lane_rank": self.lane_rank, "lane_width": self.lane_width, "park": self.park}
        keyed["expires_in"] = self.expires_in
        object.__setattr__(self, "keyed", keyed)


def enqueue(envelope: Envelope, call: Call) -> Op[int]:
    """Insert one job; returns its id."""
    rows = yield Step("job_enqueue", {**envelope.params, "args": call[0], "kwargs": call[1]})
    return int(rows[0][0])


def enqueue_many(envelope: Envelope, chunks: Iterable[Chunk]) -> Op[list[int]]:
    """Insert any number of jobs, a statement per chunk; returns their ids in the order of the input.

    All or nothing only where there is one chunk, or where the caller runs it in a transaction.
    """
    rows = yield Stream(
        Step("job_enqueue_many", {**envelope.params, "args": args, "kwargs": kwargs}) for args, kwargs in chunks
    )
    return list(itertools.chain.from_iterable(row[0] for row in rows))


def chunked(calls: Iterable[Call]) -> Iterator[Chunk]:
    """Cut by number and by bytes, reading from `calls` no more than a chunk at a time."""
    args, kwargs, size = Texts(), Texts(), 0
    for call in calls:
        args.append(call[0])
        kwargs.append(call[1])
        size += len(call[0] or "") + len(call[1] or "")
        if len(args) >= CHUNK_JOBS or size >= CHUNK_BYTES:
            yield _chunk(args, kwargs)
            args, kwargs, size = Texts(), Texts(), 0
    if args:
        yield _chunk(args, kwargs)


def _chunk(args: Texts, kwargs: Texts) -> Chunk:
    """Without keywords where no call has any, which is the rule; the other array says how many jobs there are."""
    return args, kwargs if any(kwargs) else None

"""Results: which tasks keep them, how jobs ended, waiting for that; and the progress of those that run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import NamedTuple

from pgqueue.errors import WaitTimeout
from pgqueue.job import JobState
from pgqueue.ops import Int8s, Op, Rows, Step, Texts
from pgqueue.result import JobResult, Progress

PART = 1000
PRUNE, ROUNDS = 1000, 20
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
SHARE = 10
"""A look at very many jobs may take one tenth of the time at most."""


def declare(keeping: Mapping[str, float | None]) -> Op[None]:
    """Say for how many seconds these tasks keep results, None for those that keep none."""
    plain = sorted(task for task, seconds in keeping.items() if seconds is None)
    kept = sorted((task, seconds) for task, seconds in keeping.items() if seconds is not None)
    if plain:
        yield Step("kept_forget", {"tasks": Texts(plain)})
    if kept:
        params = {"tasks": Texts([task for task, _ in kept]), "seconds": [float(seconds) for _, seconds in kept]}
        yield Step("kept_declare", params)


def prune() -> Op[bool]:
    """Remove what has expired, and the progress of jobs that have ended; True when there may be more of it."""
    more = False
    for _ in range(ROUNDS):
        rows = yield Step("result_prune", {"limit": PRUNE})
        more = rows[0][0] == PRUNE
        if not more:
            break
    rows = yield Step("progress_prune", {"limit": PRUNE})
    return more or rows[0][0] == PRUNE


Rights = tuple[bool, bool]


def end_rights() -> Op[Rights]:
    """Whether this role may read how every job ended, and values."""
    rows = yield Step("end_rights", {})
    return bool(rows[0][0]), bool(rows[0][1])


def ends(ids: Sequence[int], rights: Rights) -> Op[dict[int, JobResult]]:
    """The ends of those of these jobs that do not live, by id."""
    everything, values = rights
    found: dict[int, JobResult] = {}
    for part in _parts(ids):
        rows: Rows
        if everything:
            rows = yield Step("job_ends", {"ids": part})
        elif values:
            rows = yield Step("job_ends_bare", {"ids": part})
        else:
            rows = yield Step("job_ends_hidden", {"ids": part})
        found.update((row[0], _result(*row)) for row in rows)
    return found


def end(job_id: int) -> Op[JobResult | None]:
    """How this job ended; None where it lives, or where nothing is known of it."""
    rights = yield from end_rights()
    found = (yield from ends([job_id], rights)).get(job_id)
    return found if found is not None and found.state is not None else None


class WholeJob(NamedTuple):
    """All that is known of a job. `state` as in JobState; `token` and `worker` while it runs; `value_json` where a result is
    kept."""

    id: int
    queue: str
    task: str
    state: str
    args_json: str | None
    kwargs_json: str | None
    priority: int
    attempt: int
    errors_json: str | None
    created_at: datetime | None
    finished_at: datetime | None
    run_at: datetime | None
    token: int | None
    worker: str | None
    value_json: str | None


def whole_job(job_id: int) -> Op[WholeJob | None]:
    """The job of that id, whether it lives or has ended; None where nothing is left of it."""
    rows = yield Step("job_whole", {"id": job_id})
    return WholeJob(*rows[0]) if rows else None


def _result(job_id: int, state: str, value: str, error: str, finished_at: object, expires_at: object) -> JobResult:
    known: JobState | None = None
    with suppress(ValueError):  # nothing, or written by hand
        known = JobState(state)
    return JobResult(
        id=job_id,
        state=known,
        value_json=value,
        error=error,
        finished_at=finished_at,  # type: ignore[arg-type]
        expires_at=expires_at,  # type: ignore[arg-type]
    )


def _parts(ids: Sequence[int]) -> Iterator[Int8s]:
    for start in range(0, len(ids), PART):
        yield Int8s(ids[start : start + PART])


class Watch:
    """Waiting until jobs have ended: `look`, then `pause`, and so on. Ended are those that are no live rows any more.

    `seconds` None waits for ever. Pauses grow to a second, and beyond where a look takes long.
    """

    def __init__(
        self, ids: Sequence[int], seconds: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended: dict[int, JobResult] = {}
        self._open = sorted(set(ids))
        self._names = frozenset(map(str, ids))
        self._seconds = seconds
        self._clock = clock
        self._until = None if seconds is None else clock() + seconds
        self._rights: Rights | None = None
        self._pause = FIRST_PAUSE
        self._cost = 0.0

    def look(self) -> Op[bool]:
        """Ask for those that are open; True when none is left."""
        began = self._clock()
        if self._rights is None:
            self._rights = yield from end_rights()
        self.ended |= yield from ends(self._open, self._rights)
        self._open = [job_id for job_id in self._open if job_id not in self.ended]
        self._cost = self._clock() - began
        return not self._open

    def pause(self) -> float:
        """Seconds until the next look, unless a notification comes; WaitTimeout when the time is over."""
        pause = max(self._pause * random.uniform(0.8, 1.0), SHARE * self._cost)
        self._pause = min(LONGEST_PAUSE, self._pause * 1.5)
        if self._until is None:
            return pause
        left = self._until - self._clock()
        if left <= 0:
            raise WaitTimeout(self._open, self.ended, self._seconds or 0.0)
        return min(pause, left)

    def concerns(self, payload: str) -> bool:
        """Whether a notification is about one of these jobs; one without ids may be."""
        return not payload or not self._names.isdisjoint(payload.split())


class Report(NamedTuple):
    """What a running job says of itself."""

    id: int
    token: int
    percent: float | None
    message: str


def write_progress(queue: str, reports: Sequence[Report]) -> Op[None]:
    """Write these reports of jobs of one queue, where their tokens are still the current ones."""
    for start in range(0, len(reports), PART):
        # One id once and ascending: the statement finds what belongs to an id by binary search.
        newest = {one.id: one for one in sorted(reports[start : start + PART], key=lambda one: one.token)}
        part = [newest[job_id] for job_id in sorted(newest)]
        yield Step(
            "progress_write",
            {
                "queue": queue,
                "ids": Int8s([one.id for one in part]),
                "tokens": Int8s([one.token for one in part]),
                "percents": [-1.0 if one.percent is None else float(one.percent) for one in part],
                "messages": Texts([one.message for one in part]),
            },
        )


def progress(ids: Sequence[int]) -> Op[dict[int, Progress]]:
    """What live jobs have last said of themselves, by id."""
    rows = yield Step("progress_read", {"ids": Int8s(ids)})
    return {row[0]: Progress(*row[1:]) for row in rows}

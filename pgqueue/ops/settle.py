"""Settle: complete, retry, snooze, discard, dead-letter, release. All fenced by the token; all say whom they missed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pgqueue.job import Job
from pgqueue.ops import Int8s, Op, Step, Texts
from pgqueue.outcome import Outcome, OutcomeKind
from pgqueue.result import Kept

Settlement = tuple[Job, Outcome]
PART = 1000
_UNKNOWN = Kept(-1.0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleOptions:
    """`archive`: keep finished jobs. `channel`: whom to wake for jobs that are ready again; None for nobody.
    `lanes_channel`: the same for slots of lanes that became free; None where the caller looks after them."""

    archive: bool = True
    channel: str | None = None
    lanes_channel: str | None = None


class Settled(NamedTuple):
    """`lost`: the jobs whose token is no longer the current one. `freed`: slots of lanes are free now (`ops.admission`)."""

    lost: list[Job]
    freed: bool


def settle(
    queue: str, settlements: Sequence[Settlement], *, finished: Iterable[int] = (), options: SettleOptions
) -> Op[Settled]:
    """Write the outcomes of jobs of one queue.

    `finished` are the tokens whose jobs the caller believes all settled with this call: their lease rows go, if that is
    true. Completions come last, so that a lease goes together with its last jobs.
    """
    lost: list[Job] = []
    freed = False
    leases = Int8s(sorted(set(finished)))
    writes = list(_writes(settlements))
    for number, (kind, write, chosen) in enumerate(writes, 1):
        last = number == len(writes) and kind is OutcomeKind.COMPLETED
        shared = {"queue": queue, "archive": options.archive, "lanes_channel": options.lanes_channel, **_pairs(chosen)}
        rows = yield write(shared, chosen, leases if last else Int8s(), options)
        count, accepted, freeing = rows[0][:3]
        freed = freed or freeing
        if count < len(chosen):
            lost.extend(job for job, _ in chosen if job.id not in (accepted or ()))
        if last:
            leases = Int8s()
    if leases:
        yield Step("lease_free", {"queue": queue, "leases": leases})
    return Settled(lost, freed)


def _writes(settlements: Sequence[Settlement]) -> Iterator[tuple[OutcomeKind, _Write, list[Settlement]]]:
    """One entry per statement."""
    for part in _without_repeats(settlements):
        kinds = {outcome.kind for _, outcome in part}
        for kind, write in _WRITES:
            if kind in kinds:
                chosen = part if len(kinds) == 1 else [pair for pair in part if pair[1].kind is kind]
                if kind is OutcomeKind.COMPLETED and (kept := [pair for pair in chosen if pair[1].kept is not None]):
                    yield kind, _complete_kept, kept
                    chosen = [pair for pair in chosen if pair[1].kept is None] if len(kept) < len(chosen) else []
                if chosen:
                    yield kind, write, chosen


def _without_repeats(settlements: Sequence[Settlement]) -> list[list[Settlement]]:
    """Parts in which an id stands once, in ascending order, since the statements find the token of an id by binary search;
    and not too long. The same claim named twice is settled once."""
    ids = [job.id for job, _ in settlements]
    if len(ids) <= PART and len(set(ids)) == len(ids):
        return [list(settlements) if ids == sorted(ids) else sorted(settlements, key=_id)]
    parts: list[dict[int, Settlement]] = []
    seen: set[tuple[int, int]] = set()
    for pair in settlements:
        job = pair[0]
        if (job.id, job.token) in seen:
            continue
        seen.add((job.id, job.token))
        for part in reversed(parts):
            if job.id not in part and len(part) < PART:
                part[job.id] = pair
                break
        else:
            parts.append({job.id: pair})
    return [sorted(part.values(), key=_id) for part in parts]


def _id(pair: Settlement) -> int:
    return pair[0].id


def _pairs(chosen: Sequence[Settlement]) -> dict[str, Any]:
    return {"ids": Int8s([job.id for job, _ in chosen]), "tokens": Int8s([job.token for job, _ in chosen])}


def _complete(params: dict[str, Any], chosen: Sequence[Settlement], leases: Int8s, options: SettleOptions) -> Step:
    # None, not a list of nothing: these have no reason, and the list would be sent with each of them.
    return Step("job_complete", {**params, "state": "completed", "reasons": None, "leases": leases})


def _complete_kept(params: dict[str, Any], chosen: Sequence[Settlement], leases: Int8s, options: SettleOptions) -> Step:
    """Completions with their results, or discarded jobs, whose tasks may keep results: the statement knows that."""
    kept = [outcome.kept or _UNKNOWN for _, outcome in chosen]
    discarded = chosen[0][1].kind is OutcomeKind.DISCARD
    return Step(
        "job_complete_kept",
        {
            **params,
            "state": "discarded" if discarded else "completed",
            "reasons": Texts([outcome.reason for _, outcome in chosen]) if discarded else None,
            "leases": leases,
            "values": Texts([one.value_json for one in kept]),
            "errors": Texts([one.error for one in kept]),
            "seconds": [one.seconds for one in kept],
            "channel": options.channel,
        },
    )


def _retry(params: dict[str, Any], chosen: Sequence[Settlement], leases: Int8s, options: SettleOptions) -> Step:
    return Step(
        "job_retry",
        {
            **params,
            "delays": [outcome.delay for _, outcome in chosen],
            "spent": [outcome.kind is OutcomeKind.RETRY for _, outcome in chosen],
            "errors": Texts([outcome.error_json for _, outcome in chosen]),
            "lost": [outcome.lost for _, outcome in chosen],
            "channel": options.channel,
        },
    )


def _bury(params: dict[str, Any], chosen: Sequence[Settlement], leases: Int8s, options: SettleOptions) -> Step:
    return Step(
        "job_bury",
        {
            **params,
            "reasons": Texts([outcome.reason or "dead-lettered" for _, outcome in chosen]),
            "errors": Texts([outcome.error_json for _, outcome in chosen]),
            "channel": options.channel,
        },
    )


def _release(params: dict[str, Any], chosen: Sequence[Settlement], leases: Int8s, options: SettleOptions) -> Step:
    return Step("job_release", {**params, "channel": options.channel})


_Write = Callable[[dict[str, Any], Sequence[Settlement], Int8s, SettleOptions], Step]
_WRITES: tuple[tuple[OutcomeKind, _Write], ...] = (
    (OutcomeKind.RELEASE, _release),
    (OutcomeKind.RETRY, _retry),
    (OutcomeKind.SNOOZE, _retry),
    (OutcomeKind.DEAD, _bury),
    (OutcomeKind.DISCARD, _complete_kept),
    (OutcomeKind.COMPLETED, _complete),
)


def doubt(queue: str, pairs: Sequence[tuple[int, int]]) -> Op[dict[int, str]]:
    """What became of these (id, token) pairs, each id once and ascending, whose handlers settled them in transactions of
    their own: "ours", "open" or "other", as the statement says; those that are gone are left out."""
    ids, tokens = zip(*pairs, strict=True)
    rows = yield Step("job_doubt", {"queue": queue, "ids": Int8s(ids), "tokens": Int8s(tokens)})
    return dict(rows)


def live(queue: str, ids: Sequence[int]) -> Op[set[int]]:
    """Which of these jobs have not ended."""
    rows = yield Step("job_queues", {"ids": Int8s(ids)})
    return {job_id for job_id, its_queue in rows if its_queue == queue}


def cancel(ids: Sequence[int], options: SettleOptions) -> Op[dict[int, str]]:
    """Cancel live jobs: "cancelled" for those that waited, "requested" for those that run; unknown ids are left out."""
    rows = yield Step("job_queues", {"ids": Int8s(ids)})
    by_queue: dict[str, list[int]] = {}
    for job_id, queue in sorted(rows):
        by_queue.setdefault(queue, []).append(job_id)
    answer: dict[int, str] = {}
    for queue, members in sorted(by_queue.items()):
        rows = yield cancellation(queue, members, options)
        answer.update({row[0]: row[1] for row in rows})
    return answer


def cancellation(queue: str, ids: Sequence[int], options: SettleOptions) -> Step:
    """Cancel these jobs of one queue; the answer is what became of each that is live."""
    params = {"queue": queue, "ids": Int8s(ids), "archive": options.archive, "channel": options.channel}
    return Step("job_cancel", params)

"""Enqueue of jobs with a unique key, and what keeps one job of a key behind the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pgqueue.errors import DuplicateJob
from pgqueue.keys import MERGE_DISTINCT, MERGING, MODES, RAISE, SKIP, merge_payloads
from pgqueue.ops import Op, Rows, Step, Stream, Texts, relayed
from pgqueue.ops.enqueue import CHUNK_JOBS, Envelope
from pgqueue.ops.keyed import KeyedCall

PRUNED = 1_000


def enqueue_one(envelope: Envelope, call: KeyedCall) -> Op[int]:
    """Insert one job, or find or change that of its key; returns its id. DuplicateJob where that is asked for."""
    ids = yield from _chunk(envelope, [call])
    return ids[0]


def told_new(op: Op[int]) -> Op[tuple[int, bool]]:
    """An enqueue of one job, and whether there is a job more: a unique key may have given the id of the one that it had."""
    is_new = True

    def answer(step: Step | Stream) -> Op[Rows]:
        nonlocal is_new
        rows = yield step
        if isinstance(step, Step) and step.name in ("job_enqueue_unique", "job_enqueue_over"):
            is_new = any(row[2] for row in rows)
        return rows

    job_id = yield from relayed(op, answer)
    return job_id, is_new


def enqueue_keyed(envelope: Envelope, calls: Iterable[KeyedCall]) -> Op[list[int]]:
    """The same for any number of jobs, in the order of the input. Of several calls with one key each gets the same id."""
    calls, places = _distinct(envelope, calls)
    order = list(range(len(calls)))
    if len(calls) > CHUNK_JOBS and envelope.lane_width is None:
        order.sort(key=lambda number: calls[number].unique_key or "")  # two bulks meet the same keys in the same order
    ids = dict.fromkeys(order, 0)
    for start in range(0, len(order), CHUNK_JOBS):
        part = order[start : start + CHUNK_JOBS]
        found = yield from _chunk(envelope, [calls[number] for number in part])
        ids.update(zip(part, found, strict=True))
    return [ids[place] for place in places]


def _distinct(envelope: Envelope, calls: Iterable[KeyedCall]) -> tuple[list[KeyedCall], list[int]]:
    """The calls with each key once, and for every call of the input where its job stands among them."""
    chosen: list[KeyedCall] = []
    places: list[int] = []
    known: dict[str, int] = {}
    for call in calls:
        key = call.unique_key
        if key is None or key not in known:
            known.update({} if key is None else {key: len(chosen)})
            places.append(len(chosen))
            chosen.append(call)
            continue
        place = known[key]
        places.append(place)
        if envelope.on_conflict == RAISE:
            raise DuplicateJob(key, None)
        if envelope.on_conflict in MERGING:
            merged = merge_payloads(chosen[place].call, call.call, once=envelope.on_conflict == MERGE_DISTINCT)
            chosen[place] = call._replace(call=merged)
        elif envelope.on_conflict != SKIP:
            chosen[place] = call
    return chosen, places


def _chunk(envelope: Envelope, calls: Sequence[KeyedCall]) -> Op[list[int]]:
    """Again for those that another transaction was quicker with: what it left is seen by then. And once more for those whose
    key has a job that is too old to be run, after that is gone; where it is still there, it runs."""
    ids = [0] * len(calls)
    missing = list(range(len(calls)))
    swept = False
    while missing:
        rows = yield _step(envelope, [calls[number] for number in missing])
        lost, late = [], []
        for place, job_id, is_new, is_late, *_ in sorted(rows, key=lambda row: int(row[0])):
            number = missing[place - 1]
            if job_id is None:
                lost.append(number)
            elif is_late and not swept:
                late.append(number)
            elif is_new or envelope.on_conflict != RAISE:
                ids[number] = int(job_id)
            else:
                raise DuplicateJob(calls[number].unique_key or "", int(job_id))
        if late:
            swept = True
            yield _expire(envelope, [calls[number].unique_key for number in late])
        missing = sorted(lost + late)
    return ids


def _expire(envelope: Envelope, keys: Sequence[str | None]) -> Step:
    where = {"queue": envelope.queue, "unique_keys": Texts(keys)}
    return Step("unique_expire", {**where, "archive": envelope.archive, "alert": envelope.alert})


def _step(envelope: Envelope, calls: Sequence[KeyedCall]) -> Step:
    params = {
        **envelope.params,
        **envelope.keyed,
        "unique_for": envelope.unique_for,
        "args": Texts([one.call[0] for one in calls]),
        "kwargs": Texts([one.call[1] for one in calls]),
        "unique_keys": Texts([one.unique_key for one in calls]),
        "lanes": Texts([one.lane for one in calls]),
    }
    if envelope.on_conflict in (SKIP, RAISE):
        return Step("job_enqueue_unique", {**params, "all_or_none": envelope.on_conflict == RAISE})
    more = {
        "mode": MODES[envelope.on_conflict],
        "distinct": envelope.on_conflict == MERGE_DISTINCT,
        "delay_limit": envelope.delay_limit,
        "alert": envelope.alert,
    }
    return Step("job_enqueue_over", {**params, **more})


def follow(queue: str, *, archive: bool, channel: str | None = None) -> Op[list[int]]:
    """Let jobs that wait behind the running one of their key go on, where that has ended; returns their ids."""
    rows = yield Step("unique_follow", {"queue": queue, "archive": archive, "channel": channel})
    return list(rows[0][0] or ())


def prune(queue: str) -> Op[None]:
    """Remove the windows that have closed."""
    while len((yield Step("unique_prune", {"queue": queue, "limit": PRUNED}))) == PRUNED:
        pass

"""Enqueue of jobs with keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pgqueue.ops import Op, Step, Texts
from pgqueue.ops.enqueue import CHUNK_JOBS, Call, Envelope


class KeyedCall(NamedTuple):
    """One call with its keys. `lane`: a letter for the kind of the key, and the key; see `pgqueue.keys`."""

    call: Call
    unique_key: str | None = None
    lane: str | None = None


def enqueue_one(envelope: Envelope, call: KeyedCall) -> Op[int]:
    """Insert one job with keys; returns its id."""
    rows = yield _insert(envelope, [call])
    return int(rows[0][0][0])


def enqueue_keyed(envelope: Envelope, calls: Iterable[KeyedCall]) -> Op[list[int]]:
    """Insert any number of jobs with keys, a statement per chunk; returns their ids in the order of the input."""
    calls = iter(calls)
    ids: list[int] = []
    while chunk := list(itertools.islice(calls, CHUNK_JOBS)):
        rows = yield _insert(envelope, chunk)
        ids.extend(rows[0][0])
    return ids


def _insert(envelope: Envelope, calls: Sequence[KeyedCall]) -> Step:
    columns = {
        "args": Texts([one.call[0] for one in calls]),
        "kwargs": Texts([one.call[1] for one in calls]),
        "unique_keys": Texts([one.unique_key for one in calls]),
        "lanes": Texts([one.lane for one in calls]),
    }
    return Step("job_enqueue_keyed", {**envelope.params, **envelope.keyed, **columns})

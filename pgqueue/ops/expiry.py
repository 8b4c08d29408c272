"""The sweep of jobs that are too old to be run."""

from __future__ import annotations

from pgqueue.ops import Op, Step

SWEEP = 500


def expire(queue: str, *, archive: bool, channel: str | None) -> Op[list[int]]:
    """Archive the waiting jobs of this queue that have expired, piece by piece, until none is left; returns their ids."""
    expired: list[int] = []
    while True:
        rows = yield Step("job_expire", {"queue": queue, "limit": SWEEP, "archive": archive, "channel": channel})
        ids = rows[0][0] if rows else None
        expired.extend(ids or ())
        if not ids or len(ids) < SWEEP:
            return expired

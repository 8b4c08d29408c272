"""A job, as the queue hands it out: a frozen value that knows its token, and decodes its payload only when asked."""

from __future__ import annotations

import enum
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pgqueue.payload import decode_args, decode_kwargs, decode_object


class JobState(enum.StrEnum):
    """Where a job is. The first four are live rows; the others are where it can end."""

    READY = "ready"
    SCHEDULED = "scheduled"
    BLOCKED = "blocked"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DISCARDED = "discarded"
    SUPERSEDED = "superseded"
    DEAD = "dead"


class Job(NamedTuple):
    """One claimed job.

    `token` is the fencing token of this claim: every settle checks it, and a handler may use it in its own writes
    (``UPDATE … WHERE fence < token``), since a later claim always has a larger one. `attempt` counts from 1. `expires_in`:
    seconds, at the claim, until it is too old to be started; None where it does not expire.
    """

    id: int
    queue: str
    task: str
    token: int
    attempt: int
    max_attempts: int
    lost: int
    priority: int
    position: int
    timeout: float | None
    created_utc: datetime | None
    args_json: str | None
    kwargs_json: str | None
    retry_json: str | None
    headers_json: str | None
    expires_in: float | None = None

    def __repr__(self) -> str:
        """Without the payload, which may hold secrets."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields if not name.endswith("_json"))
        return f"Job({shown})"

    @property
    def created_at(self) -> datetime | None:
        """When it was enqueued; None where the row holds a time that Python cannot, such as infinity."""
        return None if self.created_utc is None else self.created_utc.replace(tzinfo=UTC)

    @property
    def args(self) -> list[Any]:
        """The positional arguments, decoded anew at each access; PayloadDecodeError where the row holds no JSON list."""
        return decode_args(self.args_json)

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, decoded anew at each access; PayloadDecodeError where the row holds no JSON object."""
        return decode_kwargs(self.kwargs_json)

    @property
    def headers(self) -> dict[str, Any]:
        """What travels with the job beside its arguments."""
        return decode_object("headers", self.headers_json)

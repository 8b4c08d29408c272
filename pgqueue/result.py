"""What a job has come to: its result as a worker keeps it, and its end as a caller reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pgqueue.errors import PayloadError, ResultMissing
from pgqueue.job import JobState
from pgqueue.payload import decode_args, encode_result

DEFAULT_KEEP = 86400.0
"""Seconds for `keep_result=True`."""
UNREADABLE = "result: an object in it cannot be looked at"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a completed run, and for how many seconds: the value as JSON, or why there is none."""

    seconds: float
    value_json: str | None
    error: str | None = None


def keep(value: Any, *, seconds: float, max_bytes: int) -> Kept:
    """`value` as it is kept. Never raises: what cannot be stored must not fail work that is done."""
    try:
        return Kept(seconds, encode_result(value, max_bytes=max_bytes))
    except PayloadError as error:
        return Kept(seconds, None, f"{error.path}: {error.reason}".replace("result[0]", "result", 1))
    except BaseException:  # noqa: BLE001 - an object of a task may do anything when it is looked at
        return Kept(seconds, None, UNREADABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended. `state` is completed, discarded, cancelled, expired, superseded or dead; None where nothing is left
    that could say it.

    `value` is what its handler returned. `error` says in one sentence why the job did not complete, or why there is no
    value. `expires_at` is when the result is forgotten, None where none was kept. The value is not shown by `repr`.
    """

    id: int
    state: JobState | None
    value_json: str | None = field(repr=False)
    error: str | None
    finished_at: datetime | None
    expires_at: datetime | None

    @property
    def value(self) -> Any:
        """What the handler returned, decoded anew at each access; ResultMissing says why there is nothing."""
        if self.value_json is None:
            raise ResultMissing(self.id, self._why())
        return decode_args(f"[{self.value_json}]")[0]

    def _why(self) -> str:
        if self.error is not None:
            return self.error if self.state is JobState.COMPLETED else f"{self.state}: {self.error}"
        if self.state is None:
            return "it is not there any more, and nothing says how it ended"
        return "none was kept" if self.state is JobState.COMPLETED else f"it was not completed but {self.state}"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a job has last said of itself: 0 to 100 `percent`, or None, and a `message`; in which attempt, and when."""

    percent: float | None
    message: str
    attempt: int
    updated_at: datetime | None

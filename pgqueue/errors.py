"""Every error that pgqueue raises on purpose.

    PgQueueError
    ├── ConfigurationError (ValueError)   a setting is missing, unknown or contradicts another one
    ├── UnsupportedConnection (TypeError) `using=` is not a connection that pgqueue can enqueue through
    ├── DatabaseUnavailable               no server answers, or none that accepts writes
    ├── SchemaError                       the schema is missing, too old, too new or was changed by hand
    ├── PayloadError (ValueError)         an argument is not JSON, or would change on its way through JSON
    ├── PayloadDecodeError (ValueError)   a stored payload cannot be read back
    ├── TaskError
    │   ├── UnknownTask (LookupError)     no task of that name is registered in this process
    │   ├── DuplicateTask (ValueError)    two functions want one name
    │   └── ArgumentsDoNotBind (TypeError) the stored arguments do not fit the function's signature
    ├── DuplicateJob (ValueError)         the unique key has a job; `.job_id` says which
    ├── UnknownQueue (LookupError)        an operator named a queue that holds nothing and never did
    ├── UnknownSchedule (LookupError)     an operator named a schedule that does not exist
    ├── UnknownTopic (LookupError)        an operator named a topic that nobody uses
    ├── UnknownSubscription (LookupError) a topic has no group of that name
    ├── LeaseLost                         the token is no longer the current one; `.jobs` holds who is concerned
    ├── ResultMissing (LookupError)       a job has ended, and there is no value of it
    ├── WaitTimeout (TimeoutError)        not all jobs ended in time; `.ids` are open, `.ended` holds the others
    └── EmbeddedError (RuntimeError)      the private PostgreSQL could not be found, started or reached

The signals that a handler raises to steer its own job (`Retry`, `Snooze`, `Discard`, `DeadLetter`) are in
`pgqueue.outcome`: they are answers, not errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgqueue.job import Job
    from pgqueue.result import JobResult


class PgQueueError(Exception):
    """The root of the tree above."""


class ConfigurationError(PgQueueError, ValueError):
    """A setting is missing, unknown, or contradicts another one."""


class UnsupportedConnection(PgQueueError, TypeError):
    """`using=` was given something that pgqueue cannot run statements on."""


class DatabaseUnavailable(PgQueueError):
    """No server answers, or none that accepts writes."""


class SchemaError(PgQueueError):
    """The schema is missing, too old, too new, or was changed by hand."""


class PayloadError(PgQueueError, ValueError):
    """A value cannot travel through JSON unchanged.

    `path` names the place inside the payload, for example ``args[0].photos[3].taken_at``.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class PayloadDecodeError(PgQueueError, ValueError):
    """A stored payload is not what enqueue writes: a JSON list of arguments and an object of keywords."""


class TaskError(PgQueueError):
    """A job cannot be matched with a function."""


class UnknownTask(TaskError, LookupError):
    """No task of that name is registered in this process."""


class DuplicateTask(TaskError, ValueError):
    """Two functions want one task name."""


class ArgumentsDoNotBind(TaskError, TypeError):
    """The arguments do not fit the function's signature."""


class DuplicateJob(PgQueueError, ValueError):
    """`on_conflict="raise"`, and the unique key `key` has the job `job_id` (None: an earlier call of the same bulk).

    Nothing was enqueued by this call. A bulk in a transaction of yours may have begun: roll that, or its savepoint, back.
    """

    def __init__(self, key: str, job_id: int | None) -> None:
        holder = "an earlier call of the same bulk" if job_id is None else f"job {job_id}"
        super().__init__(f"the unique key is taken by {holder}")
        self.key = key
        self.job_id = job_id


class UnknownQueue(PgQueueError, LookupError):
    """An operator named a queue that holds nothing and has no settings."""


class UnknownSchedule(PgQueueError, LookupError):
    """An operator named a schedule that does not exist."""


class UnknownTopic(PgQueueError, LookupError):
    """An operator named a topic that nobody subscribes to and that keeps nothing."""


class UnknownSubscription(PgQueueError, LookupError):
    """A topic has no subscription of that name."""


class LeaseLost(PgQueueError):
    """The token of these jobs is no longer the current one: somebody else owns them, or they are settled.

    Nothing was written for the jobs in `jobs`; what else was in the same call is done.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        ids = ", ".join(str(job.id) for job in jobs[:10]) + (", …" if len(jobs) > 10 else "")
        super().__init__(f"the lease of {len(jobs)} job(s) is lost, nothing was written for them: {ids}")
        self.jobs = tuple(jobs)


class ResultMissing(PgQueueError, LookupError):
    """A job has ended and left no value: it did not complete, keeps no results, or returned what cannot be stored."""

    def __init__(self, job_id: int, why: str) -> None:
        super().__init__(f"job {job_id} has no result: {why}")
        self.id = job_id


class WaitTimeout(PgQueueError, TimeoutError):
    """Not all jobs have ended in time. `ids` are those that are open, `ended` the results of the others, by id."""

    def __init__(self, ids: Sequence[int], ended: Mapping[int, JobResult], seconds: float) -> None:
        shown = ", ".join(map(str, ids[:10])) + (", …" if len(ids) > 10 else "")
        super().__init__(f"{len(ids)} job(s) have not ended within {seconds:g} s: {shown}")
        self.ids = tuple(ids)
        self.ended = dict(ended)


class EmbeddedError(PgQueueError, RuntimeError):
    """The private PostgreSQL could not be found, started or reached."""

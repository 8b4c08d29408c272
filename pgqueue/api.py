"""The names of the package, which loads this when the first of them is asked for."""

from pgqueue.async_client import AsyncBatchTask, AsyncPgQueue, AsyncTask
from pgqueue.batch import Batch, BatchJob
from pgqueue.client import BatchTask, PgQueue, Task
from pgqueue.current import CurrentJob, current_job
from pgqueue.errors import (
    ArgumentsDoNotBind,
    ConfigurationError,
    DatabaseUnavailable,
    DuplicateJob,
    DuplicateTask,
    EmbeddedError,
    LeaseLost,
    PayloadDecodeError,
    PayloadError,
    PgQueueError,
    ResultMissing,
    SchemaError,
    TaskError,
    UnknownQueue,
    UnknownSchedule,
    UnknownSubscription,
    UnknownTask,
    UnknownTopic,
    UnsupportedConnection,
    WaitTimeout,
)
from pgqueue.events import Event, EventName
from pgqueue.job import Job, JobState
from pgqueue.keys import debounce, throttle
from pgqueue.middleware import CopyContext, EnqueueCall, InheritHeaders, Middleware
from pgqueue.ops.dead_letter import DeadLetter as DeadLetterRow
from pgqueue.ops.schedule import Schedule
from pgqueue.ops.topic import Subscription, Topic
from pgqueue.outcome import DeadLetter, Discard, Retry, Snooze
from pgqueue.result import JobResult, Progress
from pgqueue.retry import Delays, Exponential, Fixed, Linear
from pgqueue.rules import ByException
from pgqueue.topic import Published, PublishedMany
from pgqueue.version import __version__

__all__ = [
    "ArgumentsDoNotBind",
    "AsyncBatchTask",
    "AsyncPgQueue",
    "AsyncTask",
    "Batch",
    "BatchJob",
    "BatchTask",
    "ByException",
    "ConfigurationError",
    "CopyContext",
    "CurrentJob",
    "DatabaseUnavailable",
    "DeadLetter",
    "DeadLetterRow",
    "Delays",
    "Discard",
    "DuplicateJob",
    "DuplicateTask",
    "EmbeddedError",
    "EnqueueCall",
    "Event",
    "EventName",
    "Exponential",
    "Fixed",
    "InheritHeaders",
    "Job",
    "JobResult",
    "JobState",
    "LeaseLost",
    "Linear",
    "Middleware",
    "PayloadDecodeError",
    "PayloadError",
    "PgQueue",
    "PgQueueError",
    "Progress",
    "Published",
    "PublishedMany",
    "ResultMissing",
    "Retry",
    "Schedule",
    "SchemaError",
    "Snooze",
    "Subscription",
    "Task",
    "TaskError",
    "Topic",
    "UnknownQueue",
    "UnknownSchedule",
    "UnknownSubscription",
    "UnknownTask",
    "UnknownTopic",
    "UnsupportedConnection",
    "WaitTimeout",
    "__version__",
    "current_job",
    "debounce",
    "throttle",
]

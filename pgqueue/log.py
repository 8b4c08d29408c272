"""The logging subscriber: one event, one line. All wording of the log is here, and nowhere else.

A line holds ids, names, counts and the class of an error: never an argument, never the message of a task's error (it may
repeat an argument), never a URL. Control characters are escaped, so no name can forge a second line.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from pgqueue.events import Bus, Event, EventName
from pgqueue.failure import one_line

logger = logging.getLogger("pgqueue")

Wording = tuple[int, str]
_LINE_BYTES, _FACT_BYTES, _MOST_IDS = 1000, 200, 10
_DEBUG, _INFO, _WARNING, _ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

EVENTS: Final[Mapping[EventName, Wording]] = {
    EventName.JOBS_CLAIMED: (_DEBUG, "claimed jobs {ids}"),
    EventName.JOB_STARTED: (_DEBUG, "job {id} ({task}) started, attempt {attempt}"),
    EventName.BATCH_STARTED: (_DEBUG, "task {task} is called with {count} job(s) of queue {queue}: {ids}"),
    EventName.JOB_OVERDUE: (
        _WARNING,
        "job {id} ({task}) on queue {queue} runs on past its timeout of {timeout} s in a thread of its own; stuck: {stuck}",
    ),
    EventName.JOBS_SETTLED: (_DEBUG, "settled {count} job(s) as {outcome}: {ids}"),
    EventName.JOBS_RELEASED: (_INFO, "gave back {count} job(s) of queue {queue}: {ids}"),
    EventName.LEASE_LOST: (_WARNING, "lost the lease of jobs {ids} ({during}): another worker may run them"),
    EventName.JOB_CANCEL_REQUESTED: (_INFO, "job {id} on queue {queue} was asked to stop"),
    EventName.JOB_SUPERSEDED: (_INFO, "job {id} on queue {queue} is superseded: a newer one waits for its end"),
    EventName.JOBS_RESCUED: (
        _WARNING,
        (
            "rescued jobs of lost workers on queue {queue}: back in line {returned}; dead {dead}; cancelled {cancelled}; "
            "superseded {superseded}"
        ),
    ),
    EventName.JOBS_ADOPTED: (_WARNING, "found jobs on queue {queue} that run under no lease, to be rescued: {ids}"),
    EventName.JOBS_PROMOTED: (_DEBUG, "{count} job(s) of queue {queue} became due"),
    EventName.SCHEDULE_TICKED: (_INFO, "schedule {schedule} ticked: jobs {ids} ({task}) for {tick}, {late} s late"),
    EventName.SCHEDULE_SKIPPED: (_WARNING, "schedule {schedule} made no job for {count} tick(s): {reason}"),
    EventName.SCHEDULE_DEFINED: (_INFO, "wrote the schedules {names} as the code has them"),
    EventName.SCHEDULE_FAILED: (_ERROR, "schedule {schedule} cannot be read here, again in {retry_in} s: {detail}"),
    EventName.SUBSCRIPTION_DEFINED: (_INFO, "wrote the subscriptions {subscriptions} as the code has them"),
    EventName.SUBSCRIPTION_REPLAYED: (
        _INFO,
        "replayed {count} message(s) of topic {topic} for group {group}; done: {done}",
    ),
    EventName.SUBSCRIPTION_CAUGHT_UP: (
        _INFO,
        "{count} message(s) of topic {topic} reached group {group} late: their publish did not see it yet",
    ),
    EventName.TOPIC_ROLLED: (_DEBUG, "topic {topic} was rolled: {count} tables or rows made or dropped"),
    EventName.JOBS_EXPIRED: (_WARNING, "{count} job(s) of queue {queue} were too old to be run: {ids}"),
    EventName.JOBS_AGED: (_DEBUG, "{count} job(s) of queue {queue} moved up by one priority"),
    EventName.JOBS_CANCELLED: (_INFO, "cancelled {cancelled} waiting job(s), asked {requested} running ones to stop"),
    EventName.QUEUE_PAUSED: (_INFO, "queue {queue} is paused (task: {task}) until {until}"),
    EventName.QUEUE_RESUMED: (_INFO, "queue {queue} is resumed (task: {task})"),
    EventName.QUEUE_LIMIT_SET: (
        _INFO,
        "the limit of queue {queue}, - for none: {running} at once, {rate} starts a second in bursts of {burst}",
    ),
    EventName.QUEUE_LIMITED: (
        _INFO,
        "jobs of queue {queue} wait for its limit ({bound}): {running} at once, {rate} starts a second in bursts of {burst}",
    ),
    EventName.TASK_POLICY_FAILED: (
        _WARNING,
        "the retry policy of task {task} failed for job {id} on queue {queue} ({error}): its stored policy decides",
    ),
    EventName.JOBS_FOLLOWED: (_DEBUG, "jobs of queue {queue} follow the one of their key that has ended: {ids}"),
    EventName.TASK_CIRCUIT_OPENED: (
        _WARNING,
        "holding back task {task} of queue {queue}: {failures} attempts in a row failed with {reason}; next in {pause} s",
    ),
    EventName.TASK_CIRCUIT_CLOSED: (
        _INFO,
        "task {task} of queue {queue} works again after {seconds} s: its jobs are claimed again",
    ),
    EventName.WORKER_POOLED: (_INFO, "worker {worker} is behind a pooler; it listens for notifications: {listens}"),
    EventName.WORKER_STARTED: (_INFO, "worker {worker} started: queues {queues}; concurrency {concurrency}"),
    EventName.WORKER_STOPPING: (_INFO, "worker {worker} is stopping and holds {held} job(s)"),
    EventName.WORKER_STOPPED: (_INFO, "worker {worker} stopped after {seconds} s; it settled {settled} job(s)"),
    EventName.WORKER_FAILED: (_ERROR, "worker {worker} leaves, its {loop} loop is broken: {error}: {detail}"),
    EventName.WORKER_STUCK: (
        _ERROR,
        "worker {worker} leaves, {stuck} threads are stuck past their timeout: no more can be replaced",
    ),
    EventName.WORKER_UNFIT: (
        _ERROR,
        "worker {worker} leaves: {failures} failures in {seconds} s, now with {reason}; others complete jobs of {queues}",
    ),
    EventName.LOOP_FAILED: (_WARNING, "the {loop} loop failed, again in {retry_in} s: {error}: {detail}"),
    EventName.LOOP_RECOVERED: (_INFO, "the {loop} loop works again after {failures} failure(s)"),
    EventName.RESULT_MISSING: (
        _WARNING,
        "the result of job {id} ({task}) on queue {queue} cannot be stored, its work is done: see `pgqueue result {id}`",
    ),
    EventName.SETTLE_ABANDONED: (_ERROR, "could not store the outcome of jobs {ids}: they will run again"),
}
ATTEMPTS: Final[Mapping[str, Wording]] = {
    "retry": (
        _WARNING,
        "job {id} ({task}) on queue {queue} failed with {error} in attempt {attempt}, again in {delay} s",
    ),
    "dead": (_ERROR, "job {id} ({task}) on queue {queue} failed with {error} in attempt {attempt}: dead letter"),
    "snooze": (_INFO, "job {id} ({task}) on queue {queue} snoozes for {delay} s"),
    "discard": (_INFO, "job {id} ({task}) on queue {queue} was discarded by its task"),
    "release": (_INFO, "job {id} ({task}) on queue {queue} ended with {error} after it was asked to stop"),
    "completed": (
        _WARNING,
        "job {id} ({task}) on queue {queue} ended with {error} after its transaction was committed: it is completed",
    ),
}
_UNKNOWN: Final[Wording] = (_INFO, "{event}")
_LEVELS: Final[Mapping[EventName, int]] = {
    **{name: level for name, (level, _) in EVENTS.items()},
    EventName.JOB_FAILED: max(level for level, _ in ATTEMPTS.values()),
}
"""The highest level at which an event of this name may be logged."""

# What the processes around a worker say; these are no changes of a job's state, so no events.
STOP_REQUESTED: Final[Wording] = (_INFO, "asked to stop: finishing what runs, a second request gives it back at once")
STOP_NOW: Final[Wording] = (_WARNING, "asked to stop again: giving back what runs")
NO_CHILDREN: Final[Wording] = (
    _WARNING,
    "worker {worker} has no child processes, for want of {missing}: jobs that were lost run in threads like the others",
)
STOPPED_EARLY: Final[Wording] = (_INFO, "stopped before it had started")
PARENT_GONE: Final[Wording] = (_WARNING, "the parent process is gone: stopping")
PROCESS_STARTED: Final[Wording] = (_INFO, "parent {parent}: process {number} started with pid {pid}")
PROCESS_LEFT: Final[Wording] = (_INFO, "parent {parent}: process {number} (pid {pid}) left with {status}")
PROCESS_DIED: Final[Wording] = (
    _ERROR,
    "parent {parent}: process {number} (pid {pid}) ended with {status}, its successor starts in {pause} s",
)
PROCESSES_GIVEN_UP: Final[Wording] = (_ERROR, "parent {parent}: process {number} cannot start: giving up")


def subscribe_logging(bus: Bus, to: logging.Logger = logger) -> Callable[[], None]:
    """Log every event of `bus` to `to`; returns the function that ends it. Handlers and levels are the host's affair."""

    def write(event: Event) -> None:
        level, text = _wording(event)
        if to.isEnabledFor(level):
            to.log(level, "%s", _line(text, {"event": event.name, **event.facts}))

    return bus.subscribe(write, wants=lambda name: to.isEnabledFor(_LEVELS.get(name, _WARNING)))


def say(wording: Wording, **facts: Any) -> None:
    """Log a line that belongs to no event."""
    level, text = wording
    logger.log(level, "%s", _line(text, facts))


def _wording(event: Event) -> Wording:
    if event.name is EventName.JOB_FAILED:
        return ATTEMPTS.get(str(event.facts.get("outcome")), ATTEMPTS["retry"])
    return EVENTS.get(event.name, _UNKNOWN)


def _line(text: str, facts: Mapping[str, Any]) -> str:
    return one_line(text.format_map(_Shown(facts)), _LINE_BYTES)


class _Shown(dict[str, Any]):
    """Facts as text; one that is missing must not cost the line."""

    def __missing__(self, key: str) -> str:
        return "-"

    def __getitem__(self, key: str) -> str:
        return _show(super().__getitem__(key))


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    if isinstance(value, (list, tuple, set, frozenset)):
        shown = [_show(item) for item in list(value)[:_MOST_IDS]]
        more = f" and {len(value) - _MOST_IDS} more" if len(value) > _MOST_IDS else ""
        return ", ".join(shown) + more if shown else "none"
    return one_line(str(value), _FACT_BYTES)

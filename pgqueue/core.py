"""What PgQueue and AsyncPgQueue share: settings, registry, hints, and the making of operations.

Nothing here touches a connection. The two clients add one line a method: run this operation, in their colour.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from pgqueue import failure, payload
from pgqueue import retry as retry_policies
from pgqueue.config import (
    Settings,
    load_settings,
    shown,
    validate_count,
    validate_duration,
    validate_name,
    validate_seconds,
)
from pgqueue.controls import Controls, as_ids
from pgqueue.current import settles_itself
from pgqueue.errors import ConfigurationError, LeaseLost
from pgqueue.events import Bus, EventName
from pgqueue.job import Job
from pgqueue.keys import PARK, key_of, lane_of, width_of
from pgqueue.limit import Limit
from pgqueue.middleware import Chain, EnqueueCall, Middleware
from pgqueue.ops import Op
from pgqueue.ops import admission as admission_ops
from pgqueue.ops import claim as claim_ops
from pgqueue.ops import enqueue as enqueue_ops
from pgqueue.ops import keyed as keyed_ops
from pgqueue.ops import limit as limit_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import result as result_ops
from pgqueue.ops import settle as settle_ops
from pgqueue.ops import unique as unique_ops
from pgqueue.ops.dead_letter import Selection
from pgqueue.outcome import Failed, Outcome, OutcomeKind, decide
from pgqueue.rules import stored_json, stored_policy
from pgqueue.schedule import Definition
from pgqueue.task import BaseTask, Calls, Registry, TaskOptions, in_seconds, split_call, task_name
from pgqueue.topic import Definition as SubscriptionDefinition

T = TypeVar("T")
Jobs = Job | Iterable[Job]
MAINTENANCE_PERIOD = 1.0
ADMISSIONS = 8
"""In one claim, while they bring nothing."""
SOON = 5.0
"""Jobs that are due within this many seconds are announced: workers look for due jobs less often than that."""


def as_jobs(jobs: Jobs) -> list[Job]:
    """A list, whether one job was given or several."""
    return [jobs] if isinstance(jobs, Job) else list(jobs)


def selection(queue: str | None, task: str | None, ids: int | Iterable[int] | None) -> Selection:
    """Which dead letters an operator means."""
    return Selection(queue=queue, task=task, ids=None if ids is None else as_ids(ids))


class Core(Controls):
    """See the module. `settings`, `tasks` (the registry) and `events` are public on both clients.

    `home`: the module that a child process of a worker imports first; None for the one in which this object has its name,
    "" for the one that --app says: only there it is complete.
    """

    home: str | None = None

    def __init__(self, database_url: str | None = None, **options: Any) -> None:
        self.settings: Settings = load_settings({"database_url": database_url, **options})
        self.tasks = Registry()
        self.code_schedules: dict[str, Definition] = {}
        self.code_limits: dict[str, Limit] = {}
        self.code_subscriptions: dict[tuple[str, str], SubscriptionDefinition] = {}
        self.events = Bus()
        self.chain = Chain()
        self._low_water: dict[str, claim_ops.LowWater] = {}
        self._maintained: dict[str, float] = {}
        self._marks: dict[str, admission_ops.AdmissionMark] = {}
        self._limited: set[str] = set()

    def middleware(self, middleware: Middleware) -> None:
        """Wrap this around every enqueue and every run of the tasks of this object; see Middleware.

        Children of a worker know what was registered when the application was imported.
        """
        self.chain.add(middleware)

    def watch(self, ids: int | Iterable[int], timeout: float | timedelta | None) -> result_ops.Watch:
        """Waiting for the end of these jobs."""
        return result_ops.Watch(as_ids(ids), None if timeout is None else validate_duration("timeout", timeout))

    def registered(self, function: Sequence[Any], options: dict[str, Any], plain: Any, batch: Any) -> Any:
        """What the decorator `task` is: `plain` or `batch` makes the task."""
        name, aliases = options.pop("name", None), options.pop("aliases", ())

        def register(function: Any) -> Any:
            chosen = TaskOptions().changed(options)
            kind = plain if chosen.batch is None else batch
            task = kind(self, function, name or task_name(function), chosen)
            self.tasks.add(task, aliases)
            return task

        return register(*function) if function else register

    # Enqueue

    def envelope(self, name: str, options: TaskOptions, retry_json: str | None) -> enqueue_ops.Envelope:
        """Everything about a job but its arguments, encoded."""
        delay = options.delay_seconds
        headers = options.headers
        soon = options.run_at is None and (delay is None or delay <= SOON)
        return enqueue_ops.Envelope(
            queue=options.queue,
            task=name,
            priority=options.priority,
            max_attempts=options.max_attempts,
            delay=delay,
            run_at=options.run_at,
            timeout=options.timeout,
            retry=retry_json,
            headers=None
            if headers is None
            else payload.encode_object("headers", headers, max_bytes=self.settings.max_payload_bytes),
            channel=self.channel if soon else None,
            prefix="due " if delay else "key " if width_of(options) else "",
            has_keys=options.has_keys or options.expires_in is not None,
            lane_rank=None if options.concurrency_key is None and options.fairness_key is None else -options.priority,
            lane_width=width_of(options),
            park=True if options.on_dead == PARK else None,
            expires_in=options.expires_seconds,
            on_conflict=options.on_conflict,
            unique_for=in_seconds(options.unique_for),
            delay_limit=in_seconds(options.delay_limit),
            alert=self.channel,
            archive=self.settings.archive,
        )

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> enqueue_ops.Call:
        """The arguments as JSON texts; PayloadError names what cannot travel."""
        return payload.encode_call(args, kwargs, max_bytes=self.settings.max_payload_bytes)

    def enqueue_op(
        self, task: BaseTask[..., Any], options: TaskOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Op[int]:
        """One job of a registered task. Everything is checked before the operation exists."""
        task.check(args, kwargs)
        if self.chain.enqueues:
            options = self._wrapped(task.name, options, args, kwargs)
        envelope = self._envelope(task, options)
        if envelope.has_keys:
            return self._enqueue_keyed(envelope, options, args, kwargs)
        return enqueue_ops.enqueue(envelope, self.call(args, kwargs))

    def enqueue_many_op(
        self, task: BaseTask[..., Any], options: TaskOptions, calls: Calls
    ) -> tuple[Op[list[int]], bool]:
        """Any number of jobs of a registered task, and whether they need more than one statement and so a transaction.

        Two chunks of `calls` are read here, the rest as the chunks go out.
        """
        if self.chain.enqueues:
            options = self._wrapped(task.name, options, None, None)
        envelope = self._envelope(task, options)
        if envelope.has_keys:
            keyed = keyed_ops.enqueue_keyed if options.unique_key is None else unique_ops.enqueue_keyed
            return keyed(envelope, self._keyed_calls(task, options, calls)), True
        chunks = enqueue_ops.chunked(self._calls(task, calls))
        first = list(itertools.islice(chunks, 2))
        return enqueue_ops.enqueue_many(envelope, itertools.chain(first, chunks)), len(first) > 1

    def enqueue_named_op(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Op[int]:
        """One job by the name of its task, which need not be registered in this process."""
        validate_name("task", name)
        task = self.tasks.get(name)
        if task is not None:
            return self.enqueue_op(task, task.defaults.for_call(options), args, kwargs)
        chosen = TaskOptions().for_call(options)
        if self.chain.enqueues:
            chosen = self._wrapped(name, chosen, args, kwargs)
        envelope = self.envelope(name, chosen, stored_json(chosen.retry))
        if envelope.has_keys:
            return self._enqueue_keyed(envelope, chosen, args, kwargs)
        return enqueue_ops.enqueue(envelope, self.call(args, kwargs))

    def _enqueue_keyed(
        self, envelope: enqueue_ops.Envelope, options: TaskOptions, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Op[int]:
        keyed = keyed_ops.enqueue_one if options.unique_key is None else unique_ops.enqueue_one
        return keyed(envelope, self.keyed_call(options, args, kwargs))

    def keyed_call(self, options: TaskOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> keyed_ops.KeyedCall:
        """The arguments as JSON texts, and the keys of this call."""
        unique_key = key_of("unique_key", options.unique_key, args, kwargs)
        return keyed_ops.KeyedCall(self.call(args, kwargs), unique_key, lane_of(options, args, kwargs))

    def _keyed_calls(
        self, task: BaseTask[..., Any], options: TaskOptions, calls: Calls
    ) -> Iterator[keyed_ops.KeyedCall]:
        for given in calls:
            args, kwargs = split_call(given)
            task.check(args, kwargs)
            yield self.keyed_call(options, args, kwargs)

    def _wrapped(
        self, name: str, options: TaskOptions, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> TaskOptions:
        """The options with the headers that middleware wants; what it raises refuses the enqueue."""
        given = dict(options.headers or {})
        call = EnqueueCall(task=name, queue=options.queue, args=args, kwargs=kwargs, headers=dict(given))
        for middleware in self.chain.enqueues:
            middleware.enqueue(call)
        return options if call.headers == given else dataclasses.replace(options, headers=call.headers)

    def _calls(self, task: BaseTask[..., Any], calls: Calls) -> Iterator[enqueue_ops.Call]:
        for given in calls:
            args, kwargs = split_call(given)
            task.check(args, kwargs)
            yield self.call(args, kwargs)

    def _envelope(self, task: BaseTask[..., Any], options: TaskOptions) -> enqueue_ops.Envelope:
        if options is not task.defaults or options.headers is not None:  # headers are the caller's, and may change
            return self.envelope(task.name, options, self._retry_json(task, options))
        if task.envelope is None:
            task.envelope = self.envelope(task.name, options, task.retry_json)
        envelope: enqueue_ops.Envelope = task.envelope
        return envelope

    def _retry_json(self, task: BaseTask[..., Any], options: TaskOptions) -> str | None:
        if options.retry == task.defaults.retry:
            return task.retry_json
        return retry_policies.to_json(stored_policy(options.retry))

    # Claim and settle

    def claim_op(self, queues: Sequence[str], *, limit: int, lease: float, own: bool) -> Op[list[Job]]:
        """Claim from these queues in order. On our own connection, rescue and promotion run along, once a second."""
        names = [queues] if isinstance(queues, str) else list(queues)
        for name in names:
            validate_name("queue", name)
        validate_count("limit", limit, most=10_000)
        validate_seconds("lease", lease, least=0.1)
        return self._claim(names, limit, lease, own)

    def _claim(self, queues: Sequence[str], limit: int, lease: float, own: bool) -> Op[list[Job]]:
        taken: list[Job] = []
        for queue in queues:
            if len(taken) == limit:
                break
            try:
                due = own and self._maintenance_due(queue)
                if due:
                    yield from rescue_ops.rescue(queue, archive=self.settings.archive, channel=self.channel)
                    yield from self.expire_op(queue)
                    yield from unique_ops.follow(queue, archive=self.settings.archive)
                    yield from rescue_ops.promote(queue, channel=None)
                taken += yield from self._claim_from(queue, limit - len(taken), lease, own, due)
            except Exception as error:
                if taken and (own or isinstance(error, ConfigurationError)):
                    break  # what is claimed already is committed, or the caller's: it must reach its caller
                raise
        if taken:
            self.events.emit(EventName.JOBS_CLAIMED, ids=[job.id for job in taken])
        return taken

    def _claim_from(self, queue: str, limit: int, lease: float, own: bool, due: bool) -> Op[list[Job]]:
        jobs = yield from self._take(queue, limit, lease, own)
        if own and (len(jobs) < limit or due):
            # Never in a caller's transaction, which would keep the lanes locked until its end. And once a second although
            # enough was there, or jobs with keys would wait until there is nothing else.
            try:
                admitted = yield from self._admit(queue, limit)
                if admitted and len(jobs) < limit:
                    self._hint(queue).notified()
                    jobs += yield from self._take(queue, limit - len(jobs), lease, own)
            except Exception:
                if not jobs:
                    raise  # what is claimed already is committed: it must reach its caller
        return jobs

    def _take(self, queue: str, limit: int, lease: float, own: bool) -> Op[list[Job]]:
        """The plain claim brings nothing of a queue that is limited, so only where it came back empty is that asked."""
        hint = self._hint(queue)
        if not own or queue not in self._limited:
            jobs = yield from claim_ops.claim(queue, limit, lease=lease, low_water=hint, relaxed=own)
            if jobs or not (yield from limit_ops.is_limited(queue)):
                return jobs
            if not own:
                raise ConfigurationError(
                    f"queue {shown(queue)} is limited: claim from it without using=, since the lock of its limit would last "
                    "until the end of your transaction"
                )
            self._limited.add(queue)
            hint.notified()  # nothing was looked at
        granted = yield from limit_ops.claim(queue, limit, free=limit, lease=lease, low_water=hint)
        if not granted.limited:
            self._limited.discard(queue)
        return granted.jobs

    def _admit(self, queue: str, room: int) -> Op[int]:
        mark = self._marks.setdefault(queue, admission_ops.AdmissionMark(share=0))
        for _ in range(ADMISSIONS):
            admitted = yield from admission_ops.admit(queue, mark, room=room, channel=self.channel)
            if admitted.jobs or not admitted.more:
                break
        return admitted.jobs

    def _hint(self, queue: str) -> claim_ops.LowWater:
        return self._low_water.setdefault(queue, claim_ops.LowWater(share=0))

    def _maintenance_due(self, queue: str) -> bool:
        now = time.monotonic()
        if now < self._maintained.get(queue, 0.0):
            return False
        self._maintained[queue] = now + MAINTENANCE_PERIOD
        return True

    def settle_op(self, jobs: Jobs, outcome: Callable[[Job], Outcome]) -> Op[None]:
        """Settle jobs of any queues; LeaseLost, after everything else is written, for those that are not ours any more."""
        return self._settle(as_jobs(jobs), outcome)

    def _settle(self, jobs: Sequence[Job], outcome: Callable[[Job], Outcome]) -> Op[None]:
        lost: list[Job] = []
        options = dataclasses.replace(self.settle_options, lanes_channel=self.channel)
        own = settles_itself(jobs)
        for queue, members in by_queue(jobs).items():
            pairs = [(job, outcome(job)) for job in members]
            settled = yield from settle_ops.settle(
                queue, pairs, finished={job.token for job in members}, options=options
            )
            lost += settled.lost
            for one in own if settled.freed else ():
                one.frees = one.frees or one.queue == queue
        gone = {(job.id, job.token) for job in lost} if own else set()
        for one in own:
            if (one.id, one.token) in gone:
                one.leave_block()
        count = len(jobs) - len(lost)
        if count:
            self.events.emit(EventName.JOBS_SETTLED, count=count)
        self._raise_lost(lost)

    def extend_op(self, jobs: Jobs, lease: float | timedelta) -> Op[None]:
        """Extend the leases of these jobs; LeaseLost for those that are not ours any more."""
        return self._extend(as_jobs(jobs), validate_duration("lease", lease, least=0.1))

    def _extend(self, jobs: Sequence[Job], lease: float) -> Op[None]:
        lost: list[Job] = []
        for queue, members in by_queue(jobs).items():
            # One id may come with an old and a new token; the statement compares by place.
            newest = {job.id: job for job in sorted(members, key=lambda job: job.token)}
            held = yield from claim_ops.extend(queue, [(job.id, job.token) for job in newest.values()], lease=lease)
            lost += [job for job in members if job.id not in held or newest[job.id].token != job.token]
        self._raise_lost(lost)

    def _raise_lost(self, lost: Sequence[Job]) -> None:
        if lost:
            self.events.emit(EventName.LEASE_LOST, ids=[job.id for job in lost])
            raise LeaseLost(lost)


def failed(
    error: BaseException | str, delay: float | timedelta | None, random: Callable[[], float]
) -> Callable[[Job], Outcome]:
    """The outcome of a failed attempt: a retry by the job's own policy (or after `delay`), or the dead letters."""
    exception = error if isinstance(error, BaseException) else Failed(failure.clean(str(error), 2048))
    wait = None if delay is None else validate_duration("delay", delay)

    def outcome(job: Job) -> Outcome:
        decided = decide(job, exception, random=random())
        if wait is not None and decided.kind is OutcomeKind.RETRY:
            return dataclasses.replace(decided, delay=wait)
        return decided

    return outcome


def snoozed(delay: float | timedelta) -> Outcome:
    """Later, without an attempt burned."""
    return Outcome(kind=OutcomeKind.SNOOZE, delay=validate_duration("delay", delay))


def by_queue(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    """Jobs by queue: every statement names one."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.queue, []).append(job)
    return groups

"""What both clients can do with topics: a line a method, in their colour; and the decorator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from pgqueue import payload
from pgqueue import retry as retry_policies
from pgqueue.config import validate_name
from pgqueue.core import Core
from pgqueue.errors import ConfigurationError
from pgqueue.events import Bus, EventName
from pgqueue.keys import CONTINUE, Key, key_of, validate_key
from pgqueue.middleware import EnqueueCall
from pgqueue.ops import Op
from pgqueue.ops import publish as publish_ops
from pgqueue.ops import replay as replay_ops
from pgqueue.ops import topic as ops
from pgqueue.ops.topic import Subscription, Topic
from pgqueue.retry import DEFAULT_POLICY
from pgqueue.rules import stored_policy
from pgqueue.task import LANE_KEYS, BaseTask, Calls, TaskOptions, split_call
from pgqueue.topic import NEW, Definition, Published, PublishedMany, Start, validate_kept, validate_start

T = TypeVar("T")
TaskT = TypeVar("TaskT", bound=BaseTask[..., Any])
_STORED = ("queue", "task", "priority", "max_attempts", "timeout", "retry", "headers")


class Topics(Core):
    """What needs no connection."""

    def subscriber(
        self,
        topic: str,
        *,
        group: str | None = None,
        start: Start = NEW,
        ordered: bool = False,
        on_dead: str = CONTINUE,
    ) -> Callable[[TaskT], TaskT]:
        """Have the task below run for every message of `topic`; otherwise as PgQueue.subscribe.

        Workers write it to the database when they start. ConfigurationError, here and now, for what cannot be.
        """

        def register(task: TaskT) -> TaskT:
            if not isinstance(task, BaseTask):
                raise ConfigurationError("pq.subscriber stands above pq.task: what it is given is not a task yet")
            definition = self._subscription(
                topic, task, group, start=start, ordered=ordered, on_dead=on_dead, options={}
            )
            key = (definition.topic, definition.group)
            known = self.code_subscriptions.get(key)
            if known is not None and known != definition:
                raise ConfigurationError(f"two subscriptions of topic {topic!r} are named {key[1]!r}: give group=…")
            self.code_subscriptions[key] = definition
            return task

        return register

    def _subscription(
        self,
        topic: str,
        task: str | BaseTask[..., Any],
        group: str | None,
        *,
        start: Start,
        ordered: bool,
        on_dead: str,
        options: Mapping[str, Any],
    ) -> Definition:
        if isinstance(task, BaseTask):
            known: BaseTask[..., Any] | None = task
            name = task.name
        else:
            known = self.tasks.get(validate_name("task", task))
            name = task if known is None else known.name  # not the old name of a renamed task
        chosen = (known.defaults if known is not None else TaskOptions()).for_call(options)
        return Definition(
            topic=topic,
            group=name if group is None else group,
            ordered=ordered,
            on_dead=on_dead,
            start=start,
            job=self._subscribed(name, known, chosen),
        )

    def _subscribed(self, name: str, task: BaseTask[..., Any] | None, options: TaskOptions) -> Mapping[str, Any]:
        if options.delay is not None or options.run_at is not None:
            raise ConfigurationError("a message is for now: leave out delay and run_at")
        if any(getattr(options, key) is not None for key in LANE_KEYS):
            raise ConfigurationError(
                f"task {name} has a key of its own, and of a message the one that it was published with counts: "
                "subscribe a task without, with ordered=True"
            )
        if task is not None:
            retry_json = self._retry_json(task, options)
        else:
            policy = stored_policy(options.retry)
            retry_json = None if policy == DEFAULT_POLICY else retry_policies.to_json(policy)
        params = self.envelope(name, options, retry_json).params
        return {**{part: params[part] for part in _STORED}, "expires_in": options.expires_seconds}

    def _publish(
        self, topic: str, args: Sequence[Any], kwargs: Mapping[str, Any], key: Any, headers: Mapping[str, Any] | None
    ) -> Op[Published]:
        message = self._message(args, kwargs, key)
        return publish_ops.publish(self._message_envelope(topic, args, kwargs, headers), message)

    def _publish_many(
        self, topic: str, calls: Calls, key: Any, headers: Mapping[str, Any] | None
    ) -> tuple[Op[PublishedMany], bool]:
        envelope = self._message_envelope(topic, None, None, headers)
        chunks = publish_ops.chunked(self._messages(calls, key))
        first = list(itertools.islice(chunks, 2))
        return publish_ops.publish_many(envelope, itertools.chain(first, chunks)), len(first) > 1

    def _messages(self, calls: Calls, key: Any) -> Iterator[publish_ops.Message]:
        for given in calls:
            args, kwargs = split_call(given)
            yield self._message(args, kwargs, key)

    def _message(self, args: Sequence[Any], kwargs: Mapping[str, Any], key: Any) -> publish_ops.Message:
        made = key_of("key", key, args, kwargs)
        return publish_ops.Message(self.call(args, kwargs), None if made is None else validate_key("key", made))

    def _message_envelope(
        self,
        topic: str,
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        headers: Mapping[str, Any] | None,
    ) -> publish_ops.Envelope:
        validate_name("topic", topic)
        if headers is not None and not isinstance(headers, Mapping):
            raise ConfigurationError("headers must be a mapping")
        call = EnqueueCall(task="", queue="", args=args, kwargs=kwargs, headers=dict(headers or {}), topic=topic)
        for middleware in self.chain.enqueues:
            middleware.enqueue(call)
        most = self.settings.max_payload_bytes
        told = payload.encode_object("headers", {**call.headers, "topic": topic}, max_bytes=most)
        return publish_ops.Envelope(
            topic=topic,
            headers=payload.encode_object("headers", call.headers, max_bytes=most),
            told=told or "{}",
            channel=self.channel,
        )

    def _tend(self, topic: str | None) -> Op[int]:
        """What a worker does for topics, until there is nothing more to do now."""
        made = 0
        for due in (yield from replay_ops.agenda(now=True)).due:
            if topic not in (None, due.topic):
                continue
            turn = yield from replay_ops.turn(due.topic, channel=self.channel)
            made += tell_turn(self.events, due.topic, turn)
            while turn.replayed is not None:
                turn = yield from replay_ops.turn(due.topic, channel=self.channel)
                made += tell_turn(self.events, due.topic, turn)
            tell_roll(self.events, due.topic, (yield from replay_ops.roll(due.topic)))
        yield from replay_ops.forget()
        return made


def tell_turn(events: Bus, topic: str, turn: replay_ops.Turn) -> int:
    """Emit what a turn came to; returns how many jobs it made."""
    for group, count in turn.late.items():
        events.emit(EventName.SUBSCRIPTION_CAUGHT_UP, topic=topic, group=group, count=count)
    piece = turn.replayed
    if piece is not None:
        facts = {"group": piece.group, "count": piece.jobs, "done": piece.done}
        events.emit(EventName.SUBSCRIPTION_REPLAYED, topic=topic, **facts)
    return sum(turn.late.values()) + (0 if piece is None else piece.jobs)


def tell_roll(events: Bus, topic: str, changed: int) -> None:
    """Emit what a roll came to."""
    if changed:
        events.emit(EventName.TOPIC_ROLLED, topic=topic, count=changed)


class SyncTopics(Topics):
    """The methods of PgQueue."""

    if TYPE_CHECKING:

        def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T: ...

    def publish(
        self,
        topic: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: Key | None = None,
        headers: Mapping[str, Any] | None = None,
        using: Any = None,
    ) -> Published:
        """One job in the queue of every subscription of `topic`, with these arguments; in the transaction of `using`.

        `key`: of messages with one key, subscriptions that are `ordered` run one at a time, in order; text, or a function of
        the arguments. Returns how many jobs there are, and the message's id where the topic keeps its messages. A topic
        that nobody knows is no error: nothing happens.
        """
        return self.run(self._publish(topic, args, kwargs or {}, key, headers), using)

    def publish_many(
        self,
        topic: str,
        calls: Calls,
        *,
        key: Key | None = None,
        headers: Mapping[str, Any] | None = None,
        using: Any = None,
    ) -> PublishedMany:
        """Publish many messages, all or nothing; `calls` are tuples of positional arguments or mappings of keywords, also
        from a generator, which is read in chunks."""
        op, atomic = self._publish_many(topic, calls, key, headers)
        return self.run(op, using, atomic=atomic)

    def subscribe(
        self,
        topic: str,
        task: str | BaseTask[..., Any],
        *,
        group: str | None = None,
        start: Start = NEW,
        ordered: bool = False,
        on_dead: str = CONTINUE,
        using: Any = None,
        **options: Any,
    ) -> bool:
        """From now on every publish to `topic` makes a job of this task. `group`: the name of the subscription, else the
        task's; each has its own queue, retries, order and dead letters. `options` are those of the jobs, `queue` among them.

        `start`: "new", or of the messages that the topic keeps "beginning", an aware datetime, or the id of a message; these
        are replayed in pieces by whatever worker comes first. `ordered`: the key of a message becomes the ordering key of
        the job, and while a replay is under way new messages wait behind it.

        A group that is there gets the new options and stays where it is; False when it is the same already.
        """
        definition = self._subscription(
            topic, task, group, start=start, ordered=ordered, on_dead=on_dead, options=options
        )
        return self.run(ops.subscribe(definition, channel=self.channel), using, atomic=True)

    def unsubscribe(self, topic: str, group: str, *, using: Any = None) -> None:
        """Make no more jobs for this group. What waits stays, and runs; `cancel_all(queue=…)` is there. UnknownSubscription,
        and ConfigurationError while live workers have it in their code."""
        self.run(ops.unsubscribe(topic, group), using, atomic=True)

    def reset_subscription(self, topic: str, group: str, start: Start = "beginning", *, using: Any = None) -> None:
        """Replay the messages that the topic keeps from there once more; "new": end a replay that is under way, and pass
        over what it has not come to.

        Jobs that wait are not touched, so what is among them comes twice.
        """
        self.run(ops.reset(topic, group, validate_start(start), channel=self.channel), using, atomic=True)

    def keep_topic(
        self, topic: str, *, count: int | None = None, age: float | timedelta | None = None, using: Any = None
    ) -> None:
        """Keep the messages that are published from now on: the last `count` of them, for `age` seconds, or what is within
        both; neither: none, and those that are there are dropped. Whole tables go, so about a quarter more is kept."""
        op = ops.keep(validate_name("topic", topic), *validate_kept(count, age), channel=self.channel)
        self.run(op, using, atomic=True)

    def topics(self) -> list[Topic]:
        """Every topic that has, or lately had, a subscription, or keeps messages."""
        return self.run(ops.topics())

    def subscriptions(self, topic: str | None = None) -> list[Subscription]:
        """The subscriptions of a topic, or of all."""
        return self.run(ops.subscriptions(topic))

    def tend_topics(self, topic: str | None = None) -> int:
        """Replay what is to be replayed, look for late messages and trim, now, for all topics or this one; workers do this
        every few seconds. Returns how many jobs were made."""
        return self.run(self._tend(topic))


class AsyncTopics(Topics):
    """The methods of AsyncPgQueue."""

    if TYPE_CHECKING:

        async def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T: ...

    async def publish(
        self,
        topic: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: Key | None = None,
        headers: Mapping[str, Any] | None = None,
        using: Any = None,
    ) -> Published:
        """As PgQueue.publish."""
        return await self.run(self._publish(topic, args, kwargs or {}, key, headers), using)

    async def publish_many(
        self,
        topic: str,
        calls: Calls,
        *,
        key: Key | None = None,
        headers: Mapping[str, Any] | None = None,
        using: Any = None,
    ) -> PublishedMany:
        """As PgQueue.publish_many."""
        op, atomic = self._publish_many(topic, calls, key, headers)
        return await self.run(op, using, atomic=atomic)

    async def subscribe(
        self,
        topic: str,
        task: str | BaseTask[..., Any],
        *,
        group: str | None = None,
        start: Start = NEW,
        ordered: bool = False,
        on_dead: str = CONTINUE,
        using: Any = None,
        **options: Any,
    ) -> bool:
        """As PgQueue.subscribe."""
        definition = self._subscription(
            topic, task, group, start=start, ordered=ordered, on_dead=on_dead, options=options
        )
        return await self.run(ops.subscribe(definition, channel=self.channel), using, atomic=True)

    async def unsubscribe(self, topic: str, group: str, *, using: Any = None) -> None:
        """As PgQueue.unsubscribe."""
        await self.run(ops.unsubscribe(topic, group), using, atomic=True)

    async def reset_subscription(
        self, topic: str, group: str, start: Start = "beginning", *, using: Any = None
    ) -> None:
        """As PgQueue.reset_subscription."""
        await self.run(ops.reset(topic, group, validate_start(start), channel=self.channel), using, atomic=True)

    async def keep_topic(
        self, topic: str, *, count: int | None = None, age: float | timedelta | None = None, using: Any = None
    ) -> None:
        """As PgQueue.keep_topic."""
        op = ops.keep(validate_name("topic", topic), *validate_kept(count, age), channel=self.channel)
        await self.run(op, using, atomic=True)

    async def topics(self) -> list[Topic]:
        """As PgQueue.topics."""
        return await self.run(ops.topics())

    async def subscriptions(self, topic: str | None = None) -> list[Subscription]:
        """As PgQueue.subscriptions."""
        return await self.run(ops.subscriptions(topic))

    async def tend_topics(self, topic: str | None = None) -> int:
        """As PgQueue.tend_topics."""
        return await self.run(self._tend(topic))

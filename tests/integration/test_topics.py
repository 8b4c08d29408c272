"""Topics: a publish, in the caller's transaction, makes a job for every subscription, each with a life of its own."""

from __future__ import annotations

import datetime
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.errors import ConfigurationError, PayloadError, UnknownSubscription, UnknownTopic
from tests.callers import OPENERS, open_caller
from tests.topics import Admin, messages, reached, state, subscribe
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count


def test_a_publish_makes_one_job_for_every_subscription_with_its_own_options(pq: pgqueue.PgQueue, admin: Admin) -> None:
    def task(number: int) -> None: ...

    options: dict[str, Any] = {"queue": "mail", "priority": 7, "max_attempts": 3, "timeout": 5.0}
    known = pq.task(name="send", retry=pgqueue.Fixed(9), headers={"origin": "shop"}, **options)(task)
    assert pq.subscribe("orders", known)
    assert pq.subscribe("orders", "elsewhere.index", group="search", queue="index", expires_in=60)
    assert pq.publish("orders", [1], {"more": 2}) == pgqueue.Published(2, None)
    [mail] = pq.claim("mail")
    assert (mail.task, mail.args, mail.kwargs, mail.priority) == ("send", [1], {"more": 2}, 7)
    assert (mail.max_attempts, mail.timeout, mail.retry_json) == (3, 5.0, '{"kind":"fixed","delay":9.0}')
    assert mail.headers == {"origin": "shop", "topic": "orders"}
    [index] = pq.claim("index")
    assert (index.task, index.headers, index.expires_in is not None) == (
        "elsewhere.index",
        {"topic": "orders"},
        True,
    )
    assert count(admin, "message") == 0


@pytest.mark.parametrize("kind", OPENERS)
async def test_a_publish_is_part_of_the_callers_transaction(kind: str, database: str, admin: Admin) -> None:
    with pgqueue.PgQueue(database) as pq:
        pq.keep_topic("orders", count=10)
        subscribe(pq, "a")
        subscribe(pq, "b", ordered=True)
    async with open_caller(kind, database) as caller:
        assert (await caller.do("publish", "orders", [1], key="k")).jobs == 2
        assert count(admin, "job") == count(admin, "message") == 0
        await caller.rollback()
        with pytest.raises(PayloadError):
            await caller.do("publish", "orders", [object()])
        assert (await caller.do("publish_many", "orders", [(2,), (3,)])).jobs == 4
        await caller.commit()
    assert (reached(admin, "a"), reached(admin, "b"), messages(admin)) == ([2, 3], [2, 3], [2, 3])


def test_a_topic_without_subscribers_and_without_keeping_takes_a_publish_and_nothing_happens(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    assert pq.publish("nobody", [1]) == pgqueue.Published(0, None)
    assert pq.publish_many("nobody", [(1,), (2,)]) == pgqueue.PublishedMany(0, None)
    assert [count(admin, table) for table in ("job", "message", "topic")] == [0, 0, 0]


def test_a_bulk_of_messages_is_all_or_nothing_and_keeps_its_order(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=10_000)
    for group in ("a", "b"):
        subscribe(pq, group)
    with pytest.raises(PayloadError):
        pq.publish_many("orders", ((number if number < 2400 else object(),) for number in range(2500)))
    assert count(admin, "job") == count(admin, "message") == 0
    done = pq.publish_many("orders", ((number,) for number in range(2500)))
    assert done.jobs == 5000
    assert done.message_ids == sorted(done.message_ids or ())
    assert reached(admin, "a") == reached(admin, "b") == messages(admin) == list(range(2500))


def test_each_group_has_its_own_retries_and_dead_letters(pq: pgqueue.PgQueue, admin: Admin) -> None:
    for group in ("a", "b"):
        subscribe(pq, group, max_attempts=2)
    pq.publish("orders", [1])
    pq.complete(pq.claim("a"))
    for _ in range(2):
        pq.fail(pq.claim("b"), "no", delay=0)
    assert [letter.queue for letter in pq.dead_letters()] == ["b"]
    assert count(admin, "job") == 0
    assert pq.redrive(queue="b")
    assert reached(admin, "b") == [1]


def test_messages_of_one_key_run_in_order_in_an_ordered_group_only(pq: pgqueue.PgQueue) -> None:
    subscribe(pq, "free")
    subscribe(pq, "ordered", ordered=True)
    keys = {1: "x", 2: "x", 3: "y", 4: None}
    pq.publish_many("orders", [(number,) for number in keys], key=lambda number: keys[number])
    assert [job.args for job in pq.claim("free", limit=10)] == [[1], [2], [3], [4]]
    first = pq.claim("ordered", limit=10)
    assert sorted(job.args for job in first) == [[1], [3], [4]]
    pq.complete(first)
    assert [job.args for job in pq.claim("ordered", limit=10)] == [[2]]


def test_a_group_may_park_a_key_at_a_dead_letter(pq: pgqueue.PgQueue) -> None:
    subscribe(pq, "a", ordered=True, on_dead="park", max_attempts=1)
    pq.publish_many("orders", [(1,), (2,)], key="x")
    pq.fail(pq.claim("a"), "no")
    assert pq.claim("a") == []
    assert pq.unpark("a", "x")
    assert [job.args for job in pq.claim("a")] == [[2]]


def test_an_idle_worker_runs_at_once_what_is_published(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    ran: list[Any] = []
    task = define(pq, "plain", ran.append)
    pq.subscribe("orders", task, group="plain")
    pq.subscribe("orders", task, group="ordered", ordered=True)
    with pgqueue.PgQueue(database) as other, running(pq, poll=60.0) as watched:
        wait_until(lambda: watched.worker._listener.hearing, PATIENCE, "it hears")  # type: ignore[union-attr]
        other.publish("orders", [1], key="x")
        wait_until(lambda: ran == [1, 1], 10.0, "both ran")


def test_headers_and_middleware_travel_with_a_message(pq: pgqueue.PgQueue) -> None:
    class Stamp(pgqueue.Middleware):
        def enqueue(self, call: pgqueue.EnqueueCall) -> None:
            if call.args == ["refused"]:
                raise PermissionError
            assert (call.topic, call.task, call.queue) == ("orders", "", "")
            call.headers["stamp"] = "7"

    pq.middleware(Stamp())
    pq.keep_topic("orders", count=10)
    subscribe(pq, "a", headers={"mine": 1, "both": "group"})
    with pytest.raises(PermissionError):
        pq.publish("orders", ["refused"])
    published = pq.publish("orders", [1], headers={"both": "message"})
    subscribe(pq, "late", start="beginning", headers={"mine": 2})
    pq.tend_topics()
    told = {"both": "message", "stamp": "7", "topic": "orders", "message_id": published.message_id}
    assert [job.headers for job in pq.claim(["a", "late"], limit=2)] == [{**told, "mine": 1}, {**told, "mine": 2}]


def test_after_unsubscribe_what_waits_stays_and_runs(pq: pgqueue.PgQueue, admin: Admin) -> None:
    subscribe(pq, "a")
    pq.publish("orders", [1])
    pq.unsubscribe("orders", "a")
    assert pq.subscriptions() == []
    assert pq.publish("orders", [2]).jobs == 0
    assert [job.args for job in pq.claim("a", limit=5)] == [[1]]
    with pytest.raises(UnknownSubscription):
        pq.unsubscribe("orders", "a")
    assert subscribe(pq, "a")
    pq.publish("orders", [3])
    assert reached(admin, "a") == [1, 3]


def test_a_group_that_is_there_gets_new_options_and_stays_where_it_is(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=10)
    pq.publish("orders", [1])
    assert subscribe(pq, "a", start="new")
    assert not subscribe(pq, "a", start="beginning"), "the same"
    assert subscribe(pq, "a", queue="elsewhere", priority=3)
    assert (pq.tend_topics(), state(pq, "a")) == (0, "live")
    pq.publish("orders", [2])
    assert (reached(admin, "a"), reached(admin, "elsewhere")) == ([], [2])


def test_what_ended_long_ago_is_forgotten_and_what_is_in_use_is_not(pq: pgqueue.PgQueue, admin: Admin) -> None:
    for topic in ("used", "unused", "kept"):
        pq.subscribe(topic, "work", group="g")
    pq.keep_topic("kept", count=1)
    for topic in ("unused", "kept"):
        pq.unsubscribe(topic, "g")
    pq.tend_topics()
    assert count(admin, "subscription") == 3
    admin.execute("UPDATE pgqueue.subscription SET gone_at = gone_at - interval '2 days'")
    admin.execute("UPDATE pgqueue.topic SET changed_at = changed_at - interval '2 days'")
    pq.tend_topics()
    pq.tend_topics()
    assert [topic.name for topic in pq.topics()] == ["kept", "used"]
    assert count(admin, "subscription") == 1


def test_lists_say_what_is_there(pq: pgqueue.PgQueue) -> None:
    pq.keep_topic("orders", count=100, age=datetime.timedelta(hours=1))
    subscribe(pq, "a", ordered=True, max_attempts=4)
    ids = [pq.publish("orders", [number]).message_id for number in range(3)]
    [topic] = pq.topics()
    assert (topic.name, topic.keep_count, topic.keep_age, topic.subscriptions) == ("orders", 100, 3600.0, 1)
    assert (topic.messages, topic.oldest_id, topic.newest_id) == (3, ids[0], ids[2])
    assert topic.oldest_at is not None
    [found] = pq.subscriptions("orders")
    assert (found.group, found.task, found.queue, found.max_attempts) == ("a", "work", "a", 4)
    assert (found.ordered, found.state, found.origin) == (True, "live", "run time")
    assert pq.subscriptions("other") == []


async def test_the_async_client_does_the_same(database: str, admin: Admin) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        await pq.keep_topic("orders", count=10)
        assert (await pq.publish("orders", [1])).message_id
        assert await pq.subscribe("orders", "work", group="a", queue="a", start="beginning")
        assert await pq.tend_topics() == 1
        assert (await pq.publish_many("orders", [(2,), (3,)])).jobs == 2
        await pq.reset_subscription("orders", "a", start="beginning")
        assert await pq.tend_topics("orders") == 3
        assert len(await pq.topics()) == len(await pq.subscriptions("orders")) == 1
        await pq.unsubscribe("orders", "a")
    assert reached(admin, "a") == [1, 2, 3, 1, 2, 3]


NAIVE = datetime.datetime(2026, 1, 1)  # noqa: DTZ001
TOMORROW = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start": "now"}, 'start must be "new", "beginning"'),
        ({"start": True}, "start must be"),
        ({"start": 0}, "whole number between 1"),
        ({"start": NAIVE}, "time zone"),
        ({"start": TOMORROW}, "still to come"),
        ({"start": "beginning"}, "keeps no messages"),
        ({"start": 7}, "keeps no messages"),
        ({"delay": 5}, "leave out delay"),
        ({"ordering_key": "x"}, "key of its own"),
        ({"concurrency_key": "x", "concurrency_limit": 2}, "key of its own"),
        ({"on_dead": "park"}, "needs ordered=True"),
        ({"ordered": "yes"}, "ordered must be"),
        ({"group": "a,b"}, "group name"),
        ({"priorty": 5}, "did you mean 'priority'"),
    ],
)
def test_a_subscription_that_cannot_be_is_one_sentence(options: dict[str, Any], said: str, pq: pgqueue.PgQueue) -> None:
    with pytest.raises(ConfigurationError) as caught:
        pq.subscribe("orders", "work", **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert pq.subscriptions() == []


def test_other_mistakes_are_one_sentence_too(pq: pgqueue.PgQueue, database: str) -> None:
    subscribe(pq, "a")
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: pq.unsubscribe("order", "a"), UnknownTopic, "similar: orders"),
        (lambda: pq.unsubscribe("orders", "b"), UnknownSubscription, "has no group 'b'; known are a"),
        (lambda: pq.reset_subscription("orders", "b"), UnknownSubscription, "known are a"),
        (lambda: pq.reset_subscription("orders", "a"), ConfigurationError, "keeps no messages"),
        (lambda: pq.reset_subscription("orders", "a", "now"), ConfigurationError, "start must be"),
        (lambda: pq.keep_topic("orders", count=0), ConfigurationError, "count must be"),
        (lambda: pq.keep_topic("orders", age=0), ConfigurationError, "age must be"),
        (lambda: pq.publish(""), ConfigurationError, "topic name"),
        (lambda: pq.publish("orders", key=""), ConfigurationError, "key must not be empty"),
        (lambda: pq.publish("orders", key=lambda: 1), ConfigurationError, "key must be text"),
        (lambda: pq.publish("orders", headers=[1]), ConfigurationError, "headers must be a mapping"),  # type: ignore[arg-type]
        (lambda: pq.publish("orders", [{1}]), PayloadError, "args"),
        (lambda: pq.publish_many("orders", [1]), ConfigurationError, "tuples"),  # type: ignore[list-item]
    ]
    with psycopg.connect(database) as caller:
        for call, kind, said in calls:
            with pytest.raises(kind) as caught:
                call()
            assert said in str(caught.value), str(caught.value)
        with pytest.raises(UnknownSubscription):
            pq.reset_subscription("orders", "b", "new", using=caller)
        assert pq.publish("orders", [1], using=caller).jobs == 1, "the caller's transaction is usable"
        caller.commit()


def test_a_start_at_a_message_that_is_not_there_says_which_is_the_oldest(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    ids = [pq.publish("orders", [number]).message_id for number in range(3)]
    admin.execute("DELETE FROM pgqueue.message WHERE id = %s", [ids[0]])
    with pytest.raises(ConfigurationError, match=f"message {ids[0]} .* is not kept any more: .* the id {ids[1]}"):
        subscribe(pq, "a", start=ids[0])
    with pytest.raises(ConfigurationError, match="holds no message 999"):
        subscribe(pq, "a", start=999)
    assert subscribe(pq, "a", start=ids[1])


def test_a_worker_replays_finds_late_messages_and_says_so(
    pq: pgqueue.PgQueue, database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.ops.replay.LOOK_EVERY", 0.1)
    monkeypatch.setattr("pgqueue.worker.topics.QUIET_PERIOD", 0.2)
    monkeypatch.setattr("pgqueue.worker.topics.PERIOD", 0.2)
    define(pq, "plain", lambda number: None)
    pq.keep_topic("orders", count=100)
    pq.publish_many("orders", [(number,) for number in range(20)])
    with running(pq) as watched, psycopg.connect(database) as caller:
        pq.publish("orders", [20], using=caller)
        pq.subscribe("orders", "work", group="g", queue="q", start="beginning")
        watched.wait_for(pgqueue.EventName.SUBSCRIPTION_REPLAYED, topic="orders", group="g", count=20, done=True)
        caller.commit()
        watched.wait_for(pgqueue.EventName.SUBSCRIPTION_CAUGHT_UP, topic="orders", group="g", count=1)
        wait_for_count(admin, 21, "archive", "state = 'completed'")
        assert not watched.seen(pgqueue.EventName.LOOP_FAILED)

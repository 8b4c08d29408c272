"""What code, two versions of it, and operators say of subscriptions."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.errors import ConfigurationError
from pgqueue.ops import topic as ops
from tests.topics import Admin, reached
from tests.workers import PATIENCE, running


def version(
    database: str, *, topic: str = "orders", start: Any = "new", ordered: bool = False, **options: Any
) -> pgqueue.PgQueue:
    """One version of an application, with a group "g"."""
    pq = pgqueue.PgQueue(database)

    @pq.subscriber(topic, group="g", start=start, ordered=ordered)
    @pq.task(name="work", **{"queue": "q", **options})
    def work(number: int) -> None: ...

    return pq


def define(pq: pgqueue.PgQueue) -> list[Any]:
    """What a worker does when it starts."""
    return pq.run(ops.define(pq.code_subscriptions, channel=None))


def silent(admin: Admin, seconds: float = 2 * ops.GONE) -> None:
    """As if no process that says the same had been there for so long."""
    admin.execute("UPDATE pgqueue.subscription SET affirmed_at = affirmed_at - %s * interval '1 second'", [seconds])


def only(pq: pgqueue.PgQueue) -> pgqueue.Subscription:
    [found] = pq.subscriptions()
    return found


def test_a_worker_writes_the_subscriptions_of_its_code_before_it_has_started(database: str, admin: Admin) -> None:
    with version(database) as pq:
        assert pq.publish("orders", [1]).jobs == 0
        with running(pq) as watched:
            assert watched.seen(pgqueue.EventName.SUBSCRIPTION_DEFINED, subscriptions=["orders g"])
            assert pq.publish("orders", [2]).jobs == 1
        assert (only(pq).origin, only(pq).state) == ("code", "live")
        with running(pq) as watched:
            assert not watched.seen(pgqueue.EventName.SUBSCRIPTION_DEFINED)


def test_a_worker_starts_beside_somebodys_open_change_of_the_topic_and_writes_its_subscription_later(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "AFFIRM_EVERY", 0.5)
    with version(database) as pq, psycopg.connect(database) as operator:
        pq.subscribe("orders", "other", group="other", using=operator)
        with running(pq) as watched:
            assert not watched.seen(pgqueue.EventName.SUBSCRIPTION_DEFINED)
            operator.commit()
            watched.wait_for(pgqueue.EventName.SUBSCRIPTION_DEFINED, subscriptions=["orders g"])


def test_what_an_operator_changed_of_a_subscription_stays_until_the_code_says_something_new(
    database: str, admin: Admin
) -> None:
    with version(database) as old:
        assert define(old) == [("orders", "g")]
        assert old.subscribe("orders", "work", group="g", queue="elsewhere")
        assert define(old) == [], "a restart of the same code"
        assert (only(old).queue, only(old).origin) == ("elsewhere", "code")
    with version(database, priority=5) as new:
        assert define(new) == [("orders", "g")]
        assert (only(new).queue, only(new).priority) == ("q", 5)


def test_two_versions_do_not_turn_each_others_subscriptions_back(database: str, admin: Admin) -> None:
    with version(database) as old, version(database, priority=5) as new:
        assert define(old) == define(new) == [("orders", "g")]
        for _ in range(3):
            assert define(old) == define(new) == []
        assert only(old).priority == 5
        silent(admin)
        assert define(old) == [("orders", "g")]
        assert define(new) == [], "one that is late, still alive"
        assert only(old).priority == 0


def test_what_live_code_has_cannot_be_unsubscribed_and_what_disappears_from_it_stays_until_it_is(
    database: str, admin: Admin
) -> None:
    with version(database) as pq:
        define(pq)
        with pytest.raises(ConfigurationError, match="in the code of live workers"):
            pq.unsubscribe("orders", "g")
        silent(admin)
        assert only(pq).origin == "not in code"
        assert pq.publish("orders", [1]).jobs == 1, "nothing is lost while no worker runs"
        pq.unsubscribe("orders", "g")
        assert pq.publish("orders", [2]).jobs == 0
        assert define(pq) == [("orders", "g")], "the code is back"
        pq.publish("orders", [3])
        assert reached(admin, "q") == [1, 3]


def test_processes_that_start_together_write_a_subscription_once_and_replay_once(database: str, admin: Admin) -> None:
    with pgqueue.PgQueue(database) as pq:
        pq.keep_topic("orders", count=100)
        pq.publish_many("orders", [(number,) for number in range(5)])
    barrier = threading.Barrier(6)
    written: list[list[Any]] = []

    def start() -> None:
        with version(database, start="beginning") as pq:
            barrier.wait(PATIENCE)
            written.append(define(pq))
            pq.tend_topics()

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(written) == [[], [], [], [], [], [("orders", "g")]]
    with version(database) as pq:
        pq.tend_topics()  # each of them may have come by while another was at the topic
    assert reached(admin, "q") == list(range(5))


def test_a_start_in_code_counts_once_and_is_no_mistake_where_nothing_is_kept(database: str, admin: Admin) -> None:
    with version(database, start="beginning") as pq:
        assert define(pq) == [("orders", "g")]
        pq.keep_topic("orders", count=10)
        pq.publish("orders", [1])
        assert define(pq) == []
        assert (pq.tend_topics(), reached(admin, "q")) == (0, [1])


def test_a_run_time_subscription_becomes_one_of_the_code(database: str, admin: Admin) -> None:
    with version(database, priority=5) as pq:
        pq.subscribe("orders", "work", group="g", queue="q", priority=1)
        pq.publish("orders", [1])
        assert define(pq) == [("orders", "g")]
        assert (only(pq).priority, only(pq).origin) == (5, "code")


def test_mistakes_in_code_are_one_sentence_at_the_decorator(pq: pgqueue.PgQueue) -> None:
    with pytest.raises(ConfigurationError, match=r"stands above pq\.task"):
        pq.subscriber("orders")(lambda number: None)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="key of its own"):
        pq.subscriber("orders")(pq.task(name="keyed", ordering_key="x")(lambda number: None))
    with pytest.raises(ConfigurationError, match="start must be"):
        pq.subscriber("orders", start="now")(pq.task(name="t")(lambda number: None))
    task = pq.task(name="a")(lambda number: None)
    pq.subscriber("orders", group="g")(task)
    pq.subscriber("orders", group="g")(task)
    pq.subscriber("other", group="g")(task)
    with pytest.raises(ConfigurationError, match="give group="):
        pq.subscriber("orders", group="g")(pq.task(name="b")(lambda number: None))


def test_a_definition_is_written_beside_somebodys_open_publish(database: str, admin: Admin) -> None:
    with version(database) as pq, psycopg.connect(database) as caller:
        pq.keep_topic("orders", count=10)
        pq.publish("orders", [1], using=caller)
        assert define(pq) == [("orders", "g")]
        caller.commit()
        pq.tend_topics()
        assert reached(admin, "q") == [1]

"""Publishes, subscriptions and looks at the same time: however late it commits, each message reaches each group once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import replay as replay_ops
from tests.topics import REPEATABLE_READ, Admin, messages, publisher, reached, state, subscribe
from tests.workers import PATIENCE

LEVELS = [None, REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE]


@pytest.fixture
def kept(pq: pgqueue.PgQueue) -> pgqueue.PgQueue:
    """A topic with one old message, 0, that everybody has seen."""
    pq.keep_topic("orders", count=100_000)
    pq.publish("orders", [0], key="x")
    pq.tend_topics()
    return pq


def settle(pq: pgqueue.PgQueue) -> None:
    """What workers do, until there is nothing more to do."""
    for _ in range(3):
        pq.tend_topics()


@pytest.mark.parametrize("start", ["new", "beginning"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_message_that_commits_after_a_subscription_that_its_publish_did_not_see_reaches_it_once(
    level: Any, ordered: bool, start: str, kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    with publisher(database, level) as early, publisher(database, level) as late:
        kept.publish("orders", [1], key="x", using=early)
        subscribe(kept, "a", start=start, ordered=ordered)
        if level is not None:  # its snapshot is older, the number of its transaction is newer
            kept.publish("orders", [2], key="x", using=late)
        settle(kept)
        assert reached(admin, "a") == ([] if start == "new" else [0])
        early.commit()
        settle(kept)
        late.commit()
        settle(kept)
    kept.publish("orders", [3], key="x")
    assert reached(admin, "a") == ([] if start == "new" else [0]) + ([1, 3] if level is None else [1, 2, 3])


@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_that_commits_while_a_subscription_is_not_committed_yet_reaches_it_once(
    ordered: bool, kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    with psycopg.connect(database) as operator:
        options: dict[str, Any] = {"queue": "a", "start": "beginning", "ordered": ordered, "using": operator}
        kept.subscribe("orders", "work", group="a", **options)
        kept.publish("orders", [1], key="x")
        settle(kept)  # the topic is locked: nobody's look passes over the message
        operator.commit()
    settle(kept)
    assert sorted(reached(admin, "a")) == [0, 1]


def test_a_look_that_began_before_a_subscription_was_committed_does_not_pass_over_its_messages(
    kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    with publisher(database) as early:
        kept.publish("orders", [1], using=early)
        subscribe(kept, "b")
        early.commit()
        subscribe(kept, "a")  # its own look finds the message for the other group
    settle(kept)
    assert (reached(admin, "a"), reached(admin, "b")) == ([], [1])


@pytest.mark.parametrize("level", [None, REPEATABLE_READ])
def test_what_a_transaction_publishes_around_its_own_subscription_reaches_it_once(
    level: Any, kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    with publisher(database, level) as caller:
        kept.publish("orders", [1], using=caller)
        with publisher(database) as other:
            other.execute("SELECT pg_current_xact_id()")  # a newer transaction has ended before this one
            other.commit()
        for group, start in (("a", "beginning"), ("b", "beginning")):
            kept.subscribe("orders", "work", group=group, queue=group, start=start, using=caller)
            kept.publish("orders", [group], using=caller)
        kept.publish("orders", [2], using=caller)
        caller.commit()
    settle(kept)
    assert Counter(reached(admin, "a")) == Counter([0, 1, "a", "b", 2])
    assert Counter(reached(admin, "b")) == Counter([0, 1, "a", "b", 2])


@pytest.mark.parametrize("level", [None, REPEATABLE_READ])
def test_a_publish_that_saw_an_ordered_group_before_its_reset_reaches_it_once(
    level: Any, kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    subscribe(kept, "a", ordered=True)
    with publisher(database, level) as early, publisher(database, level) as earlier:
        kept.publish("orders", [1], key="x", using=earlier)
        kept.publish("orders", [2], key="x", using=early)
        kept.reset_subscription("orders", "a")
        earlier.commit()  # while it is held back
        settle(kept)
        assert state(kept, "a") == "live"
        early.commit()
        settle(kept)
    assert sorted(reached(admin, "a")) == [0, 1, 2]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_group_that_leaves_and_comes_back_gets_what_was_under_way_once(
    ordered: bool, kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    subscribe(kept, "a", ordered=ordered)
    with publisher(database) as seen, publisher(database) as unseen:
        kept.publish("orders", [1], key="x", using=seen)
        kept.unsubscribe("orders", "a")
        kept.publish("orders", [2], key="x", using=unseen)
        kept.publish("orders", [3], key="x")
        subscribe(kept, "a", ordered=ordered)
        seen.commit()
        unseen.commit()
    settle(kept)
    assert sorted(reached(admin, "a")) == [1, 2], (
        "the second began without it and ended with it; the third came between"
    )


def test_a_late_message_is_not_trimmed_before_it_was_looked_at(
    kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    kept.keep_topic("orders", count=4)
    with publisher(database) as early:
        kept.publish("orders", [1], using=early)
        subscribe(kept, "a")
        for number in range(2, 30):
            kept.publish("orders", [number])
            if number % 5 == 0:
                kept.run(replay_ops.roll("orders"))
        early.commit()
    for _ in range(3):
        kept.run(replay_ops.roll("orders"))
    assert 1 in messages(admin)
    settle(kept)
    assert sorted(reached(admin, "a")) == list(range(1, 30))
    assert 1 not in messages(admin)


def test_with_many_publishers_and_groups_that_come_at_any_moment_every_message_reaches_every_group_once(
    kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    until = time.monotonic() + 3.0
    committed: dict[int, float] = {}
    groups: dict[str, tuple[str, set[int], float]] = {}
    errors: list[BaseException] = []
    numbers = iter(range(1, 1_000_000))
    lock = threading.Lock()

    def publish(seed: int) -> None:
        rng = random.Random(seed)
        with psycopg.connect(database) as caller:
            caller.isolation_level = rng.choice([None, REPEATABLE_READ])
            while time.monotonic() < until:
                mine = []
                if rng.random() < 0.5:
                    caller.execute("SELECT count(*) FROM pgqueue.topic")
                    time.sleep(rng.choice([0, 0.005, 0.05]))
                for _ in range(rng.randrange(1, 4)):
                    with lock:
                        mine.append(next(numbers))
                    kept.publish("orders", [mine[-1]], key=str(mine[-1] % 3), using=caller)
                    time.sleep(rng.choice([0, 0, 0.002, 0.03]))
                if rng.random() < 0.2:
                    caller.rollback()
                    continue
                began = time.monotonic()
                caller.commit()
                with lock:
                    committed.update(dict.fromkeys(mine, began))

    def come_and_look(seed: int) -> None:
        rng = random.Random(seed)
        with pgqueue.PgQueue(database) as pq:
            for number in range(1000):
                if time.monotonic() > until:
                    return
                name, start = f"group{seed}x{number}", rng.choice(["new", "beginning"])
                with lock:
                    before = set(committed)
                subscribe(pq, name, start=start, ordered=rng.random() < 0.5)
                with lock:
                    groups[name] = (start, before, time.monotonic())
                time.sleep(rng.choice([0, 0.01, 0.04]))
                pq.run(replay_ops.turn("orders", channel=None))

    def guarded(work: Any, seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(publish, seed), daemon=True) for seed in range(6)]
    threads += [threading.Thread(target=guarded, args=(come_and_look, seed), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == []
    settle(kept)
    everything = {0, *committed}
    assert set(messages(admin)) == everything
    assert len(groups) > 10
    for name, (start, before, came) in groups.items():
        got = Counter(reached(admin, name))
        assert max(got.values(), default=1) == 1, (name, [number for number, times in got.items() if times > 1])
        if start == "beginning":
            assert set(got) == everything, (name, everything - set(got))
        else:
            assert not before & set(got), (name, "what was committed before it came")
            after = {number for number, began in committed.items() if began > came}
            assert after <= set(got), (name, after - set(got))


def test_every_publish_after_a_subscription_reaches_it_without_any_look(kept: pgqueue.PgQueue, admin: Admin) -> None:
    stop = threading.Event()
    sent: list[int] = []

    def publish() -> None:
        while not stop.is_set():
            kept.publish("orders", [len(sent) + 1])
            sent.append(len(sent) + 1)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    time.sleep(0.1)
    subscribe(kept, "a")
    before = len(sent) + 1  # one may be on its way
    time.sleep(0.1)
    stop.set()
    thread.join(PATIENCE)
    got = reached(admin, "a")
    assert got == sorted(set(got))
    assert set(range(before + 1, len(sent) + 1)) <= set(got)

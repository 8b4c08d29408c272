"""Replay: from where, in pieces, in order, and once, whatever breaks in the middle."""

from __future__ import annotations

import datetime
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.drivers.execute import run
from pgqueue.ops import replay as replay_ops
from tests.topics import Admin, Cut, cut, reached, state, subscribe


@pytest.fixture
def kept(pq: pgqueue.PgQueue) -> pgqueue.PgQueue:
    """A topic with the messages 0 to 9."""
    pq.keep_topic("orders", count=1000)
    pq.publish_many("orders", [(number,) for number in range(10)], key="x")
    return pq


def turn(pq: pgqueue.PgQueue) -> replay_ops.Turn:
    return pq.run(replay_ops.turn("orders", channel=None))


def test_a_subscription_starts_from_the_beginning_from_a_time_from_an_id_or_with_what_is_new(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    pq.keep_topic("orders", count=1000)
    first = pq.publish_many("orders", [(number,) for number in range(5)]).message_ids or []
    time = admin.execute("SELECT clock_timestamp()").fetchall()[0][0]
    pq.publish_many("orders", [(number,) for number in range(5, 10)])
    starts: dict[str, Any] = {"all": "beginning", "time": time, "id": first[3], "new": "new"}
    for group, start in starts.items():
        subscribe(pq, group, start=start)
    assert pq.tend_topics() == 10 + 5 + 7
    pq.publish("orders", [10])
    assert {group: reached(admin, group) for group in starts} == {
        "all": [*range(10), 10],
        "time": [*range(5, 10), 10],
        "id": [*range(3, 10), 10],
        "new": [10],
    }


@pytest.mark.parametrize("ordered", [False, True])
def test_a_reset_replays_from_there_once_more(ordered: bool, kept: pgqueue.PgQueue, admin: Admin) -> None:
    subscribe(kept, "a", ordered=ordered)
    newest = kept.publish("orders", [10], key="x").message_id
    kept.reset_subscription("orders", "a", newest or 0)
    assert kept.tend_topics() == 1
    kept.reset_subscription("orders", "a")
    assert state(kept, "a") == ("held" if ordered else "replaying")
    assert kept.tend_topics() == 11
    kept.reset_subscription("orders", "a", datetime.datetime.now(datetime.UTC))
    assert kept.tend_topics() == 0
    kept.publish("orders", [11], key="x")
    assert reached(admin, "a") == [10, 10, *range(11), 11]
    assert state(kept, "a") == "live"


def test_a_reset_to_new_ends_a_replay_that_is_under_way(
    kept: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_ops, "PIECE", 3)
    for group, ordered in (("a", False), ("b", True)):
        subscribe(kept, group, start="beginning", ordered=ordered)
        turn(kept)
        kept.publish("orders", [group], key="x")
        kept.reset_subscription("orders", group, "new")
        kept.publish("orders", [group.upper()], key="x")
        kept.unsubscribe("orders", group)
    assert reached(admin, "a") == [0, 1, 2, "a", "A"]
    assert reached(admin, "b") == [0, 1, 2, "B"]


def test_new_messages_keep_coming_while_an_unordered_group_replays(
    kept: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_ops, "PIECE", 4)
    subscribe(kept, "a", start="beginning")
    assert (turn(kept).replayed, state(kept, "a")) == (replay_ops.Replayed("a", 4, False), "replaying")
    assert kept.publish("orders", ["new"]).jobs == 1
    assert kept.tend_topics() == 6
    assert reached(admin, "a") == [0, 1, 2, 3, "new", 4, 5, 6, 7, 8, 9]


def test_an_ordered_group_gets_new_messages_behind_its_replay_and_in_the_order_of_their_ids(
    kept: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_ops, "PIECE", 4)
    subscribe(kept, "a", start="beginning", ordered=True)
    sent = 10
    for _ in range(3):  # more comes than is replayed: one more stretch
        assert turn(kept).replayed is not None
        assert state(kept, "a") == "held"
        assert kept.publish_many("orders", [(sent + n,) for n in range(6)], key="x").jobs == 0
        sent += 6
    assert kept.tend_topics() == sent - 10
    assert state(kept, "a") == "live"
    assert kept.publish("orders", [sent], key="x").jobs == 1
    assert reached(admin, "a") == list(range(sent + 1))
    first = kept.claim("a", limit=100)
    assert [job.args for job in first] == [[0]], "one at a time, the oldest first"


@pytest.mark.parametrize("ordered", [False, True])
def test_a_crash_at_any_statement_of_a_replay_neither_loses_nor_doubles(
    ordered: bool, kept: pgqueue.PgQueue, database: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_ops, "PIECE", 4)
    for group in ("a", "b"):
        subscribe(kept, group, start="beginning", ordered=ordered)
    statements, cuts = 1, 0
    while True:
        worker = psycopg.connect(database, autocommit=True)
        try:
            done = run(worker, cut(replay_ops.turn("orders", channel=None), statements), "pgqueue")
        except Cut:
            cuts += 1
            statements += 1
        else:
            if done.taken and done.replayed is None:
                break
            statements = 1 if done.taken else statements  # the one before it may not have quite ended yet
        finally:
            admin.execute("SELECT pg_terminate_backend(%s)", [worker.info.backend_pid])
            worker.close()
    assert cuts >= 12
    kept.tend_topics()
    assert reached(admin, "a") == reached(admin, "b") == list(range(10))


def test_a_subscription_that_rolls_back_leaves_nothing(kept: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    with psycopg.connect(database) as caller:
        kept.subscribe("orders", "work", group="a", queue="a", start="beginning", using=caller)
        caller.rollback()
    assert (kept.tend_topics(), kept.publish("orders", [1]).jobs, kept.subscriptions()) == (0, 0, [])


def test_two_that_replay_at_once_do_not_wait_for_each_other_and_make_every_job_once(
    kept: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    subscribe(kept, "a", start="beginning")
    with psycopg.connect(database) as frozen:
        frozen.execute("SELECT FROM pgqueue.topic FOR NO KEY UPDATE")
        assert turn(kept) == replay_ops.Turn(False, {}, None)
        assert kept.publish("orders", [10]).jobs == 1, "a publish waits for nobody"
    assert kept.tend_topics() == 10
    assert sorted(reached(admin, "a")) == list(range(11))


def test_a_replay_that_finds_little_among_many_looks_at_a_bounded_number_in_one_turn(
    kept: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_ops, "LOOK", 3)
    time = admin.execute("SELECT clock_timestamp()").fetchall()[0][0]
    kept.publish("orders", [10])
    subscribe(kept, "a", start=time)
    pieces = []
    while (done := turn(kept).replayed) is not None:
        pieces.append(done.jobs)
    assert pieces == [0, 0, 0, 1]
    assert reached(admin, "a") == [10]


def test_messages_of_a_restored_dump_are_replayed_and_reach_nobody_by_themselves(
    kept: pgqueue.PgQueue, admin: Admin
) -> None:
    """Transaction ids of another cluster, which is further on than this one."""
    subscribe(kept, "a")
    kept.publish("orders", [10])
    kept.tend_topics()
    admin.execute("UPDATE pgqueue.message SET xid = xid + 4000000000, version = 0")
    admin.execute("UPDATE pgqueue.topic SET seen = '4000000000:4100000000:'")
    kept.publish("orders", [11])
    subscribe(kept, "b", start="beginning")
    subscribe(kept, "c", start="beginning", ordered=True)
    assert kept.tend_topics() == 24
    kept.publish("orders", [12])
    assert kept.tend_topics() == 0
    assert reached(admin, "a") == [10, 11, 12]
    assert reached(admin, "b") == reached(admin, "c") == list(range(13))

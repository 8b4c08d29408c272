"""What a topic keeps: by number, by age, in segments that are dropped whole; and nobody is held up by it."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import migrate
from pgqueue.ops import replay as replay_ops
from tests.topics import Admin, messages, reached, segments, subscribe
from tests.workers import count


def roll(pq: pgqueue.PgQueue, times: int = 1) -> list[int]:
    return [pq.run(replay_ops.roll("orders")) for _ in range(times)]


def publish(pq: pgqueue.PgQueue, first: int, last: int) -> None:
    pq.publish_many("orders", [(number,) for number in range(first, last + 1)])


def age(admin: Admin, seconds: float) -> None:
    admin.execute("UPDATE pgqueue.message SET published_at = published_at - %s * interval '1 second'", [seconds])


def test_the_last_messages_are_kept_and_older_ones_go_by_whole_segments(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=8)
    for number in range(1, 31):
        publish(pq, number, number)
        roll(pq)
        kept = messages(admin)
        assert kept == list(range(kept[0], number + 1)), "no gap"
        assert min(number, 8) <= len(kept) <= 8 + 4, kept
    assert len(segments(admin)) <= 7
    assert roll(pq, 2) == [0, 0], "nothing is left to do"
    publish(pq, 31, 100)
    roll(pq, 2)
    assert messages(admin) == list(range(31, 101)), "one bulk is one segment"
    publish(pq, 101, 108)
    roll(pq, 2)
    assert messages(admin)[-8:] == list(range(101, 109))
    assert len(messages(admin)) <= 78


def test_messages_are_kept_for_so_long(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", age=100)
    publish(pq, 1, 3)
    roll(pq)
    assert len(segments(admin)) == 1
    age(admin, 30)
    publish(pq, 4, 5)
    roll(pq)
    assert len(segments(admin)) == 2, "a quarter of the time has passed"
    publish(pq, 6, 6)
    age(admin, 80)
    roll(pq)
    assert messages(admin) == [1, 2, 3, 4, 5, 6], "in one segment with some that are young enough"
    age(admin, 25)
    publish(pq, 7, 7)
    roll(pq, 2)
    assert messages(admin) == [7]
    age(admin, 200)
    roll(pq, 2)
    assert messages(admin) == []


def test_what_is_within_both_limits_is_kept(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=4, age=100)
    for number in range(1, 13):
        publish(pq, number, number)
        roll(pq)
    assert 4 <= len(messages(admin)) <= 6
    age(admin, 101)
    roll(pq, 2)
    assert messages(admin) == []


def test_topics_are_trimmed_each_by_its_own_limits(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    pq.keep_topic('it\'s "odd" %s', count=1000)
    for number in range(20):
        publish(pq, number, number)
        pq.publish('it\'s "odd" %s', [number])
        pq.tend_topics()
    assert len(messages(admin)) < 8
    assert len(messages(admin, 'it\'s "odd" %s')) == 20
    assert count(admin, "message_rest") == 0


def test_a_topic_that_keeps_nothing_any_more_drops_what_it_has(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    publish(pq, 1, 3)
    pq.keep_topic("orders")
    assert (messages(admin), segments(admin)) == ([], [])
    assert pq.publish("orders", [4]).message_id is None
    pq.keep_topic("orders", count=4)
    publish(pq, 5, 5)
    assert (messages(admin), len(segments(admin)), count(admin, "message_rest")) == ([5], 1, 0)


def test_a_publish_never_fails_because_a_partition_is_missing(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    publish(pq, 1, 1)
    [leaf] = segments(admin)
    admin.execute(f"DROP TABLE pgqueue.{leaf}".encode())
    publish(pq, 2, 3)
    assert messages(admin) == [2, 3]
    roll(pq)
    publish(pq, 4, 4)
    assert messages(admin) == [2, 3, 4]
    assert len(segments(admin)) == 1
    subscribe(pq, "a", start="beginning")
    pq.tend_topics()
    assert reached(admin, "a") == [2, 3, 4]
    for number in range(5, 25):
        publish(pq, number, number)
        roll(pq)
    assert len(messages(admin)) < 8, "what lies in the default partition is trimmed as well"


def test_messages_from_before_the_tables_could_be_made_move_into_them(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgqueue.message_rest")
        began = time.monotonic()
        pq.keep_topic("orders", count=4)
        assert time.monotonic() - began < 30
        publish(pq, 1, 2)
        assert (count(admin, "message_rest"), segments(admin)) == (2, [])
    roll(pq)
    assert (count(admin, "message_rest"), messages(admin)) == (0, [1, 2])
    assert segments(admin)
    assert migrate.check(database).state is migrate.SchemaState.CURRENT, "partitions are no drift"


def test_a_publisher_with_an_open_transaction_puts_trimming_off_and_holds_up_nobody(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    pq.keep_topic("orders", count=4)
    with psycopg.connect(database) as slow:
        pq.publish("orders", [0], using=slow)
        for number in range(1, 12):
            publish(pq, number, number)
            roll(pq)
        assert messages(admin) == list(range(1, 12))
        slow.commit()
    roll(pq, 2)
    assert len(messages(admin)) < 8


def test_trimming_waits_for_a_replay_that_is_under_way(
    pq: pgqueue.PgQueue, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_ops, "PIECE", 2)
    pq.keep_topic("orders", count=1000)
    publish(pq, 1, 9)
    pq.keep_topic("orders", count=4)
    subscribe(pq, "a", start="beginning")
    for number in range(10, 30):
        publish(pq, number, number)
        roll(pq)
    pq.run(replay_ops.turn("orders", channel=None))
    roll(pq)
    assert messages(admin)[0] <= 3
    pq.tend_topics()
    assert sorted(reached(admin, "a")) == list(range(1, 30))
    roll(pq)
    assert len(messages(admin)) < 8


def test_a_view_on_an_old_segment_keeps_that_segment_only(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    publish(pq, 1, 1)
    roll(pq)
    publish(pq, 2, 2)
    roll(pq)
    [first, *_] = segments(admin)
    admin.execute(f"CREATE VIEW report AS SELECT id FROM pgqueue.{first}".encode())
    for number in range(3, 20):
        publish(pq, number, number)
        roll(pq)
    kept = messages(admin)
    assert kept[0] == 1
    assert len(kept) < 8


def test_of_two_rolls_at_once_one_does_the_work(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    publish(pq, 1, 2)
    with psycopg.connect(database) as other:
        other.execute("SELECT pgqueue.topic_roll('orders')")
        assert roll(pq) == [0]
    assert len(segments(admin)) == 2


def test_a_role_needs_the_right_to_roll_and_no_other(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=4)
    publish(pq, 1, 2)
    with admin.transaction(force_rollback=True):
        admin.execute("CREATE ROLE pgqueue_test_topic_roll")
        admin.execute("GRANT USAGE ON SCHEMA pgqueue TO pgqueue_test_topic_roll")
        admin.execute("SET LOCAL ROLE pgqueue_test_topic_roll")
        with pytest.raises(psycopg.errors.InsufficientPrivilege), admin.transaction():
            admin.execute("SELECT pgqueue.topic_roll('orders')")
        admin.execute("RESET ROLE")
        admin.execute("GRANT EXECUTE ON FUNCTION pgqueue.topic_roll TO pgqueue_test_topic_roll")
        admin.execute("SET LOCAL ROLE pgqueue_test_topic_roll")
        assert admin.execute("SELECT pgqueue.topic_roll('orders')").fetchall() == [(1,)]


def test_jobs_stay_where_their_message_is_trimmed(pq: pgqueue.PgQueue, admin: Admin) -> None:
    pq.keep_topic("orders", count=1)
    subscribe(pq, "a")
    for number in range(10):
        publish(pq, number, number)
        roll(pq)
    assert len(messages(admin)) < 5
    taken: list[Any] = [job.args[0] for job in pq.claim("a", limit=20)]
    assert taken == list(range(10))


def test_a_roll_with_an_old_snapshot_drops_nothing_that_has_committed_meanwhile(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    """As with `keep_topic(using=…)` in REPEATABLE READ; workers roll in READ COMMITTED, whatever the role's default."""
    pq.keep_topic("orders", count=8)
    with psycopg.connect(database) as late:
        publish(pq, 0, 0)
        pq.publish("orders", [99], using=late)
        subscribe(pq, "g")
        for first in (1, 13, 25):
            publish(pq, first, first + 11)
            if first > 1:
                roll(pq)
        with psycopg.connect(database) as old:
            old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            old.execute("SELECT 1 FROM pgqueue.topic")
            late.commit()
            assert old.execute("SELECT pgqueue.topic_roll('orders')").fetchone() == (0,)
    roll(pq)
    pq.tend_topics()
    assert 99 in reached(admin, "g")


def test_a_worker_rolls_in_read_committed_whatever_the_roles_default(database: str) -> None:
    strict = psycopg.conninfo.make_conninfo(database, options=r"-c default_transaction_isolation=repeatable\ read")
    with pgqueue.PgQueue(strict) as pq:
        pq.keep_topic("orders", count=8)
        publish(pq, 1, 20)
        assert sum(roll(pq, 2)) > 0

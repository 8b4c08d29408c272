"""Limits beside priorities, rates, clocks, open transactions and rows written by hand."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import ConfigurationError, EventName
from pgqueue.ops import limit as limit_ops
from pgqueue.ops import rescue as rescue_ops
from pgqueue.ops import status as status_ops
from pgqueue.ops.claim import LowWater
from tests.integration.test_limits import Admin, claimed, enqueue, rest, running


def test_what_is_paused_too_old_or_left_out_is_not_claimed_within_limits_either(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    paused, old, plain = (
        pq.enqueue("paused", queue="q"),
        pq.enqueue("work", queue="q", expires_in=60),
        pq.enqueue("work", queue="q"),
    )
    pq.limit_queue("q", running=10)
    pq.pause("q", task="paused")
    admin.execute("UPDATE pgqueue.job SET expires_at = now() WHERE id = %s", [old])
    pq._maintained["q"] = float("inf")  # the sweep would be before us
    assert claimed(pq) == [plain]
    pq.resume("q", task="paused")
    left_out = limit_ops.claim("q", 5, free=5, lease=30, low_water=LowWater(), left_out=["paused"])
    assert pq.run(left_out).jobs == []
    assert claimed(pq) == [paused]


def test_priorities_and_places_hold_within_limits_and_full_passes_find_what_comes_back(pq: pgqueue.PgQueue) -> None:
    low = enqueue(pq, 3)
    high = [pq.enqueue("work", queue="q", priority=5) for _ in range(2)]
    pq.limit_queue("q", running=2)
    first = pq.claim("q", limit=10)
    assert [job.id for job in first] == high
    pq.complete(first)
    second = pq.claim("q", limit=10)
    assert [job.id for job in second] == low[:2]
    pq.release(second[0])
    assert claimed(pq) == low[:1]


# How often


def test_a_rate_lets_a_burst_through_and_then_what_time_brings(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 40)
    pq.limit_queue("q", rate=1, per=3600, burst=10)
    assert len(claimed(pq, 4)) == 4
    assert len(claimed(pq)) == 6
    assert claimed(pq) == []
    rest(admin, 3 * 3600)
    assert len(claimed(pq)) == 3
    rest(admin, 1000 * 3600)
    assert len(claimed(pq)) == 10, "no more than the burst, after any time"


def test_both_limits_hold(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 20)
    pq.limit_queue("q", running=3, rate=1, per=3600, burst=5)
    jobs = pq.claim("q", limit=10)
    assert len(jobs) == 3
    pq.complete(jobs)
    assert len(claimed(pq)) == 2
    rest(admin, 3600 * 10)
    assert len(claimed(pq)) == 1


def test_a_retry_takes_a_token_and_a_release_gives_none_back(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 1)
    pq.limit_queue("q", rate=1, per=3600, burst=3)
    pq.fail(pq.claim("q"), "again", delay=0)
    pq.release(pq.claim("q"))
    assert len(claimed(pq)) == 1
    [limit] = pq.limits()
    assert limit.tokens is not None
    assert limit.tokens < 0.1


def test_a_clock_that_steps_back_adds_no_tokens_and_does_not_stop_them(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 10)
    pq.limit_queue("q", rate=1, per=3600, burst=2)
    assert len(claimed(pq)) == 2
    rest(admin, -86400)
    assert claimed(pq) == []
    [(ahead,)] = admin.execute("SELECT refilled_at > clock_timestamp() FROM pgqueue.queue").fetchall()
    assert not ahead, "it fills from now on, and not from tomorrow"
    rest(admin, 3600)
    assert len(claimed(pq)) == 1


def test_saying_the_same_once_more_gives_nobody_tokens(pq: pgqueue.PgQueue) -> None:
    enqueue(pq, 10)
    for _ in range(3):
        pq.limit_queue("q", rate=1, per=3600, burst=3)
        assert len(claimed(pq)) in (3, 0)
    pq.limit_queue("q", rate=1, per=3600, burst=9)
    assert claimed(pq) == [], "a larger bucket is not fuller"
    pq.unlimit_queue("q")
    assert len(claimed(pq)) == 7


def test_an_open_transaction_that_changes_a_limit_holds_back_claims_and_nobody_waits(
    pq: pgqueue.PgQueue, database: str
) -> None:
    enqueue(pq, 10)
    pq.limit_queue("q", rate=1000, burst=5)
    impatient = psycopg.conninfo.make_conninfo(database, options="-c lock_timeout=2s")
    with psycopg.connect(database) as operator, pgqueue.PgQueue(impatient) as other:
        pq.limit_queue("q", rate=1000, burst=2, using=operator)
        assert claimed(other) == []
        operator.rollback()
    assert len(claimed(pq)) == 5


ODD = (
    *("rate = 'nan'", "rate = 'infinity'", "rate = -1", "rate = 0", "rate = 1e308", "rate = -1e308"),
    *("burst = NULL", "burst = -5", "tokens = 'nan'", "tokens = 'infinity'", "tokens = '-infinity'"),
    *("tokens = -1e308, rate = 1e308", "refilled_at = 'infinity'", "refilled_at = '-infinity'", "refilled_at = NULL"),
    *("refilled_at = '4714-11-24 BC'", "most_running = -3", "most_running = 0"),
)


def test_limits_written_by_hand_fail_neither_claims_nor_lists(pq: pgqueue.PgQueue, admin: Admin) -> None:
    for number, value in enumerate(ODD):
        queue = f"q{number}"
        enqueue(pq, 3, queue)
        pq.limit_queue(queue, rate=1, burst=2)
        assert len(pq.claim(queue)) == 1
        admin.execute(f"UPDATE pgqueue.queue SET {value} WHERE name = %s".encode(), [queue])
        assert len(pq.claim(queue, limit=5)) <= 2, value
        assert pq.status([queue])[0].limit is not None
        assert pq.run(rescue_ops.agenda(queue)).limit.said()
        pq.unlimit_queue(queue)
        pq.claim(queue, limit=5)
    assert running(admin) == 3 * len(ODD), "none of it stops a queue for ever"


# What callers and operators see


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_claim_on_a_callers_connection_is_refused_and_the_transaction_stays_usable(
    autocommit: bool, pq: pgqueue.PgQueue, database: str
) -> None:
    [job_id] = enqueue(pq, 1)
    enqueue(pq, 1, "limited")
    pq.limit_queue("limited", running=5)
    with psycopg.connect(database, autocommit=autocommit) as mine:
        with pytest.raises(ConfigurationError, match="'limited' is limited: claim from it without using=") as refused:
            pq.claim("limited", using=mine)
        assert "\n" not in str(refused.value)
        # What was claimed before reaches its caller.
        assert [job.id for job in pq.claim(["q", "limited"], limit=5, using=mine)] == [job_id]
        assert pq.claim(["q"], limit=5, using=mine) == []


def test_limits_begin_and_end_with_the_callers_commit(pq: pgqueue.PgQueue, database: str) -> None:
    enqueue(pq, 5)
    with psycopg.connect(database) as mine:
        pq.limit_queue("q", running=1, using=mine)
        assert [limit.running for limit in pq.limits(using=mine)] == [1]
        assert pq.limits() == []
        mine.commit()
        assert len(claimed(pq)) == 1
        assert pq.unlimit_queue("q", using=mine) is True
        assert claimed(pq) == []
        mine.commit()
        assert len(claimed(pq)) == 4
        assert pq.unlimit_queue("q", using=mine) is False


def test_limits_are_listed_shown_and_told(pq: pgqueue.PgQueue) -> None:
    told: list[dict[str, Any]] = []
    pq.events.subscribe(
        lambda event: told.append(dict(event.facts)), wants=lambda name: name is EventName.QUEUE_LIMIT_SET
    )
    pq.limit_queue("b", running=5)
    pq.limit_queue("a", rate=120, per=60, burst=7)
    a, b = pq.limits()
    assert (a.queue, a.running, a.rate, a.burst, a.tokens, a.in_code) == ("a", None, 2.0, 7, 7.0, False)
    assert (b.queue, b.running, b.rate, b.burst, b.tokens) == ("b", 5, None, None, None)
    assert {row.queue: row.limit for row in pq.status()} == {"a": a, "b": b}
    pq.unlimit_queue("a")
    assert pq.limits() == [b]
    assert pq.status(["a"])[0].limit is None
    assert told == [{"queue": "b", "running": 5}, {"queue": "a", "rate": 2.0, "burst": 7}, {"queue": "a"}]


def test_a_queue_that_is_only_limited_is_not_drained(pq: pgqueue.PgQueue, admin: Admin) -> None:
    enqueue(pq, 3)
    pq.limit_queue("q", running=1, rate=1, per=3600, burst=1)
    pq.complete(pq.claim("q"))
    assert not pq.run(status_ops.drained("q"))
    rest(admin, 3600)
    pq.complete(pq.claim("q"))
    rest(admin, 3600)
    pq.complete(pq.claim("q"))
    assert pq.run(status_ops.drained("q"))


async def test_the_async_client_keeps_to_limits(database: str) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        for _ in range(5):
            await pq.enqueue("work", queue="q")
        await pq.limit_queue("q", running=2, rate=5, burst=3)
        assert [limit.burst for limit in await pq.limits()] == [3]
        jobs = await pq.claim("q", limit=5)
        assert len(jobs) == 2
        await pq.complete(jobs)
        assert await pq.unlimit_queue("q") is True
        assert len(await pq.claim("q", limit=5)) == 3
        await pq.limit_key("q", "key", 2, rate=5)
        [lane] = await pq.lanes("q")
        assert (lane.width, lane.rate, lane.burst) == (2, 5.0, 5)

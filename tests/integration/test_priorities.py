"""What a priority is: a whole number from -100 to 100, higher first, strictly; and first come, first served within one."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue


@pytest.mark.parametrize("priority", [101, -101, 2**15, -(2**15) - 1, 2**70, 1.0, float("nan"), "1", True, None, [1]])
def test_a_priority_of_another_type_or_range_is_refused_before_anything_is_sent(priority: Any) -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")

    @pq.task
    def task() -> None: ...

    for refused in (
        lambda: pq.enqueue("t", priority=priority),
        lambda: task.options(priority=priority),
        lambda: pq.task(name="other", priority=priority)(lambda: None),
    ):
        with pytest.raises(pgqueue.ConfigurationError, match="priority must be a whole number between -100 and 100"):
            refused()


def test_a_steady_stream_of_high_priority_keeps_lower_ones_waiting(pq: pgqueue.PgQueue) -> None:
    low = [pq.enqueue("low", queue="q", priority=-100) for _ in range(10)]
    for _ in range(30):
        high = [pq.enqueue("high", queue="q", priority=100) for _ in range(3)]
        claimed = pq.claim("q", limit=3)
        assert [job.id for job in claimed] == high
        pq.complete(claimed)
    assert pq.status()[0].oldest_ready is not None  # what an alarm watches where that matters
    assert [job.id for job in pq.claim("q", limit=100)] == low


def test_equal_priorities_run_in_the_order_in_which_they_became_ready(pq: pgqueue.PgQueue, database: str) -> None:
    with psycopg.connect(database) as slow, psycopg.connect(database) as quick:
        first = pq.enqueue("t", queue="q", using=slow)
        second = pq.enqueue("t", queue="q", using=quick)
        third = pq.enqueue("t", queue="q", priority=1, using=quick)
        quick.commit()
        assert [job.id for job in pq.claim("q", limit=1)] == [third]
        slow.commit()
    assert [job.id for job in pq.claim("q", limit=10)] == [first, second]


def test_the_first_of_two_queues_goes_before_the_second_for_as_long_as_it_is_full(pq: pgqueue.PgQueue) -> None:
    later = pq.enqueue("t", queue="b", priority=100)
    for _ in range(10):
        first = [pq.enqueue("t", queue="a", priority=-100) for _ in range(2)]
        assert [job.id for job in pq.claim(["a", "b"], limit=2)] == first
    assert [job.id for job in pq.claim(["a", "b"], limit=2)] == [later]

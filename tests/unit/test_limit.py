"""Limits without a database: which numbers are taken, when the next token comes, and when a worker asks again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import pgqueue
from pgqueue.errors import ConfigurationError
from pgqueue.limit import Limit, Rate, limit_of, rate_of, wait_for_token
from pgqueue.ops.limit import Granted
from pgqueue.worker.limits import AGAIN, CALM, Limits
from tests.unit.test_admission import Clock


@pytest.mark.parametrize(
    ("given", "rate", "burst"),
    [
        ({"rate": 10}, 10.0, 10),
        ({"rate": 0.5}, 0.5, 1),
        ({"rate": 100, "per": 3600}, 100 / 3600, 1),
        ({"rate": 2.5, "per": timedelta(seconds=1)}, 2.5, 3),
        ({"rate": 100, "per": 60, "burst": 50}, 100 / 60, 50),
        ({"rate": 1.1, "per": 1.1}, 1.0, 1),
    ],
)
def test_a_rate_is_a_second_and_its_burst_what_a_second_brings_unless_given(
    given: dict[str, Any], rate: float, burst: int
) -> None:
    assert rate_of(**given) == Rate(rate=pytest.approx(rate), burst=burst)
    assert limit_of(**given) == Limit(rate=pytest.approx(rate), burst=burst)


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({}, "limited to what"),
    ({"burst": 5, "running": 1}, "burst belongs to a rate"),
    ({"running": 0}, "running"),
    ({"running": 2**31}, "running"),
    ({"running": True}, "running"),
    ({"running": 1.5}, "running"),
    ({"rate": 0}, "rate must be"),
    ({"rate": -1}, "rate must be"),
    ({"rate": float("nan")}, "rate must be"),
    ({"rate": float("inf")}, "rate must be"),
    ({"rate": 10**400}, "rate must be"),
    ({"rate": "5"}, "rate must be"),
    ({"rate": True}, "rate must be"),
    ({"rate": 2e9}, "rate must be"),
    ({"rate": 1, "per": 1e12}, "rate must be"),
    ({"rate": 1, "per": 0}, "per must be"),
    ({"rate": 1, "per": timedelta(seconds=-1)}, "per must be"),
    ({"rate": 1, "burst": 0}, "burst"),
    ({"rate": 1, "burst": 2.5}, "burst"),
]


@pytest.mark.parametrize(("given", "part"), NONSENSE)
def test_a_limit_that_makes_no_sense_is_refused_in_one_sentence_before_anything_is_sent(
    given: dict[str, Any], part: str
) -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    for call in (pq.limit_queue, pq.declare_limit):
        with pytest.raises(ConfigurationError, match=part) as refused:
            call("q", **given)
        assert "\n" not in str(refused.value)
    assert pq.code_limits == {}


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({}, "which key"),
        ({"concurrency_key": "a", "ordering_key": "b"}, "which key"),
        ({"ordering_key": "a", "limit": 2}, "limit is for a concurrency_key"),
        ({"concurrency_key": "a", "limit": 0}, "limit"),
        ({"concurrency_key": "a", "rate": 0}, "rate"),
        ({"concurrency_key": ""}, "must not be empty"),
    ],
)
def test_a_limit_of_a_key_that_makes_no_sense_is_refused(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing").limit_key("q", **given)


def test_a_queue_is_declared_once() -> None:
    pq = pgqueue.PgQueue("postgresql://127.0.0.1:1/nothing")
    pq.declare_limit("q", running=5)
    pq.declare_limit("q", running=5)
    with pytest.raises(ConfigurationError, match="two limits"):
        pq.declare_limit("q", running=6)


def test_the_fingerprint_of_a_limit_does_not_change_from_release_to_release() -> None:
    assert limit_of(5, rate=10).fingerprint() == "54d02ba3f09db3ddfb9292b01a40c571"
    assert len({limit_of(5).fingerprint(), limit_of(6).fingerprint(), limit_of(5, rate=1).fingerprint()}) == 3


def test_the_next_token_is_waited_for_and_a_little_longer_where_the_bucket_has_room() -> None:
    assert wait_for_token(0.25, 1.0, 1) == 0.75
    assert wait_for_token(0.0, 100.0, 1) == pytest.approx(0.01), "the bucket runs over: no longer than needed"
    assert wait_for_token(0.0, 1000.0, 1000) == pytest.approx(0.02), "twenty at once are as good as one by one"
    assert wait_for_token(0.0, 1 / 3600, 1) == 5.0, "somebody may change it unheard"
    assert wait_for_token(0.0, 0.0, 1) == wait_for_token(0.0, -1.0, 1) == 5.0, "written by hand"
    assert wait_for_token(3.0, 1.0, 1) == 0.0


BOUND = Granted([], True, "running", 0.0)
DRY = Granted([], True, "rate", 3.0)
ROOM = Granted([], True, None, 0.0)


def limited(clock: Clock, **limit: Any) -> Limits:
    limits = Limits(["q", "other"], clock)
    assert limits.learn("q", Limit(**limit))
    return limits


def test_a_queue_without_room_is_asked_again_four_times_a_second_or_when_a_job_has_ended() -> None:
    clock = Clock()
    limits = limited(clock, running=5)
    assert limits.open("q")
    assert limits.due_in() is None
    limits.after("q", BOUND, limits.settles("q"))
    assert not limits.open("q")
    assert limits.open("other")
    due_in = limits.due_in()
    assert due_in is not None
    assert due_in == pytest.approx(AGAIN, rel=0.21)
    clock.now += due_in + 1e-6
    assert limits.open("q")
    limits.after("q", BOUND, limits.settles("q"))
    assert limits.settled("q") is True
    assert limits.open("q")
    assert limits.settled("q") is False, "awake already"
    assert limits.settled("other") is False


def test_a_job_that_ends_during_the_claim_is_not_overlooked() -> None:
    clock = Clock()
    limits = limited(clock, running=5)
    settles = limits.settles("q")
    limits.settled("q")
    limits.after("q", BOUND, settles)
    assert limits.open("q")


def test_for_a_rate_the_end_of_a_job_changes_nothing() -> None:
    clock = Clock()
    limits = limited(clock, rate=1.0, burst=1)
    limits.after("q", DRY, limits.settles("q"))
    assert limits.settled("q") is False
    clock.now += 2.9
    assert not limits.open("q")
    clock.now += 0.2
    assert limits.open("q")


def test_a_limit_that_is_new_is_looked_at_now() -> None:
    clock = Clock()
    limits = limited(clock, rate=1.0, burst=1)
    limits.after("q", DRY, limits.settles("q"))
    assert limits.learn("q", Limit(rate=1.0, burst=1)) is False
    assert not limits.open("q")
    assert limits.learn("q", Limit(rate=2.0, burst=1)) is True
    assert limits.open("q")
    limits.after("q", DRY, limits.settles("q"))
    assert limits.learn("q", Limit()) is True
    assert limits.limit("q") is None
    assert limits.open("q")


def test_a_limit_that_binds_is_told_once_and_again_after_a_calm_time_and_only_where_something_waits() -> None:
    clock = Clock()
    limits = limited(clock, running=5)
    asked: list[bool] = []

    def waits(answer: bool) -> Any:
        return lambda: asked.append(answer) or answer

    def binds(granted: Granted, answer: bool = True) -> bool:
        limits.after("q", granted, limits.settles("q"))
        return limits.begins("q", waits(answer))

    assert not binds(ROOM)
    assert not binds(BOUND, answer=False)
    assert not binds(BOUND), "not asked again at once"
    assert asked == [False]
    clock.now += 1.1
    assert binds(BOUND)
    for _ in range(100):
        clock.now += 0.9
        assert not binds(BOUND)
    assert asked == [False, True]
    clock.now += CALM
    assert not binds(ROOM)
    assert binds(BOUND)


def test_a_claimer_is_told_that_a_job_has_ended_during_its_claim() -> None:
    limits = limited(Clock(), running=5)
    settles = limits.settles("q")
    assert limits.settled("q") is False, "whether that matters is not known yet"
    assert limits.after("q", BOUND, settles) is True
    assert limits.after("q", BOUND, limits.settles("q")) is False


def test_a_queue_that_somebody_else_claims_from_is_asked_again_soon_and_less_and_less_often() -> None:
    clock = Clock()
    limits = limited(clock, running=5)
    busy = Granted([], True, None, 0.0, busy=True)
    waits = []
    for _ in range(12):
        assert limits.after("q", busy, limits.settles("q")) is False
        assert not limits.open("q")
        waits.append(limits.due_in() or 0.0)
        clock.now += 1.0
    assert waits[0] <= 0.002
    assert 0.05 <= waits[-1] <= 0.1
    limits.after("q", ROOM, limits.settles("q"))
    limits.after("q", busy, limits.settles("q"))
    assert (limits.due_in() or 0.0) <= 0.002

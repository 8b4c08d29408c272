"""Whether a worker is fit, under a clock that is moved by hand."""

from __future__ import annotations

import pytest

from pgqueue.ops.worker import Peer
from pgqueue.worker.fitness import PROBE_WEIGHT, UNFIT_SECONDS, Fitness


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def suspects(clock: Clock, attempts: int = 10) -> Fitness:
    fitness = Fitness(attempts, clock=clock)
    for number in range(attempts):
        fitness.failed(number, "q", "ImportError")
        clock.now += UNFIT_SECONDS / (attempts - 1)
    assert fitness.suspect() == ["q"]
    return fitness


def test_a_worker_is_suspect_only_after_enough_failures_of_enough_jobs_over_enough_time() -> None:
    clock = Clock()
    few, same, off = (Fitness(attempts, clock=clock) for attempts in (11, 10, 0))
    for number in range(10):
        few.failed(number, "q", "ImportError")
        same.failed(number % 2, "q", "ImportError")
        off.failed(number, "q", "ImportError")
        clock.now += UNFIT_SECONDS
    assert [one.suspect() for one in (few, same, off)] == [[], [], []]
    quick = Fitness(10, clock=clock)
    for number in range(10):
        quick.failed(number, "q", "ImportError")
        clock.now += (UNFIT_SECONDS - 1) / 9
    assert quick.suspect() == []
    clock.now += 1
    quick.failed(11, "q", "ImportError")
    assert quick.suspect() == ["q"]


def test_a_failed_probe_weighs_as_much_as_what_its_pause_spared() -> None:
    clock = Clock()
    fitness = Fitness(3 * PROBE_WEIGHT, clock=clock)
    for number in range(3):
        clock.now += UNFIT_SECONDS
        assert fitness.suspect() == []
        fitness.failed(number, "q", "ImportError", probe=True)
    assert fitness.suspect() == ["q"]


def test_it_is_unfit_when_a_peer_has_completed_jobs_since_the_first_look() -> None:
    fitness = suspects(Clock())
    assert fitness.judge(["q"], [Peer(7, "q", 500, True)]) is None
    assert fitness.judge(["q"], [Peer(7, "q", 500, True)]) is None
    verdict = fitness.judge(["q"], [Peer(7, "q", 501, True)])
    assert verdict is not None
    assert (verdict.failures, verdict.queues, verdict.reason) == (10, ["q"], "ImportError")
    assert verdict.seconds >= UNFIT_SECONDS


def test_a_peer_that_came_later_proves_it_too() -> None:
    fitness = suspects(Clock())
    assert fitness.judge(["q"], []) is None
    assert fitness.judge(["q"], [Peer(8, "q", 1, True)]) is not None


@pytest.mark.parametrize(
    "peers",
    [[], [Peer(7, "q", 501, False)], [Peer(7, "other", 501, True)], [Peer(7, "q", 3, True)]],
    ids=[
        "alone",
        "a peer that is gone or held back itself",
        "a queue that does not fail here",
        "a counter that went back",
    ],
)
def test_it_stays_when_nobody_does_better(peers: list[Peer]) -> None:
    fitness = suspects(Clock())
    assert fitness.judge(["q"], [Peer(7, "q", 500, True)]) is None
    assert fitness.judge(["q"], peers) is None


def test_a_queue_that_begins_to_fail_later_is_first_looked_at_too() -> None:
    fitness = suspects(Clock())
    assert fitness.judge(["q"], [Peer(7, "q", 500, True)]) is None
    fitness.failed(99, "other", "ImportError")
    assert fitness.judge(["other", "q"], [Peer(7, "other", 900, True), Peer(7, "q", 500, True)]) is None
    verdict = fitness.judge(["other", "q"], [Peer(7, "other", 901, True), Peer(7, "q", 500, True)])
    assert verdict is not None
    assert verdict.queues == ["other"]


def test_one_success_clears_all_suspicion() -> None:
    fitness = suspects(Clock())
    assert fitness.judge(["q"], [Peer(7, "q", 500, True)]) is None
    fitness.worked = True
    assert fitness.suspect() == []
    assert fitness.judge(["q"], [Peer(7, "q", 600, True)]) is None

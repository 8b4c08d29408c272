"""The ledger: a job leaves it exactly once, and nothing that is held is forgotten."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime

from pgqueue.current import CurrentJob
from pgqueue.job import Job
from pgqueue.worker.ledger import Ledger, Phase, Start


def make(job_id: int, token: int = 1) -> Job:
    return Job(job_id, "q", "t", token, 1, 3, 0, 0, job_id, None, datetime.now(UTC), None, None, None, None)


def current(job: Job) -> CurrentJob:
    return CurrentJob(job, lambda _job, _seconds: None)


def later() -> float:
    return time.monotonic() + 60


def test_a_job_that_outlived_its_lease_in_the_buffer_is_given_back_and_not_forgotten() -> None:
    ledger = Ledger()
    [held] = ledger.add([make(1)], time.monotonic() - 1)
    assert ledger.begin(held, current(held.job)) is Start.GIVE_BACK
    ledger.renew([1], later())  # a beat that was sent before the deadline is answered after it
    assert held.phase is Phase.SETTLING
    assert not ledger.take(held)


def test_a_job_that_was_cancelled_in_the_buffer_does_not_start() -> None:
    ledger = Ledger()
    [held] = ledger.add([make(1)], later())
    assert ledger.request_cancel(1, [1, 99]) == [held]
    assert ledger.request_cancel(1, [1]) == []
    assert ledger.begin(held, current(held.job)) is Start.GIVE_BACK


def test_only_one_outcome_is_taken() -> None:
    ledger = Ledger()
    [held] = ledger.add([make(1)], later())
    assert ledger.begin(held, current(held.job)) is Start.RUN
    assert ledger.take(held)
    assert not ledger.take(held)
    assert ledger.take_all(Phase.WAITING, Phase.RUNNING) == []
    assert ledger.lose([1]) == []


def test_a_lost_lease_takes_what_waits_and_runs_but_not_what_is_being_written() -> None:
    ledger = Ledger()
    waiting, running, settling = ledger.add([make(1), make(2), make(3)], later())
    assert ledger.begin(running, current(running.job)) is Start.RUN
    assert ledger.take(settling)
    assert ledger.lose([1]) == [waiting, running]
    assert len(ledger) == 1
    assert ledger.begin(waiting, current(waiting.job)) is Start.GONE
    assert not ledger.take(running)


def test_an_extension_is_not_taken_back_by_a_beat() -> None:
    ledger = Ledger()
    [held] = ledger.add([make(1)], time.monotonic() + 1)
    ledger.renew([1], time.monotonic() + 600)
    ledger.renew([1], time.monotonic() + 30)
    assert held.lease.deadline > time.monotonic() + 500


def test_a_token_is_finished_with_its_last_job() -> None:
    ledger = Ledger()
    one, two = ledger.add([make(1), make(2)], later())
    assert ledger.finished([one]) == []
    assert ledger.finished([one, two]) == [1]
    ledger.remove([one])
    assert ledger.finished([two]) == [1]
    ledger.remove([two])
    assert (len(ledger), ledger.tokens()) == (0, {})


def test_a_lease_that_was_renewed_in_the_last_moment_is_not_given_up() -> None:
    ledger = Ledger()
    [kept] = ledger.add([make(1, token=1)], time.monotonic() - 1)
    [gone] = ledger.add([make(2, token=2)], time.monotonic() - 1)
    ledger.renew([1], later())
    assert ledger.lose_expired(time.monotonic()) == [gone]
    assert ledger.begin(kept, current(kept.job)) is Start.RUN


def test_an_outcome_that_cannot_be_written_yet_does_not_keep_the_fence_awake() -> None:
    ledger = Ledger()
    waiting, settling = ledger.add([make(1), make(2)], time.monotonic() - 1)
    assert ledger.take(settling)
    assert ledger.first_deadline() < time.monotonic()
    assert ledger.lose_expired(time.monotonic()) == [waiting]
    assert ledger.first_deadline() == math.inf
    assert ledger.lose_expired(time.monotonic()) == []
    assert ledger.finished([settling]) == [1]

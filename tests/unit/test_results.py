"""Results and doubts without a database: which statements are used, when one looks again."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from pgqueue import current
from pgqueue.errors import PgQueueError
from pgqueue.ops import settle
from pgqueue.outcome import COMPLETED, Outcome, OutcomeKind
from pgqueue.result import Kept
from pgqueue.worker.channel import outcome_message, read_outcome
from pgqueue.worker.doubts import FIRST_PAUSE, LONGEST_PAUSE, Doubt, Doubts
from pgqueue.worker.ledger import Held, Ledger
from pgqueue.worker.trickle import Trickle
from tests.unit.test_ledger import make
from tests.unit.test_ops import OPTIONS, drive, job
from tests.waiting import wait_until

KEPT = Outcome(OutcomeKind.COMPLETED, kept=Kept(60.0, "1"))


def test_completions_without_results_go_through_the_statement_that_knows_of_none() -> None:
    pairs = [(job(number), KEPT if number % 3 == 0 else COMPLETED) for number in range(9)]
    pairs.append((job(10), Outcome(OutcomeKind.DISCARD, reason="x")))
    steps, settled = drive(
        settle.settle("q", pairs, finished=[7], options=OPTIONS),
        iter([[(1, None, False)], [(3, None, True)], [(6, None, False)]]),
    )
    assert [step.name for step in steps] == ["job_complete_kept", "job_complete_kept", "job_complete"]
    discarded, kept, plain = (step.params for step in steps)
    assert (discarded["state"], discarded["reasons"], discarded["seconds"]) == ("discarded", ["x"], [-1.0])
    assert (kept["state"], kept["ids"], kept["values"], kept["seconds"]) == (
        *("completed", [0, 3, 6], ["1"] * 3, [60.0] * 3),
    )
    assert plain["ids"] == [1, 2, 4, 5, 7, 8]
    assert set(plain) == {"queue", "ids", "tokens", "archive", "state", "reasons", "leases", "lanes_channel"}
    assert [step.params["leases"] for step in steps] == [[], [], [7]], "the lease goes with its last jobs"
    assert settled == settle.Settled([], True)


def test_results_alone_take_their_leases_with_them() -> None:
    steps, _ = drive(settle.settle("q", [(job(1), KEPT)], finished=[7], options=OPTIONS), iter([[(1, None, False)]]))
    assert [(step.name, step.params["leases"]) for step in steps] == [("job_complete_kept", [7])]


@pytest.mark.parametrize("kept", [None, Kept(1.5, "null"), Kept(2.0, None, "why")])
def test_an_outcome_comes_out_of_a_child_as_it_was(kept: Kept | None) -> None:
    outcome = Outcome(OutcomeKind.COMPLETED, kept=kept)
    assert read_outcome(outcome_message(outcome)) == outcome
    with pytest.raises((TypeError, ValueError)):
        read_outcome(["completed", 0.0, None, None, False, [1.0, 5, None]])


def held(job_id: int, token: int = 1) -> Held:
    return Ledger().add([make(job_id, token)], time.monotonic() + 60)[0]


def test_doubts_are_looked_into_at_once_and_then_less_and_less_often() -> None:
    now = [100.0]
    doubts = Doubts(lambda: now[0])
    assert doubts.due_in() == math.inf
    doubt = Doubt(held(1), COMPLETED, None)
    doubts.add(doubt)
    pauses = []
    for _ in range(10):
        assert doubts.due_in() == 0
        assert doubts.due() == {"q": [doubt]}
        doubts.still_open([doubt])
        assert doubts.due() == {}
        pauses.append(doubts.due_in())
        now[0] += pauses[-1] + 1e-6
    assert pauses[0] == pytest.approx(FIRST_PAUSE)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)
    assert all(earlier <= later + 1e-6 for earlier, later in itertools.pairwise(pauses))
    assert len(doubts) == 1
    doubts.settled([doubt])
    assert (len(doubts), doubts.due_in()) == (0, math.inf)


def test_two_claims_of_one_job_are_never_in_one_look() -> None:
    doubts = Doubts()
    old, new = Doubt(held(1, 5), COMPLETED, None), Doubt(held(1, 6), COMPLETED, None)
    other = Doubt(held(0, 5), COMPLETED, None)
    for doubt in (old, new, other):
        doubts.add(doubt)
    first = doubts.due()["q"]
    assert first == [other, old]
    doubts.settled(first)
    assert doubts.due() == {"q": [new]}


def test_a_trickle_sends_the_latest_of_each_job_and_flushes_what_waits() -> None:
    sent: list[tuple[int, int]] = []
    trickle = Trickle(lambda number, id, token: sent.append((id, number)))  # noqa: A006 - as it stands in the message
    for number in range(10_000):
        trickle.put(make(1), number=number)
        trickle.put(make(2), number=-number)
    trickle.flush()
    assert dict(sent) == {1: 9999, 2: -9999}
    assert len(sent) < 200
    trickle.put(make(1), number=1)
    wait_until(lambda: sent[-1] == (1, 1), 10, "it is sent without a flush")


def test_only_the_first_settling_of_a_job_by_its_handler_counts() -> None:
    mine = current.CurrentJob(make(1), lambda _job, _seconds: None)
    assert current.settles_itself([make(1)]) == [], "no job runs here"
    token = current.enter(mine)
    try:
        assert current.settles_itself([make(2), make(1, token=9)]) == []
        assert mine.stage is current.Stage.WORKER
        mine.enter_block()
        with pytest.raises(PgQueueError, match="completes its job"):
            current.settles_itself([make(1)])
        mine.leave_block()
        assert current.settles_itself([make(2), make(1)]) == [mine]
        assert mine.stage is current.Stage.BY_HAND
        assert current.settles_itself([make(1)]) == []
        with pytest.raises(PgQueueError, match="one transaction block"):
            mine.enter_block()
    finally:
        current.leave(token)

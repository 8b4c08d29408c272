"""Operations without a database: what they ask, in which order, and what they make of the answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from pgqueue.job import Job
from pgqueue.ops import Op, Rows, Step, Stream, enqueue, rescue, settle
from pgqueue.ops.claim import HIGHEST, LOWEST, START, LowWater, claim
from pgqueue.outcome import Outcome, OutcomeKind
from pgqueue.sql import TEXTS

ENVELOPE = enqueue.Envelope(queue="q", task="t", priority=0, max_attempts=3)
OPTIONS = settle.SettleOptions()


class Clock:
    """A clock that moves by hand, and by `cost` at every reading that a pass makes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(op: Op[Any], answers: Iterator[Rows]) -> tuple[list[Step], Any]:
    steps: list[Step] = []

    def answer(step: Step) -> Rows:
        steps.append(step)
        return next(answers)

    try:
        asked = next(op)
        while True:
            rows = [row for step in asked.steps for row in answer(step)] if isinstance(asked, Stream) else answer(asked)
            asked = op.send(rows)
    except StopIteration as stop:
        return steps, stop.value


def row(job_id: int, position: int, priority: int = 0, token: int = 7) -> tuple[Any, ...]:
    return (job_id, "q", "t", token, 1, 3, 0, priority, position, None, datetime.now(UTC), "[1]", *[None] * 4)


def job(job_id: int, token: int = 7) -> Job:
    return Job._make(row(job_id, job_id, token=token))


def spans(step: Step) -> list[tuple[int, int, int]]:
    return list(zip(step.params["floors"], step.params["ceilings"], step.params["after"], strict=True))


def test_a_generator_is_read_a_chunk_at_a_time() -> None:
    read = 0

    def calls() -> Iterator[tuple[str | None, str | None]]:
        nonlocal read
        for number in range(12_000):
            read += 1
            yield f"[{number}]", None

    op = enqueue.enqueue_many(ENVELOPE, enqueue.chunked(calls()))
    stream = next(op)
    assert isinstance(stream, Stream)
    first = next(iter(stream.steps))
    assert len(first.params["args"]) == read == enqueue.CHUNK_JOBS
    _, ids = drive(
        enqueue.enqueue_many(ENVELOPE, enqueue.chunked(calls())),
        iter([[([1, 2],)], [([3],)], [([4, 5],)]]),
    )
    assert ids == [1, 2, 3, 4, 5]


def test_a_chunk_of_large_payloads_is_cut_by_bytes() -> None:
    large = "[" + "1," * (enqueue.CHUNK_BYTES // 16) + "1]"
    steps, _ = drive(enqueue.enqueue_many(ENVELOPE, enqueue.chunked([(large, None)] * 20)), iter([[([1],)]] * 20))
    assert all(len(step.params["args"]) <= 10 for step in steps)
    assert sum(len(step.params["args"]) for step in steps) == 20


def test_nothing_to_enqueue_asks_nothing() -> None:
    assert drive(enqueue.enqueue_many(ENVELOPE, []), iter([])) == ([], [])


def test_the_first_claim_is_a_full_pass_and_the_next_starts_behind_its_last_job() -> None:
    hint = LowWater(Clock())
    steps, jobs = drive(claim("q", 2, lease=30, low_water=hint), iter([[row(2, 20), row(1, 10)]]))
    assert spans(steps[0]) == [(LOWEST, HIGHEST, START)]
    assert [claimed.id for claimed in jobs] == [1, 2]
    steps, _ = drive(claim("q", 1, lease=30, low_water=hint), iter([[row(3, 30)]]))
    assert spans(steps[0]) == [(1, HIGHEST, START), (0, 0, 20), (LOWEST, -1, START)]


def test_a_hinted_claim_still_sees_every_priority() -> None:
    hint = LowWater(Clock())
    drive(claim("q", 2, lease=30, low_water=hint), iter([[row(1, 10, priority=5), row(2, 20, priority=-3)]]))
    ranges = hint.spans()
    assert ranges is not None
    covered = [priority for floor, ceiling, _ in ranges for priority in range(max(floor, -100), min(ceiling, 100) + 1)]
    assert sorted(covered) == list(range(-100, 101))
    assert covered == sorted(
        covered, key=lambda priority: next(i for i, r in enumerate(ranges) if r[0] <= priority <= r[1])
    )


def test_a_hinted_claim_that_comes_up_short_looks_from_the_start_and_returns_all_in_line() -> None:
    clock = Clock()
    hint = LowWater(clock)
    drive(claim("q", 1, lease=30, low_water=hint), iter([[row(5, 50)]]))
    steps, jobs = drive(claim("q", 3, lease=30, low_water=hint), iter([[row(6, 60)], [row(1, 10)]]))
    assert [len(spans(step)) for step in steps] == [3, 1]
    assert steps[1].params["limit"] == 2
    assert [claimed.id for claimed in jobs] == [1, 6]


def test_an_expensive_full_pass_is_not_repeated_before_twenty_times_its_cost() -> None:
    clock = Clock()
    hint = LowWater(clock)
    op = claim("q", 5, lease=30, low_water=hint)
    next(op)
    clock.now += 0.1
    with pytest.raises(StopIteration):
        op.send([])
    hint.notified()
    assert hint.spans() is not None
    assert hint.owed_in() == pytest.approx(2.0)
    clock.now += 2.01
    assert hint.spans() is None


def test_a_pass_that_was_slow_by_accident_hides_nothing_for_long() -> None:
    clock = Clock()
    hint = LowWater(clock)
    op = claim("q", 5, lease=30, low_water=hint)
    next(op)
    clock.now += 60.0
    with pytest.raises(StopIteration):
        op.send([])
    hint.notified()
    assert hint.owed_in() == 5.0


def test_what_is_notified_during_a_full_pass_is_owed_after_it() -> None:
    hint = LowWater(Clock())
    op = claim("q", 5, lease=30, low_water=hint)
    next(op)
    hint.notified()
    with pytest.raises(StopIteration):
        op.send([])
    assert hint.spans() is None


def test_what_a_first_pass_claimed_reaches_its_caller_when_the_second_fails() -> None:
    hint = LowWater(Clock(), share=0)
    drive(claim("q", 1, lease=30, low_water=hint), iter([[row(1, 10)]]))
    op = claim("q", 5, lease=30, low_water=hint, relaxed=True)
    next(op)
    op.send([row(2, 20)])
    with pytest.raises(StopIteration) as stop:
        op.throw(RuntimeError("the connection broke"))
    assert [claimed.id for claimed in stop.value.value] == [2]


def test_a_full_pass_comes_at_least_every_second_without_any_hint() -> None:
    clock = Clock()
    hint = LowWater(clock)
    drive(claim("q", 1, lease=30, low_water=hint), iter([[row(1, 10)]]))
    assert hint.spans() is not None
    clock.now += 1.01
    assert hint.spans() is None


def test_completions_come_last_and_take_the_leases_with_them() -> None:
    pairs = [
        (job(1), Outcome(kind=OutcomeKind.COMPLETED)),
        (job(2), Outcome(kind=OutcomeKind.RETRY, delay=5)),
        (job(3), Outcome(kind=OutcomeKind.RELEASE)),
        (job(4), Outcome(kind=OutcomeKind.DEAD, reason="x")),
    ]
    steps, settled = drive(
        settle.settle("q", pairs, finished=[7], options=OPTIONS),
        iter([[(1, None, False)], [(1, None, False)], [(0, None, False)], [(1, None, True)]]),
    )
    assert settled.freed
    assert [step.name for step in steps] == ["job_release", "job_retry", "job_bury", "job_complete"]
    assert steps[-1].params["leases"] == [7]
    assert [missed.id for missed in settled.lost] == [4]


def test_the_same_claim_named_twice_is_settled_once() -> None:
    done = Outcome(kind=OutcomeKind.COMPLETED)
    steps, settled = drive(
        settle.settle("q", [(job(1), done), (job(1), done)], options=OPTIONS), iter([[(1, None, False)]])
    )
    assert (len(steps), settled) == (1, ([], False))


def test_a_large_settle_is_cut_into_parts_and_frees_its_leases_with_the_last() -> None:
    done = Outcome(kind=OutcomeKind.COMPLETED)
    pairs = [(job(number), done) for number in range(2500)]
    steps, _ = drive(settle.settle("q", pairs, finished=[7], options=OPTIONS), iter([[(1000, None, False)]] * 3))
    assert [len(step.params["ids"]) for step in steps] == [1000, 1000, 500]
    assert [step.params["leases"] for step in steps] == [[], [], [7]]


def test_an_old_and_a_new_token_of_one_job_never_meet_in_one_statement() -> None:
    done = Outcome(kind=OutcomeKind.COMPLETED)
    steps, settled = drive(
        settle.settle("q", [(job(1, token=7), done), (job(1, token=8), done)], options=OPTIONS),
        iter([[(0, None, False)], [(1, None, False)]]),
    )
    assert [step.params["tokens"] for step in steps] == [[7], [8]]
    assert [missed.token for missed in settled.lost] == [7]


def test_a_rescue_goes_on_until_nothing_is_left() -> None:
    def full(first: int, at: str, last: int) -> Rows:
        """A round of as many leases as are asked for, of which so many end at the last moment of all."""
        ids = range(first, first + rescue.LEASES)
        return [(lease, "lease", None, at if lease in ids[-last:] else "before", lease in ids[-last:]) for lease in ids]

    settled: Rows = [(1, "returned", "", None, None), (2, "dead", "", None, None)]
    rounds: list[Rows] = [
        [*full(100, "noon", 2), *settled],
        full(200, "noon", 1),
        full(300, "one", 1),
        [(99, "lease", None, "two", True), (3, "cancelled", "", None, None)],
    ]
    steps, rescued = drive(rescue.rescue("q", archive=True), iter(rounds))
    assert [(step.params["after"], step.params["seen"]) for step in steps] == [
        ("-infinity", []),
        ("noon", [118, 119]),
        ("noon", [118, 119, 219]),
        ("one", [319]),
    ]
    assert rescued == ([1], [2], [3], [])


def test_every_statement_is_used_and_every_statement_that_is_used_exists() -> None:
    import re
    from pathlib import Path

    import pgqueue

    folder = Path(pgqueue.__file__).parent
    used = set()
    for path in folder.rglob("*.py"):
        used |= set(re.findall(r'Step\(\s*"(\w+)"', path.read_text(encoding="utf-8")))
    assert used == set(TEXTS)


@pytest.mark.parametrize("size", [3, 900, 2500])
def test_every_settle_names_its_ids_once_in_ascending_order_beside_their_tokens(size: int) -> None:
    wanted = [(job(number % (size - 1), token=5 + number % 3), Outcome(kind)) for number, kind in zip(
        range(size), itertools.cycle(OutcomeKind), strict=False)]  # fmt: skip
    random.Random(7).shuffle(wanted)
    steps, _ = drive(settle.settle("q", wanted, options=OPTIONS), itertools.repeat([(10**6, None, False)]))
    pairs = []
    for step in steps:
        ids, tokens = step.params["ids"], step.params["tokens"]
        assert list(ids) == sorted(set(ids))
        assert len(ids) <= settle.PART
        pairs += list(zip(ids, tokens, strict=True))
    assert sorted(pairs) == sorted({(claimed.id, claimed.token) for claimed, _ in wanted})

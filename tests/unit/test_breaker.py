"""The circuit of a queue and the fitness of a worker, under a clock that is moved by hand."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgqueue
from pgqueue.events import Bus
from pgqueue.ops.worker import Peer
from pgqueue.outcome import COMPLETED, RELEASED, Outcome, OutcomeKind, decide
from pgqueue.worker import WorkerOptions
from pgqueue.worker.breaker import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PROBE_WEIGHT,
    UNFIT_SECONDS,
    WITHIN,
    Breaker,
    Change,
    Circuit,
    Fitness,
    failure_of,
)
from pgqueue.worker.ledger import Held, Ledger, Phase

NOW = datetime.now(UTC)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def a_job(job_id: int = 1, *, attempt: int = 1, token: int = 1) -> pgqueue.Job:
    return pgqueue.Job(job_id, "q", "work", token, attempt, 5, 0, 0, 1, None, NOW, None, None, None, None)


def a_circuit(clock: Clock, failures: int = 3) -> Circuit:
    return Circuit(failures, clock=clock, jitter=lambda: 0.0)


def opened(clock: Clock, failures: int = 3) -> Circuit:
    circuit = a_circuit(clock, failures)
    for token in range(failures):
        change = circuit.failed("ValueError", token)
    assert change == Change(opened=True, reason="ValueError", failures=failures, pause=FIRST_PAUSE)
    return circuit


def probe(circuit: Circuit, clock: Clock, token: int) -> None:
    """Wait until a probe is due, and claim one."""
    clock.now += circuit.due_in() or 0.0
    assert circuit.allowed(50) == 1
    assert circuit.admits([token])


def test_so_many_failures_in_a_row_open_it_and_one_less_does_not() -> None:
    circuit = a_circuit(Clock())
    assert [circuit.failed("ValueError", token) for token in range(2)] == [None, None]
    assert (circuit.open, circuit.allowed(50)) == (False, 50)
    assert circuit.failed("ValueError", 3) is not None
    assert (circuit.open, circuit.allowed(50)) == (True, 0)


def test_a_success_in_between_starts_the_count_anew() -> None:
    circuit = a_circuit(Clock())
    for token in range(50):
        assert circuit.failed("ValueError", token) is None
        circuit.succeeded = token % 2 == 1


def test_another_reason_starts_the_count_anew() -> None:
    circuit = a_circuit(Clock())
    for token in range(50):
        assert circuit.failed(("ValueError", "ValueError", "KeyError")[token % 3], token) is None


def test_failures_that_are_further_apart_than_a_minute_in_all_do_not_open_it() -> None:
    clock = Clock()
    circuit = a_circuit(clock)
    for token in range(50):
        assert circuit.failed("ValueError", token) is None
        clock.now += WITHIN / 2 + 1


def test_a_circuit_of_no_failures_never_opens() -> None:
    circuit = a_circuit(Clock(), failures=0)
    assert [change for token in range(500) if (change := circuit.failed("ValueError", token))] == []


def test_after_the_pause_one_job_is_claimed_and_no_other_before_it_has_ended() -> None:
    clock = Clock()
    circuit = opened(clock)
    assert circuit.due_in() == FIRST_PAUSE
    clock.now += FIRST_PAUSE - 0.01
    assert circuit.allowed(50) == 0
    clock.now += 0.01
    assert circuit.allowed(50) == 1
    assert circuit.due_in() is None, "a probe that finds nothing comes again with the usual poll"
    assert circuit.allowed(50) == 1
    assert circuit.admits([77])
    assert circuit.allowed(50) == 0


def test_a_probe_that_is_completed_closes_it_and_the_next_pause_is_the_first_again() -> None:
    clock = Clock()
    circuit = opened(clock)
    probe(circuit, clock, 77)
    assert circuit.completed(77) == Change(opened=False, seconds=FIRST_PAUSE)
    assert (circuit.open, circuit.allowed(50), circuit.due_in()) == (False, 50, None)
    assert [change and change.pause for change in (circuit.failed("ValueError", n) for n in range(3))][
        -1
    ] == FIRST_PAUSE


def test_each_probe_that_fails_for_any_reason_doubles_the_pause_up_to_a_minute() -> None:
    clock = Clock()
    circuit = opened(clock)
    pauses, failures = [], 0
    for token in range(100, 110):
        probe(circuit, clock, token)
        change = circuit.failed(f"Error{token}", token)
        assert change is not None
        assert (change.opened, change.again, change.reason) == (True, True, f"Error{token}")
        pauses.append(change.pause)
        failures = change.failures
    assert pauses == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0, 60.0]
    assert failures == 13


def test_what_ran_when_it_opened_decides_nothing() -> None:
    clock = Clock()
    circuit = opened(clock)
    assert circuit.failed("ValueError", 50) is None
    assert circuit.completed(51) is None
    assert (circuit.open, circuit.due_in()) == (True, FIRST_PAUSE)


def test_a_probe_without_an_answer_is_followed_by_the_next_a_pause_later() -> None:
    clock = Clock()
    circuit = opened(clock)
    probe(circuit, clock, 77)
    clock.now += FIRST_PAUSE
    assert circuit.allowed(50) == 1
    assert circuit.admits([78])
    assert circuit.completed(77) is not None, "the first one may still answer"


def test_a_probe_that_says_nothing_is_followed_by_the_next_at_once() -> None:
    clock = Clock()
    circuit = opened(clock)
    probe(circuit, clock, 77)
    circuit.undecided(77)
    assert circuit.due_in() == 0.0
    assert circuit.allowed(50) == 1


def test_what_a_claim_brings_that_was_under_way_when_it_opened_is_not_admitted() -> None:
    clock = Clock()
    circuit = a_circuit(clock)
    assert circuit.allowed(50) == 50
    for token in range(3):
        circuit.failed("ValueError", token)
    assert not circuit.admits([9])


@given(jitter=st.floats(0.0, 1.0))
def test_the_jitter_shortens_a_pause_by_a_quarter_at_most(jitter: float) -> None:
    clock = Clock()
    circuit = Circuit(1, clock=clock, jitter=lambda: jitter)
    change = circuit.failed("ValueError", 0)
    for token in range(20):
        assert change is not None
        full = min(LONGEST_PAUSE, FIRST_PAUSE * 2**token)
        assert full * 0.75 <= change.pause <= full
        probe(circuit, clock, token)
        change = circuit.failed("ValueError", token)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["fail", "other", "complete", "claim"]), st.floats(0.0, 5.0)), max_size=200
    ),
    failures=st.integers(1, 6),
)
def test_while_it_is_open_no_more_than_one_job_per_pause_is_let_through(
    steps: list[tuple[str, float]], failures: int
) -> None:
    clock = Clock()
    circuit = a_circuit(clock, failures)
    running: list[int] = []
    let_through: list[float] = []
    streak, reason_before, streak_times = 0, "", [0.0]
    for token, (step, seconds) in enumerate(steps):
        clock.now += seconds
        if step == "claim":
            was_open = circuit.open
            wanted = circuit.allowed(5)
            assert wanted in ((0, 1) if was_open else (5,))
            if wanted and circuit.admits([token]):
                running.append(token)
                if was_open:
                    assert not let_through or clock.now - let_through[-1] >= 0.75 * FIRST_PAUSE
                    let_through.append(clock.now)
        elif running:
            ended = running.pop(0)
            if step == "complete":
                circuit.succeeded, streak = True, 0
                if circuit.completed(ended):
                    let_through.clear()
                    reason_before = ""
                continue
            was_open = circuit.open
            reason = "ValueError" if step == "fail" else "KeyError"
            change = circuit.failed(reason, ended)
            if was_open:
                continue
            streak = streak + 1 if reason == reason_before else 1
            streak_times = [*streak_times[-streak:], clock.now] if streak > 1 else [clock.now]
            reason_before = reason
            due = streak >= failures and clock.now - streak_times[-failures] <= WITHIN
            assert (change is not None) == due


def test_what_counts_as_a_failure_is_an_exception_and_not_an_answer() -> None:
    def of(error: BaseException, attempt: int = 1) -> str | None:
        return failure_of(decide(a_job(attempt=attempt), error, random=0.5))

    assert of(ValueError("x")) == "ValueError"
    assert of(ValueError("x"), attempt=5) == "ValueError"
    assert of(pgqueue.DeadLetter("hopeless")) == "pgqueue.outcome.DeadLetter"
    assert of(pgqueue.Retry()) == "pgqueue.outcome.Retry"
    assert of(pgqueue.Retry(delay=5)) is None
    assert of(pgqueue.Retry(delay=5), attempt=5) is None
    assert of(pgqueue.Snooze(1)) is None
    assert of(pgqueue.Discard()) is None
    assert failure_of(RELEASED) is None
    assert failure_of(COMPLETED) is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"type": 5}', "null"])
def test_an_error_that_cannot_be_read_is_a_failure_all_the_same(text: str | None) -> None:
    assert failure_of(Outcome(OutcomeKind.RETRY, error_json=text)) == ("5" if text and "5" in text else "unknown")


class Floor:
    """A breaker over a real ledger; `written` is what reached the settler."""

    def __init__(self, failures: int) -> None:
        self.ledger = Ledger()
        self.events: list[pgqueue.Event] = []
        bus = Bus()
        bus.subscribe(self.events.append)
        self.written: list[tuple[int, OutcomeKind]] = []
        options = WorkerOptions(queues=("q", "other"), breaker_failures=failures)
        self.breaker = Breaker(("q", "other"), self.ledger, bus, options, self.submit)

    def submit(self, held: Held, outcome: Outcome) -> None:
        self.written.append((held.job.id, outcome.kind))

    def claim(self, job_id: int, queue: str = "q") -> Held:
        return self.ledger.add([a_job(job_id, token=job_id)._replace(queue=queue)], 1e12)[0]

    def fail(self, held: Held) -> None:
        assert self.ledger.take(held)
        self.breaker.finish(held, decide(held.job, ValueError("x"), random=0.5))


def test_what_waits_of_the_queue_is_released_when_its_circuit_opens_and_nothing_else_is() -> None:
    floor = Floor(failures=2)
    first, second, waiting, foreign = (floor.claim(1), floor.claim(2), floor.claim(3), floor.claim(4, "other"))
    floor.fail(first)
    assert waiting.phase is Phase.WAITING
    floor.fail(second)
    assert floor.written == [(1, OutcomeKind.RETRY), (2, OutcomeKind.RETRY), (3, OutcomeKind.RELEASE)]
    assert foreign.phase is Phase.WAITING
    assert floor.breaker.circuits["other"].allowed(7) == 7
    [report] = floor.breaker.report()
    assert (report.queue, report.reason, report.failures) == ("q", "ValueError", 2)
    [event] = floor.events
    assert event.name is pgqueue.EventName.QUEUE_CIRCUIT_OPENED
    assert (event.facts["queue"], event.facts["reason"], event.facts["failures"]) == ("q", "ValueError", 2)


def test_answers_of_handlers_neither_open_a_circuit_nor_end_a_row_of_failures() -> None:
    floor = Floor(failures=3)
    answers = [pgqueue.Snooze(1), pgqueue.Discard(), pgqueue.Retry(delay=1)]
    for number in range(30):
        held = floor.claim(number)
        assert floor.ledger.take(held)
        floor.breaker.finish(held, decide(held.job, answers[number % 3], random=0.5))
    assert floor.events == []
    floor.fail(floor.claim(100))
    floor.fail(floor.claim(101))
    held = floor.claim(102)
    assert floor.ledger.take(held)
    floor.breaker.finish(held, decide(held.job, pgqueue.Snooze(1), random=0.5))
    floor.fail(floor.claim(103))
    assert [event.name for event in floor.events] == [pgqueue.EventName.QUEUE_CIRCUIT_OPENED]


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

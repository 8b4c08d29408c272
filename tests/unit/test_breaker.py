"""The circuits of a queue, under a clock that is moved by hand."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgqueue
from pgqueue.events import Bus
from pgqueue.outcome import COMPLETED, RELEASED, Outcome, OutcomeKind, decide
from pgqueue.worker import WorkerOptions
from pgqueue.worker.breaker import Breaker, failure_of
from pgqueue.worker.circuit import FIRST_PAUSE, LONGEST_PAUSE, TASKS_KNOWN, WITHIN, Change, Circuit, Circuits
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
    assert circuit.claimable()
    assert circuit.admits(token)


def test_so_many_failures_in_a_row_open_it_and_one_less_does_not() -> None:
    circuit = a_circuit(Clock())
    assert [circuit.failed("ValueError", token) for token in range(2)] == [None, None]
    assert (circuit.open, circuit.claimable()) == (False, True)
    assert circuit.failed("ValueError", 3) is not None
    assert (circuit.open, circuit.claimable()) == (True, False)


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
    assert not circuit.claimable()
    clock.now += 0.01
    assert circuit.claimable()
    assert circuit.due_in() is None, "a probe that finds nothing comes again with the usual poll"
    assert circuit.claimable()
    assert circuit.admits(77)
    assert not circuit.admits(77), "the others of the same claim go back"
    assert not circuit.claimable()


def test_a_probe_that_is_completed_closes_it_and_the_next_pause_is_the_first_again() -> None:
    clock = Clock()
    circuit = opened(clock)
    probe(circuit, clock, 77)
    assert circuit.completed(77) == Change(opened=False, seconds=FIRST_PAUSE)
    assert (circuit.open, circuit.claimable(), circuit.due_in()) == (False, True, None)
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
    assert circuit.claimable()
    assert circuit.admits(78)
    assert circuit.completed(77) is not None, "the first one may still answer"


def test_a_probe_that_says_nothing_is_followed_by_the_next_at_once() -> None:
    clock = Clock()
    circuit = opened(clock)
    probe(circuit, clock, 77)
    circuit.undecided(77)
    assert circuit.due_in() == 0.0
    assert circuit.claimable()


def test_what_a_claim_brings_that_was_under_way_when_it_opened_is_not_admitted() -> None:
    clock = Clock()
    circuit = a_circuit(clock)
    assert circuit.claimable()
    for token in range(3):
        circuit.failed("ValueError", token)
    assert not circuit.admits(9)


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
            wanted = circuit.claimable()
            assert wanted or was_open
            if wanted and circuit.admits(token):
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

    def claim(self, job_id: int, queue: str = "q", task: str = "work") -> Held:
        return self.ledger.add([a_job(job_id, token=job_id)._replace(queue=queue, task=task)], 1e12)[0]

    def fail(self, held: Held) -> None:
        assert self.ledger.take(held)
        self.breaker.finish(held, decide(held.job, ValueError("x"), random=0.5))


def test_what_waits_of_the_task_is_released_when_its_circuit_opens_and_nothing_else_is() -> None:
    floor = Floor(failures=2)
    first, second, waiting, foreign = (floor.claim(1), floor.claim(2), floor.claim(3), floor.claim(4, "other"))
    healthy = floor.claim(5, task="healthy")
    floor.fail(first)
    assert waiting.phase is Phase.WAITING
    floor.fail(second)
    assert floor.written == [(1, OutcomeKind.RETRY), (2, OutcomeKind.RETRY), (3, OutcomeKind.RELEASE)]
    assert foreign.phase is Phase.WAITING
    assert healthy.phase is Phase.WAITING
    assert (floor.breaker.circuits["q"].left_out(), floor.breaker.circuits["other"].left_out()) == (["work"], [])
    [report] = floor.breaker.report()
    assert (report.queue, report.task, report.reason, report.failures) == ("q", "work", "ValueError", 2)
    [event] = floor.events
    assert event.name is pgqueue.EventName.TASK_CIRCUIT_OPENED
    assert (event.facts["queue"], event.facts["task"], event.facts["reason"]) == ("q", "work", "ValueError")
    assert event.facts["failures"] == 2


def test_failures_of_one_task_do_not_count_for_another_and_successes_neither() -> None:
    floor = Floor(failures=3)
    for number in range(2):
        floor.fail(floor.claim(10 + number, task="a"))
        floor.fail(floor.claim(20 + number, task="b"))
        held = floor.claim(30 + number, task="c")
        assert floor.ledger.take(held)
        floor.breaker.finish(held, COMPLETED)
    assert floor.events == []
    floor.fail(floor.claim(12, task="a"))
    assert floor.breaker.circuits["q"].left_out() == ["a"]
    held = floor.claim(22, task="b")
    assert floor.ledger.take(held)
    floor.breaker.finish(held, COMPLETED)
    floor.fail(floor.claim(23, task="b"))
    assert floor.breaker.circuits["q"].left_out() == ["a"]


def test_names_of_tasks_without_end_do_not_fill_the_memory_and_an_open_circuit_is_not_forgotten() -> None:
    circuits = Circuits(1, lambda task: None)
    circuits.of("down").failed("ValueError", 1)
    for number in range(3 * TASKS_KNOWN):
        circuits.of(f"task {number}")
    assert len(circuits.by_task) <= TASKS_KNOWN
    assert circuits.left_out() == ["down"]


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
    assert [event.name for event in floor.events] == [pgqueue.EventName.TASK_CIRCUIT_OPENED]

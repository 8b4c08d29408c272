"""Batches without a database: what may be declared, how groups form, how much room a worker has, what a handler says."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

import pytest

import pgqueue
from pgqueue import ConfigurationError
from pgqueue.events import Bus
from pgqueue.job import Job
from pgqueue.outcome import Outcome, OutcomeKind
from pgqueue.worker.batch_call import results
from pgqueue.worker.batches import Batches, Group
from pgqueue.worker.desk import NoResult
from pgqueue.worker.ledger import Held, Ledger, Phase
from tests.waiting import wait_until

PATIENCE = 60.0
LATER = 600.0


# What may be declared


def pair(left: int, right: int) -> None: ...


def uses_a_word(using: int) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 0}, "batch must be a whole number between 1 and 1000"),
        ({"batch": 1001}, "batch must be a whole number between 1 and 1000"),
        ({"batch": True}, "batch must be a whole number"),
        ({"batch": 2.0}, "batch must be a whole number"),
        ({"batch": 2, "batch_wait": -1}, "batch_wait must be a number of seconds"),
        ({"batch": 2, "batch_wait": math.nan}, "batch_wait must be a number of seconds"),
        ({"batch": 2, "batch_wait": timedelta(seconds=-1)}, "batch_wait must be between 0 seconds and an hour"),
        ({"batch": 2, "batch_wait": 3601}, "batch_wait must be between 0 seconds and an hour"),
        ({"batch_wait": 1}, "batch_wait belongs to a batch task: give batch=… too"),
        ({"payload": pair}, "payload belongs to a batch task: give batch=… too"),
        ({"batch": 2, "payload": 5}, "payload must be a callable"),
        ({"batch": 2, "payload": type}, "has no signature to be read"),
        ({"batch": 2, "payload": uses_a_word}, "a parameter may not be called 'using'"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_where_it_is_declared(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        pgqueue.PgQueue().task(name="work", **options)(lambda jobs: None)


def test_a_function_that_does_not_take_one_argument_is_no_batch_handler() -> None:
    task = pgqueue.PgQueue().task(name="work", batch=2)
    says = "a batch handler is called with one argument, the jobs of the batch"
    for function in (lambda: None, lambda jobs, more: None, lambda *, jobs: None):
        with pytest.raises(ConfigurationError, match=says):
            task(function)

    def generator(jobs: pgqueue.Batch) -> Any:
        yield jobs

    with pytest.raises(ConfigurationError, match="is a generator"):
        task(generator)


def test_what_belongs_to_a_batch_task_is_no_option_of_a_call() -> None:
    work = pgqueue.PgQueue().task(name="work", batch=2)(lambda jobs: None)
    for name, value in (("batch", 3), ("batch_wait", 1), ("payload", pair)):
        with pytest.raises(ConfigurationError, match=f"{name} belongs to the task, not to a call"):
            work.options(**{name: value})
    assert type(work.options(delay=5)) is pgqueue.BatchTask


def test_the_arguments_of_a_job_are_checked_against_the_payload_of_its_task() -> None:
    pq = pgqueue.PgQueue()
    checked = pq.task(name="checked", batch=2, payload=pair)(lambda jobs: None)
    free = pq.task(name="free", batch=2)(lambda jobs: None)
    checked.check((1, 2), {})
    checked.check((1,), {"right": 2})
    free.check((1, 2, 3), {"anything": 4})
    with pytest.raises(pgqueue.ArgumentsDoNotBind, match="missing a required argument: 'right'"):
        checked.check((1,), {})


def test_a_batch_does_not_wait_for_jobs_that_its_key_keeps_back() -> None:
    options = pgqueue.task.TaskOptions
    assert options(batch=10).batch_fill == 10
    assert options(batch=10, ordering_key="one line").batch_fill == 1
    assert options(batch=10, concurrency_key="host", concurrency_limit=3).batch_fill == 3
    assert options(batch=10, ordering_key=lambda account: f"account {account}").batch_fill == 10


# What a handler says


def test_a_batch_task_can_be_called_in_a_test() -> None:
    @pgqueue.PgQueue().task(batch=100)
    def halve(jobs: pgqueue.Batch) -> int:
        for job in jobs:
            if job.args[0] % 2:
                job.fail(ValueError("odd"))
            else:
                job.complete(job.args[0] // 2)
        return len(jobs)

    jobs = pgqueue.Batch.of([(1,), (2,), {"ignored": "é"}][:2])
    assert halve(jobs) == 2
    assert [type(job.answer) for job in jobs] == [ValueError, type(None)]
    assert [job.answered for job in jobs] == [True, True]
    assert jobs[1].result == 1
    assert pgqueue.Batch.of([{"name": "é"}])[0].kwargs == {"name": "é"}


def test_arguments_of_a_batch_in_a_test_travel_through_json() -> None:
    with pytest.raises(pgqueue.PayloadError):
        pgqueue.Batch.of([({1, 2},)])
    given = [1, 2]
    [job] = pgqueue.Batch.of([(given,)])
    assert job.args == [[1, 2]]
    assert job.args[0] is not given


def test_the_last_answer_counts_and_each_is_checked_when_it_is_given() -> None:
    [job] = pgqueue.Batch.of([()])
    assert (job.answered, job.answer) == (False, None)
    job.fail("no paper")
    assert str(job.answer) == "no paper"
    job.retry(delay=timedelta(seconds=5), reason="later")
    assert isinstance(job.answer, pgqueue.Retry)
    assert job.answer.delay == 5
    job.snooze(3)
    assert isinstance(job.answer, pgqueue.Snooze)
    job.discard("no use")
    assert isinstance(job.answer, pgqueue.Discard)
    job.dead_letter("no hope")
    assert isinstance(job.answer, pgqueue.DeadLetter)
    with pytest.raises(ConfigurationError):
        job.snooze(-1)
    with pytest.raises(ConfigurationError, match="fail takes an exception or a text, not 5"):
        job.fail(5)  # type: ignore[arg-type]
    assert str(job.answer) == "no hope"
    job.complete()
    assert (job.answered, job.answer) == (True, None)


def test_a_batch_is_a_sequence_that_hides_its_payloads() -> None:
    jobs = pgqueue.Batch.of([("secret",)] * 12)
    assert len(jobs) == 12
    assert [job.id for job in jobs[10:]] == [11, 12]
    assert jobs[-1].id == 12
    assert "secret" not in repr(jobs) + repr(jobs[0])
    assert not jobs.cancelled
    for job in jobs:
        assert not jobs.cancelled
        job.cancel()
    assert jobs.cancelled


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1, 2, 3], "3 results for 2 jobs"),
        ({"a": 1, "b": 2}, "a value of type dict for 2 jobs"),
        ("ab", "a value of type str for 2 jobs"),
        (5, "a value of type int for 2 jobs"),
    ],
)
def test_results_that_do_not_fit_the_batch_are_missing_for_all_of_it(value: object, says: str) -> None:
    jobs = pgqueue.Batch.of([(), ()])
    found = results(jobs, value, keeps=True)
    assert len(found) == 2
    assert all(isinstance(one, NoResult) and says in one.reason for one in found)
    assert results(jobs, ["a", None], keeps=True) == ["a", None]
    assert results(jobs, None, keeps=True) == [None, None]
    assert results(jobs, value, keeps=False) == [None, None]


# How groups form


class Forming:
    """Batches, the jobs of which are claimed by hand; `handed` are the groups that went to a runner."""

    def __init__(self, *, hurry: bool = False, batch: int = 3, wait: float = LATER, **options: Any) -> None:
        pq = pgqueue.PgQueue()
        pq.task(name="work", queue="q", batch=batch, batch_wait=wait, **options)(lambda jobs: None)
        pq.task(name="other", queue="other", batch=batch, batch_wait=wait)(lambda jobs: None)
        pq.task(name="plain", queue="plain")(lambda: None)
        self.ledger = Ledger()
        self.handed: list[Group] = []
        self.settled: list[tuple[int, OutcomeKind]] = []
        self.failures: list[BaseException] = []
        self.count = 0
        self.batches = Batches(
            pq.tasks,
            self.ledger,
            Bus(),
            hand_over=self.handed.append,
            submit=self._submit,
            hurry=hurry,
            fatal=lambda loop, error: self.failures.append(error),
        )

    def _submit(self, held: Held, outcome: Outcome) -> None:
        self.settled.append((held.job.id, outcome.kind))

    def claimed(self, number: int, task: str = "work", **changes: Any) -> list[Held]:
        """So many claimed jobs."""
        jobs = []
        for _ in range(number):
            self.count += 1
            job = Job(self.count, "q", task, 1, 1, 3, 0, 0, self.count, None, None, None, None, None, None)
            jobs.append(job._replace(**changes))
        return self.ledger.add(jobs, time.monotonic() + LATER)

    def add(self, number: int, task: str = "work", *, alone: bool = False, **changes: Any) -> list[Held]:
        helds = self.claimed(number, task, **changes)
        self.batches.add(helds, lambda held: alone)
        return helds

    def sizes(self) -> list[int]:
        return [len(group.helds) for group in self.handed]


def test_a_group_is_handed_over_when_it_is_full_and_the_rest_waits() -> None:
    forming = Forming()
    forming.add(7)
    assert forming.sizes() == [3, 3]
    forming.add(2)
    assert forming.sizes() == [3, 3, 3]
    ids = [[held.job.id for held in group.close()] for group in forming.handed]
    assert ids == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_groups_are_of_one_queue_and_one_task() -> None:
    forming = Forming()
    forming.add(2)
    forming.add(2, "other")
    forming.add(2, queue="elsewhere")
    assert forming.handed == []
    forming.add(1, "other")
    assert {held.job.task for held in forming.handed[0].helds} == {"other"}
    forming.add(1, queue="elsewhere")
    assert {held.job.queue for held in forming.handed[1].helds} == {"elsewhere"}


def test_a_group_that_waits_for_a_runner_takes_more_jobs_until_one_takes_it_up() -> None:
    forming = Forming(wait=0)
    forming.add(1)
    forming.add(1)
    assert forming.sizes() == [2]
    assert [held.job.id for held in forming.handed[0].close()] == [1, 2]
    forming.add(1)
    assert forming.sizes() == [2, 1]
    forming.add(3)
    assert forming.sizes() == [2, 3, 1]


def test_the_jobs_of_a_group_are_in_the_order_of_their_places() -> None:
    forming = Forming()
    forming.add(1, position=30)
    forming.add(1, position=10)
    forming.add(1, position=20, priority=5)
    assert [held.job.id for held in forming.handed[0].close()] == [3, 2, 1]


def test_a_group_is_handed_over_when_its_first_job_has_waited_long_enough() -> None:
    forming = Forming(wait=0.2)
    began = time.monotonic()
    forming.add(2)
    assert forming.handed == []
    try:
        wait_until(lambda: forming.handed, PATIENCE, "the group is handed over")
        assert time.monotonic() - began >= 0.2
        assert forming.sizes() == [2]
        forming.add(1, "other")
        wait_until(lambda: len(forming.handed) == 2, PATIENCE, "the thread goes on")
    finally:
        forming.batches.stop()
    assert forming.batches.join(PATIENCE)
    assert forming.failures == []


def test_no_thread_is_started_where_nothing_waits() -> None:
    forming = Forming(wait=0)
    forming.add(5)
    assert forming.batches._thread.ident is None
    hurried = Forming(hurry=True)
    hurried.add(2)
    assert hurried.sizes() == [2]
    assert hurried.batches._thread.ident is None


def test_a_job_that_runs_alone_gets_a_group_of_its_own_at_once() -> None:
    forming = Forming()
    forming.add(1)
    forming.add(2, alone=True)
    assert forming.sizes() == [1, 1]
    forming.add(2)
    assert forming.sizes() == [1, 1, 3]


def test_after_a_stop_nothing_is_taken_in_or_handed_over() -> None:
    forming = Forming(wait=0.05)
    waiting = forming.add(2)
    forming.batches.stop()
    assert forming.batches.join(PATIENCE)
    forming.add(3)
    assert forming.handed == []
    assert forming.settled == [(number, OutcomeKind.RELEASE) for number in (3, 4, 5)]
    assert [held.phase for held in waiting] == [Phase.WAITING] * 2, "what waits is the worker's to release"


def test_a_job_that_is_cancelled_while_its_batch_forms_ends_at_once() -> None:
    forming = Forming()
    first, second = forming.add(2)
    forming.ledger.request_cancel(1, [first.job.id])
    forming.batches.cancel(first)
    forming.batches.cancel(second)
    assert forming.settled == [(first.job.id, OutcomeKind.RELEASE)]
    assert second.phase is Phase.WAITING


# How much room there is


def test_a_queue_of_batches_gets_room_for_whole_batches_and_others_for_single_jobs() -> None:
    forming = Forming(batch=100)
    assert forming.batches.room("q", 4.0, ahead=4000) == 400
    assert forming.batches.room("plain", 4.0, ahead=4000) == 4
    assert forming.batches.room("never heard of", 4.0, ahead=4000) == 4
    assert forming.batches.room("q", 0.0, ahead=4000) == 0
    assert forming.batches.room("q", 100.0, ahead=4000) == 4000


def test_room_follows_what_claims_bring() -> None:
    forming = Forming(batch=100)
    batches = forming.batches
    assert batches.room("q", 10.0, ahead=4000) == 1000
    for _ in range(8):  # the queue holds jobs of a plain task now
        assert batches.learn("q", forming.claimed(10, "plain"), {"plain"}) == 10.0
    assert 10 <= batches.room("q", 10.0, ahead=4000) <= 11
    for _ in range(8):  # and now batches again
        assert batches.learn("q", forming.claimed(10), {"work"}) == pytest.approx(0.1)
    assert batches.room("q", 10.0, ahead=4000) > 500


def test_what_a_claim_brings_beyond_the_room_is_known() -> None:
    forming = Forming(batch=100)
    mixed = forming.claimed(100) + forming.claimed(50, "plain")
    assert forming.batches.beyond(mixed, 200.0) == []
    assert forming.batches.beyond(mixed, 10.0) == mixed[110:]
    assert forming.batches.beyond(forming.claimed(1000), 10.0) == []
    assert len(forming.batches.beyond(forming.claimed(1000, lost=1), 10.0)) == 989


def test_batches_that_wait_for_a_runner_are_counted_until_one_takes_them_up() -> None:
    forming = Forming(batch=100)
    forming.add(350)
    assert forming.sizes() == [100, 100, 100]
    assert forming.batches.room("q", 10.0, ahead=400) == 100
    for group in forming.handed:
        group.close()
    assert forming.batches.room("q", 10.0, ahead=400) == 400

"""What Django's task framework expects of a backend, and what ours adds to it."""

from __future__ import annotations

import logging
import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from django.test import override_settings
from django.utils import timezone

import pgqueue
from pgqueue.contrib.django import PgQueueBackend, PgQueueTask, queue
from pgqueue.ops.rescue import hasten
from tests.contrib.django.conftest import refreshed, work
from tests.contrib.django.settings import BACKEND, TASKS
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.framework import (
    LOGGER,
    InvalidTask,
    InvalidTaskBackend,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    default_task_backend,
    task,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from tests.waiting import wait_until
from tests.workers import running

PATIENCE = 60.0


@pytest.fixture
def signals() -> Any:
    """What the signals of the framework have said, in order: the name, the id and the state."""
    said: list[tuple[str, str, str]] = []

    def receiver(name: str) -> Any:
        def receive(sender: Any, task_result: Any, **_: Any) -> None:
            assert sender is PgQueueBackend
            said.append((name, task_result.id, str(task_result.status)))

        return receive

    known = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = {name: receiver(name) for name in known}
    for name, signal in known.items():
        signal.connect(receivers[name])
    yield said
    for name, signal in known.items():
        signal.disconnect(receivers[name])


def test_all_four_capabilities_are_there() -> None:
    backend = task_backends["default"]
    assert isinstance(backend, PgQueueBackend)
    assert backend.supports_defer
    assert backend.supports_async_task
    assert backend.supports_get_result
    assert backend.supports_priority


def test_the_decorator_of_the_framework_makes_tasks_of_ours() -> None:
    assert default_task_backend.alias == "default"
    for one in (tasks.noop, tasks.bare, tasks.noop_async):
        assert isinstance(one, PgQueueTask)
        assert one.get_backend() is task_backends["default"]
    assert tasks.noop.name == "noop"
    assert tasks.noop.module_path == "tests.contrib.django.shop.tasks.noop"
    assert tasks.meaning_of_life.call() == 42


@pytest.mark.parametrize("one", [tasks.noop, tasks.noop_async], ids=["plain", "async"])
def test_an_enqueued_task_is_ready_and_successful_when_it_has_run(one: Any, pq: pgqueue.PgQueue) -> None:
    result = one.enqueue(1, two=[3, None])
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    assert (result.task, result.args, result.kwargs, result.backend) == (one, [1], {"two": [3, None]}, "default")
    with pytest.raises(ValueError, match="not finished yet"):
        result.return_value  # noqa: B018
    work(pq)
    result.refresh()
    assert (result.status, result.is_finished, result.attempts) == ("SUCCESSFUL", True, 1)
    assert result.return_value is None
    assert result.errors == []
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at
    again = one.get_result(result.id)
    assert (again.task, again.args, again.kwargs) == (one, [1], {"two": [3, None]})


async def test_a_task_is_enqueued_and_its_result_read_in_an_event_loop(shop: str, admin: Any) -> None:
    result = await tasks.noop_async.aenqueue(1)
    assert result.status == "READY"
    await result.arefresh()
    assert (await tasks.noop_async.aget_result(result.id)).args == [1]
    assert admin.execute("SELECT id::text FROM pgqueue.job").fetchall() == [(result.id,)]


def test_results_are_what_the_functions_have_returned(pq: pgqueue.PgQueue) -> None:
    value = {"a": [1, 2.5, None, True], "é": "😀"}
    results: list[Any] = [tasks.meaning_of_life.enqueue(), tasks.echo.enqueue(value), tasks.pair.enqueue()]
    work(pq)
    for result in results:
        result.refresh()
    assert [result.return_value for result in results] == [42, value, [1, "two"]]


@pytest.mark.parametrize(
    ("one", "kind", "message"),
    [
        (tasks.fails, ValueError, "ValueError: This Task failed due to ValueError\n"),
        (tasks.exits, SystemExit, "SystemExit: This Task failed due to SystemExit\n"),
        (tasks.fails_with_an_error_in_an_error, ValueError, "ValueError: This task failed\n"),
    ],
    ids=["ValueError", "SystemExit", "an error in an error"],
)
def test_a_task_that_fails_for_good_is_failed_with_its_error(one: Any, kind: Any, message: str, shop: str) -> None:
    result = one.enqueue()
    work(queue("strict"))
    result.refresh()
    assert (result.status, result.is_finished, result.attempts) == ("FAILED", True, 1)
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert len(result.errors) == 1
    assert result.errors[0].exception_class is kind
    assert result.errors[0].traceback.startswith("Traceback (most recent call last):\n")
    assert result.errors[0].traceback.endswith(message)


def test_a_task_that_is_retried_is_ready_with_its_error_until_it_ends(pq: pgqueue.PgQueue, signals: Any) -> None:
    result: Any = tasks.fails_once.using(retry=pgqueue.Fixed(3600)).enqueue("retried")
    with running(pq, poll=0.1):  # one that drains would wait for the retry
        wait_until(lambda: refreshed(result).errors, PATIENCE, "the first attempt has failed")
    assert (result.status, result.attempts, len(result.errors)) == ("READY", 1, 1)
    assert result.errors[0].exception_class is RuntimeError
    [job] = pq.jobs()
    assert pq.run(hasten("default", [job.id], channel=None)) == [job.id]
    work(pq)
    result.refresh()
    assert (result.status, result.attempts, result.return_value) == ("SUCCESSFUL", 2, "retried")
    assert result.started_at < result.last_attempted_at
    assert [name for name, *_ in signals] == ["enqueued", "started", "started", "finished"]


def test_a_value_that_is_not_json_fails_no_work_that_is_done(pq: pgqueue.PgQueue) -> None:
    result = tasks.returns_what_is_not_json.enqueue()
    work(pq)
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", None)


def test_a_task_gets_its_context(pq: pgqueue.PgQueue) -> None:
    own_id: Any = tasks.own_id
    own_attempt: Any = tasks.own_attempt
    first, second = own_id.enqueue(), own_attempt.enqueue(2)
    work(pq)
    first.refresh()
    second.refresh()
    assert first.return_value == first.id
    assert second.return_value == 2
    with pytest.raises(pgqueue.ArgumentsDoNotBind):
        own_id.enqueue("the context is not among the arguments")


def test_what_is_not_known_does_not_exist_and_what_is_of_another_task_does_not_match(shop: str) -> None:
    result = tasks.noop.enqueue()
    for unknown in ("123456789", "no number", "", "-1", "9" * 30):
        with pytest.raises(TaskResultDoesNotExist):
            tasks.noop.get_result(unknown)
    with pytest.raises(TaskResultMismatch, match="Task does not match"):
        tasks.bare.get_result(result.id)


def test_arguments_that_are_not_json_are_refused_and_leave_nothing(pq: pgqueue.PgQueue) -> None:
    meaning_of_life: Any = tasks.meaning_of_life
    with pytest.raises(TypeError, match="Unsupported type"):
        tasks.noop.enqueue(datetime.now(UTC))
    with pytest.raises(ValueError, match="Unsupported value"):
        tasks.noop.enqueue(b"\xff")
    with pytest.raises(pgqueue.ArgumentsDoNotBind):
        meaning_of_life.enqueue("no argument was asked for")
    assert pq.jobs() == []


def test_priority_queue_and_time_are_those_of_the_job(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    later = timezone.now() + timedelta(hours=1)
    chosen = tasks.noop.using(priority=7, queue_name="slow").using(run_after=later)
    assert (tasks.noop.priority, tasks.noop.queue_name, tasks.noop.run_after) == (0, "default", None)
    result = chosen.enqueue()
    assert admin.execute("SELECT priority, queue, run_at FROM pgqueue.job").fetchall() == [(7, "slow", later)]
    assert default_task_backend.get_result(result.id).task == chosen
    assert default_task_backend.get_result(result.id).status == "READY"


@override_settings(USE_TZ=False)
def test_naive_times_are_those_of_the_application_where_it_has_no_zones(shop: str, admin: Any) -> None:
    later = datetime.now() + timedelta(hours=1)  # noqa: DTZ005 - what such an application does
    result = tasks.noop.using(run_after=later).enqueue()
    [(run_at,)] = admin.execute("SELECT run_at FROM pgqueue.job").fetchall()
    assert timezone.make_naive(run_at) == later
    found: Any = tasks.noop.get_result(result.id)
    assert timezone.is_naive(found.enqueued_at)


def test_invalid_tasks_are_refused_where_they_are_made() -> None:
    with pytest.raises(InvalidTask, match="must be an aware datetime"):
        tasks.noop.using(run_after=datetime.now())  # noqa: DTZ005
    wrong: Any
    for wrong in (-101, 101, 3.1):
        with pytest.raises(InvalidTask, match="priority must be a whole number between -100 and 100"):
            tasks.noop.using(priority=wrong)
    with pytest.raises(InvalidTask, match="Queue 'elsewhere' is not valid for backend"):
        tasks.fails.using(queue_name="elsewhere")
    for name in ("unknown", "missing"):
        with (
            override_settings(TASKS={**TASKS, "missing": {"BACKEND": "does.not.exist"}}),
            pytest.raises(InvalidTaskBackend),
        ):
            tasks.noop.using(backend=name)
    for function in (any, lambda: None):
        with pytest.raises(InvalidTask, match="must be defined at a module level"):
            task()(function)
    with pytest.raises(InvalidTask, match="does not have a first argument of 'context'"):
        task(takes_context=True)(tasks.meaning_of_life.func)


def test_a_task_is_checked_again_when_it_is_enqueued(shop: str) -> None:
    chosen = tasks.noop.using(queue_name="elsewhere")
    narrow = override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": ["default"]}})
    with narrow, pytest.raises(InvalidTask, match="Queue 'elsewhere' is not valid for backend"):
        chosen.enqueue()


def test_copies_are_equal_and_hashable() -> None:
    assert tasks.noop.using() == tasks.noop
    assert tasks.noop.using() is not tasks.noop
    assert tasks.in_order.using(max_attempts=2) != tasks.in_order
    assert len({tasks.noop, tasks.noop.using(), tasks.noop.using(priority=1)}) == 2


def test_tasks_and_results_travel_by_pickle(shop: str) -> None:
    copy = pickle.loads(pickle.dumps(tasks.send_receipt.using(timeout=60)))
    assert copy == tasks.send_receipt.using(timeout=60)
    result = tasks.noop.enqueue(1)
    assert pickle.loads(pickle.dumps(result)) == result


def test_signals_and_log_lines_are_those_of_the_framework(
    shop: str, signals: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    good, bad = tasks.noop.using(backend="strict").enqueue(), tasks.fails.enqueue()
    work(queue("strict"), concurrency=1)
    assert [said for said in signals if said[1] == good.id] == [
        ("enqueued", good.id, "READY"), ("started", good.id, "RUNNING"), ("finished", good.id, "SUCCESSFUL")]  # fmt: skip
    assert [said for said in signals if said[1] == bad.id] == [
        ("enqueued", bad.id, "READY"), ("started", bad.id, "RUNNING"), ("finished", bad.id, "FAILED")]  # fmt: skip
    lines = [record for record in caplog.records if record.name == LOGGER and f"id={bad.id} " in record.getMessage()]
    assert [record.levelname for record in lines] == ["DEBUG", "INFO", "ERROR"]
    assert "This Task failed due to ValueError" in caplog.text


def test_a_receiver_that_raises_changes_nothing_of_the_job(pq: pgqueue.PgQueue) -> None:
    def receive(**_: Any) -> None:
        raise RuntimeError("a receiver")

    task_started.connect(receive)
    try:
        results: list[Any] = [tasks.noop.enqueue(), tasks.noop_async.enqueue()]
        work(pq)
    finally:
        task_started.disconnect(receive)
    for result in results:
        result.refresh()
        assert result.status == "SUCCESSFUL"


def test_a_task_of_another_backend_is_run_where_it_is_sent(pq: pgqueue.PgQueue) -> None:
    assert tasks.of_another_backend.enqueue("here and now").return_value == "HERE AND NOW"
    result = tasks.of_another_backend.using(backend="default").enqueue("by a worker")
    assert result.status == "READY"
    work(pq)
    assert default_task_backend.get_result(result.id).return_value == "BY A WORKER"

"""What ours adds to Django's task framework: options of tasks, names, defaults, schedules."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import django
import psycopg
import pytest
from django.test import override_settings
from django.utils import timezone

import pgqueue
from pgqueue.contrib.django import queue
from pgqueue.contrib.django import task as our_task
from tests.contrib.django.conftest import refreshed, work
from tests.contrib.django.settings import BACKEND
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.framework import (
    InvalidTask,
    TaskResultDoesNotExist,
    default_task_backend,
    task,
    task_enqueued,
)


def test_options_of_ours_are_stored_with_the_job(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    tasks.send_receipt.enqueue(1)
    tasks.send_receipt.using(max_attempts=9, timeout=5, headers={"a": 1}, delay=timedelta(hours=1)).enqueue(2)
    rows = admin.execute(
        "SELECT task, queue, max_attempts, timeout, retry->>'kind', headers, run_at IS NOT NULL FROM pgqueue.job ORDER BY id"
    ).fetchall()
    assert rows == [
        ("shop.send", "mail", 3, None, "fixed", None, False),
        ("shop.send", "mail", 9, 5.0, "fixed", {"a": 1}, True),
    ]
    assert tasks.send_receipt.options["max_attempts"] == 3


def test_the_decorator_of_the_framework_takes_our_options_where_it_takes_any() -> None:
    if django.VERSION[:2] == (6, 0):
        pytest.skip("Django 6.0's own decorator takes none: ours does")
    decorator: Any = task
    made = decorator(max_attempts=2, queue_name="default")(tasks.meaning_of_life.func)
    assert made.options == {"max_attempts": 2}


def test_a_wrong_option_is_answered_with_a_suggestion() -> None:
    for options, sentence in (
        ({"max_attempt": 2}, "did you mean 'max_attempts'"),
        ({"max_attempts": 0}, "max_attempts must be a whole number"),
        ({"queue": "mail"}, "calls 'queue' 'queue_name'"),
        ({"run_at": timezone.now()}, "calls 'run_at' 'run_after'"),
        ({"concurrency_key": "a"}, "belong together"),
    ):
        with pytest.raises(InvalidTask, match=sentence):
            our_task(**options)(tasks.meaning_of_life.func)
        with pytest.raises(InvalidTask, match=sentence):
            tasks.noop.using(**options)


def test_a_batch_handler_is_a_task_of_the_queue_and_the_message_says_so() -> None:
    with pytest.raises(InvalidTask, match="'batch' is for batch handlers, which are tasks of the queue"):
        our_task(batch=5)(tasks.meaning_of_life.func)


def test_what_belongs_to_the_task_is_refused_for_single_calls() -> None:
    for options in ({"isolation": "process"}, {"keep_result": False}, {"retry": lambda job, error: None}):
        with pytest.raises(InvalidTask, match="belongs to the task, not to a call"):
            tasks.send_receipt.using(**options)


def test_a_second_job_of_a_unique_key_is_what_the_task_says(pq: pgqueue.PgQueue) -> None:
    noop: Any = tasks.noop
    unique = noop.using(unique_key="one")
    first = unique.enqueue(1)
    assert unique.enqueue(2).id == first.id
    assert noop.get_result(first.id).args == [1]
    with pytest.raises(pgqueue.DuplicateJob):
        unique.using(on_conflict="raise").enqueue(4)
    pq.claim("default")
    newer = unique.using(on_conflict="supersede").enqueue(5)
    assert (refreshed(newer).status, newer.attempts) == ("READY", 0)
    assert refreshed(first).status == "RUNNING"


def test_a_call_that_makes_no_job_has_the_result_of_the_first_and_sends_no_signal(pq: pgqueue.PgQueue) -> None:
    sent: list[str] = []

    def receive(task_result: Any, **_: Any) -> None:
        sent.append(str(task_result.id))

    noop: Any = tasks.noop
    unique = noop.using(unique_key="one")
    task_enqueued.connect(receive)
    try:
        first = unique.enqueue(1)
        pq.claim("default")
        again = unique.enqueue(2)
        assert (again.id, again.status, again.args) == (first.id, "RUNNING", [1])
        assert again.enqueued_at < timezone.now() - timedelta(0)
        assert sent == [first.id]
        newer = unique.using(on_conflict="supersede").enqueue(3)
        replaced = unique.using(on_conflict="replace").enqueue(4)
        assert (replaced.id, replaced.args) == (newer.id, [4])
        assert sent == [first.id, newer.id]
    finally:
        task_enqueued.disconnect(receive)


def test_keys_order_the_jobs_of_a_task(pq: pgqueue.PgQueue) -> None:
    for number in range(5):
        tasks.in_order.enqueue("a", str(number))
    work(pq, concurrency=5)
    from tests.contrib.django.shop.models import Note

    assert list(Note.objects.order_by("id").values_list("text", flat=True)) == ["0", "1", "2", "3", "4"]


def test_a_job_with_the_old_name_of_a_task_is_run_and_its_result_read(pq: pgqueue.PgQueue) -> None:
    job_id = pq.enqueue("elsewhere.unknown")
    with pytest.raises(TaskResultDoesNotExist, match="does not know"):
        default_task_backend.get_result(str(job_id))
    pq.cancel(job_id)
    old = pgqueue.PgQueue(pq.settings.database_url)
    with old:
        job_id = old.enqueue("shop.old_send", [7], queue="mail")
    work(pq)
    result = tasks.send_receipt.get_result(str(job_id))
    assert (result.status, result.args) == ("SUCCESSFUL", [7])


def test_the_defaults_of_a_backend_are_those_of_tasks_that_do_not_say_otherwise(shop: str, admin: Any) -> None:
    tasks.noop.using(backend="strict").enqueue()
    tasks.send_receipt.using(backend="strict").enqueue(1)
    rows = admin.execute("SELECT max_attempts FROM pgqueue.job ORDER BY id").fetchall()
    assert rows == [(1,), (3,)]


def test_without_kept_results_the_end_is_known_and_the_value_is_not(shop: str) -> None:
    options = {"defaults": {"keep_result": False}}
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": options}}):
        result = tasks.meaning_of_life.enqueue()
        work(queue())
        result = refreshed(result)
        assert (result.status, result.return_value) == ("SUCCESSFUL", None)


def test_a_schedule_of_a_task_is_one_of_its_queue(pq: pgqueue.PgQueue) -> None:
    work(pq)
    [found] = pq.schedules()
    assert (found.name, found.tz) == ("tests.contrib.django.shop.tasks.nightly", "Europe/Berlin")


def test_a_plain_task_of_the_queue_runs_beside_those_of_the_framework(pq: pgqueue.PgQueue) -> None:
    done: list[str] = []

    @pq.task(queue="default", keep_result=True)
    def plain(text: str) -> str:
        done.append(text)
        return text

    job_id = plain.enqueue("plain")
    work(pq)
    assert done == ["plain"]
    found = pq.result(job_id)
    assert found is not None
    assert found.value == "plain"

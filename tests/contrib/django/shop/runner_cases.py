# ruff: noqa: PT009, PT027 - the ways of unittest are those of Django's own test cases
"""What an application tests of its jobs, run by `manage.py test` and never by pytest: see test_runner.py."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, ClassVar

from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

from pgqueue.contrib.django import queue
from pgqueue.worker import Worker, WorkerOptions
from tests.contrib.django.shop.models import Note, Order
from tests.contrib.django.shop.tasks import in_a_child, note, send_receipt


class JobsOfATestCase(TestCase):
    """Everything is in one transaction that is rolled back."""

    result: ClassVar[Any]

    @classmethod
    def setUpTestData(cls) -> None:
        cls.result = send_receipt.enqueue(1)

    def test_a_job_is_seen_by_the_test_that_enqueued_it(self) -> None:
        result = send_receipt.enqueue(2)
        self.assertEqual([str(job.id) for job in queue().jobs()], [self.result.id, result.id])

    def test_no_job_of_another_test_is_seen(self) -> None:
        self.assertEqual([str(job.id) for job in queue().jobs()], [self.result.id])

    def test_callbacks_on_commit_are_captured_with_their_jobs(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            transaction.on_commit(partial(send_receipt.enqueue, 3))
        self.assertEqual(len(callbacks), 1)
        self.assertEqual(len(queue().jobs()), 1)
        with self.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(partial(send_receipt.enqueue, 4))
        self.assertEqual(len(queue().jobs()), 2)

    def test_what_is_enqueued_directly_needs_no_callback(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            send_receipt.enqueue(5)
        self.assertEqual(callbacks, [])
        self.assertEqual(len(queue().jobs()), 2)

    def test_a_savepoint_takes_its_job_along(self) -> None:
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            send_receipt.enqueue(6)
            raise ZeroDivisionError
        self.assertEqual(len(queue().jobs()), 1)

    def test_jobs_are_claimed_run_and_completed_in_the_transaction_of_the_test(self) -> None:
        Order.objects.create(number=7)
        send_receipt.enqueue(7)
        for job in queue().claim("mail", limit=2):
            send_receipt.call(*job.args, **job.kwargs)
            queue().complete(job)
        self.assertEqual(Order.objects.get().receipts, 1)
        self.assertEqual(queue().jobs(), [])


class JobsOfATransactionTestCase(TransactionTestCase):
    """Everything is committed, and flushed behind the test."""

    def test_a_worker_runs_what_was_committed(self) -> None:
        result = note.enqueue("by a worker")
        Worker(queue(), WorkerOptions(drain=True, poll=0.1)).run()
        result.refresh()
        self.assertEqual(result.status, "SUCCESSFUL")
        self.assertEqual(Note.objects.get().text, "by a worker")

    def test_a_child_process_works_in_the_database_of_the_test(self) -> None:
        result = in_a_child.enqueue("by a child")
        Worker(queue(), WorkerOptions(drain=True, poll=0.1)).run()
        result.refresh()
        self.assertEqual(result.status, "SUCCESSFUL", result.errors)
        self.assertEqual(Note.objects.get().text, "by a child")

    def test_nothing_of_another_test_is_left(self) -> None:
        self.assertEqual(queue().jobs(), [])
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pgqueue.archive")
            self.assertEqual(cursor.fetchone(), (0,))

    def test_another_thread_sees_a_job_after_the_commit_and_not_before(self) -> None:
        seen: list[int] = []

        def look() -> None:
            seen.append(len(queue().jobs()))
            connection.close()

        def in_another_thread() -> int:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            return seen[-1]

        with transaction.atomic():
            send_receipt.enqueue(8)
            self.assertEqual(in_another_thread(), 0)
        self.assertEqual(in_another_thread(), 1)

# ruff: noqa: PT009 - the ways of unittest are those of Django's own test cases
"""Apart from the others: where another TransactionTestCase has run before it, Django 5.2 cannot fill the database again."""

from __future__ import annotations

from django.test import TransactionTestCase

from pgqueue.contrib.django import queue
from tests.contrib.django.shop.tasks import send_receipt


class SerializedRollback(TransactionTestCase):
    """The queue is no data that a database is filled with again."""

    serialized_rollback = True

    def test_a_job_is_enqueued(self) -> None:
        self.assertTrue(send_receipt.enqueue(9).id)

    def test_no_job_of_another_test_is_left(self) -> None:
        self.assertEqual(queue().jobs(), [])
        send_receipt.enqueue(10)

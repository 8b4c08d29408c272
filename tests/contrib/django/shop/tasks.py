"""The tasks of the shop: those of the framework as its users write them, and some with our options."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from django.db import connection, transaction
from django.db.models import F

import pgqueue
from pgqueue.contrib.django import schedule
from pgqueue.contrib.django import task as our_task
from pgqueue.contrib.django.framework import TaskContext, task_backends  # noqa: F401
from tests.contrib.django.shop.framework import task
from tests.contrib.django.shop.models import Note, Order

seen: dict[str, Any] = {}
"""What tasks leave behind for the tests of their own process."""


@task()
def noop(*args: Any, **kwargs: Any) -> None:
    return None


@task
def bare(*args: Any, **kwargs: Any) -> None:
    return None


@task()
async def noop_async(*args: Any, **kwargs: Any) -> None:
    return None


@task()
def meaning_of_life() -> int:
    return 42


@task()
def echo(value: Any) -> Any:
    return value


@task()
def pair() -> tuple[int, bytes]:
    return 1, b"two"


@task(backend="strict")
def fails() -> None:
    raise ValueError("This Task failed due to ValueError")


@task(backend="strict")
def exits() -> None:
    raise SystemExit("This Task failed due to SystemExit")


@task(backend="strict")
def fails_with_an_error_in_an_error() -> None:
    raise ValueError(ValueError("This task failed"))


@task()
def returns_what_is_not_json() -> Any:
    return threading.Lock


@task(takes_context=True)
def own_id(context: Any) -> str:
    return str(context.task_result.id)


@task(takes_context=True)
async def own_attempt(context: Any, wanted: int) -> int:
    assert isinstance(context, TaskContext)
    if context.attempt < wanted:
        raise pgqueue.Retry(delay=0)
    return int(context.attempt)


@task(backend="immediate")
def of_another_backend(text: str) -> str:
    return text.upper()


@our_task(queue_name="mail", max_attempts=3, retry=pgqueue.Fixed(0), name="shop.send", aliases=["shop.old_send"])
def send_receipt(number: int) -> int:
    with transaction.atomic():
        Order.objects.filter(number=number).update(receipts=F("receipts") + 1)
    return number


@our_task(max_attempts=2, retry=pgqueue.Fixed(0))
def fails_once(mark: str) -> str:
    seen[mark] = seen.get(mark, 0) + 1
    if seen[mark] == 1:
        raise RuntimeError("once")
    return mark


@our_task(ordering_key=lambda key, text: key)
def in_order(key: str, text: str) -> None:
    Note.objects.create(text=text)


@our_task(isolation="process")
def in_a_child(text: str) -> int:
    Note.objects.create(text=text)
    return os.getpid()


@our_task(max_attempts=1)
def note(text: str) -> int:
    """Returns the number of the server's process that served it."""
    Note.objects.create(text=text)
    return backend_pid()


@our_task(max_attempts=1)
async def note_async(text: str) -> int:
    await Note.objects.acreate(text=text)
    return await asyncio.to_thread(lambda: 0)


@our_task(max_attempts=1)
async def only_waits(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return threading.current_thread().name


@our_task(max_attempts=1)
def leaves_a_transaction(how: str) -> None:
    match how:
        case "autocommit":
            transaction.set_autocommit(False)
        case "atomic":
            transaction.atomic().__enter__()
        case "begin":
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
    Note.objects.create(text=f"never there: {how}")


@our_task(max_attempts=1)
def breaks_its_transaction() -> None:
    with transaction.atomic():
        Order.objects.create(number=1)
        Order.objects.create(number=1)


@our_task(max_attempts=1)
def lingers(seconds: float) -> None:
    time.sleep(seconds)


@schedule("0 3 * * *", tz="Europe/Berlin", args=["nightly"])
@our_task()
def nightly(text: str) -> None:
    Note.objects.create(text=text)


def backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])

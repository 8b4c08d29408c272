"""Names and aliases of tasks: two functions never share one, and who is told so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.checks import run_checks

import pgqueue
from pgqueue.contrib.django import queue
from pgqueue.contrib.django import task as our_task
from pgqueue.contrib.django.framework_task import defined
from tests.contrib.django.conftest import work
from tests.contrib.django.shop import tasks
from tests.contrib.django.shop.framework import InvalidTask


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What these tests define is gone behind them."""
    before = dict(defined.tasks)
    yield
    defined.tasks = before
    defined.number += 1


def pay_in(amount: int) -> int:
    return amount


def pay_out(amount: int) -> int:
    return -amount


def again() -> Any:
    """The same function as its module makes it when it is imported anew."""

    def pay_in(amount: int) -> int:
        return amount * 2

    pay_in.__qualname__ = "pay_in"
    return pay_in


def test_two_functions_of_one_name_are_refused_at_the_definition() -> None:
    our_task(name="pay")(pay_in)
    with pytest.raises(pgqueue.DuplicateTask, match="two tasks are named 'pay': give one of them name="):
        our_task(name="pay")(pay_out)
    assert defined.tasks["pay"].func is pay_in


def test_a_task_that_was_reloaded_replaces_the_one_before() -> None:
    our_task(name="pay", aliases=["old"])(pay_in)
    made = our_task(name="pay", aliases=["old"])(again())
    assert defined.tasks["pay"] is made


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"name": "pay", "aliases": ["old"]}, {"name": "give", "aliases": ["old"]}),
        ({"name": "pay", "aliases": ["old"]}, {"name": "old"}),
        ({"name": "old"}, {"name": "give", "aliases": ["old"]}),
    ],
)
def test_a_clash_of_aliases_is_refused_at_the_definition_and_hurts_no_other_task(
    first: Any, second: Any, pq: pgqueue.PgQueue
) -> None:
    our_task(**first)(pay_in)
    with pytest.raises(pgqueue.DuplicateTask, match="two tasks are named 'old'"):
        our_task(**second)(pay_out)
    assert tasks.noop.enqueue().id


def test_a_name_that_no_task_can_have_is_refused_at_the_definition(pq: pgqueue.PgQueue) -> None:
    wrong: list[dict[str, Any]] = [
        {"name": "a\0b"},
        {"aliases": "old"},
        {"aliases": [""]},
        {"name": "pay", "aliases": ["pay"]},
    ]
    for options in wrong:
        with pytest.raises(InvalidTask, match="name"):
            our_task(**options)(pay_in)
    assert tasks.noop.enqueue().id


def test_a_clash_with_a_task_of_the_queue_alone_is_said_by_check_and_by_its_own_enqueue(pq: pgqueue.PgQueue) -> None:
    pq.task(name="pay", queue="default")(pay_out)
    clashing = our_task(name="pay")(pay_in)
    assert tasks.noop.enqueue().id
    with pytest.raises(pgqueue.DuplicateTask, match="'pay'"):
        clashing.enqueue(1)
    found = [one.msg for one in run_checks() if one.id == "pgqueue.E004"]
    assert found == ["TASKS['default']: two tasks are named 'pay': give one of them name=…"]
    work(pq)
    assert queue().count_dead_letters() == 0

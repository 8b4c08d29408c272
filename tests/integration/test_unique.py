"""Unique keys: what becomes of a second job of a key, in every mode, single and in bulk."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgqueue
from tests.workers import count

Admin = psycopg.Connection[Any]
LATER = 3600.0
MODES = ["skip", "replace", "merge", "merge_distinct", "supersede", "raise"]


def make(pq: Any, **options: Any) -> Any:
    def work(*args: Any, **kwargs: Any) -> None: ...

    return pq.task(name="work", queue="q", **{"unique_key": "k", **options})(work)


def rows(admin: Admin, what: str) -> list[tuple[Any, ...]]:
    return admin.execute(f"SELECT {what}".encode()).fetchall()


def live(admin: Admin) -> list[tuple[Any, ...]]:
    return rows(admin, "id, args::text, unique_key, next_key, next_mode FROM pgqueue.job ORDER BY id")


# skip and raise


def test_a_second_enqueue_with_a_taken_key_returns_the_id_of_the_first(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq)
    first = task.enqueue(1)
    assert task.enqueue(2) == first
    [job] = pq.claim("q")
    assert task.enqueue(3) == first, "a running job has its key"
    pq.fail(job, "broken", delay=LATER)
    assert task.enqueue(4) == first, "a job that waits for its retry has its key"
    assert live(admin) == [(first, "[1]", "k", None, None)]


@pytest.mark.parametrize("end", ["complete", "discard", "dead letter", "cancel", "lost for the last time"])
def test_a_key_is_free_once_its_job_has_ended(end: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, max_attempts=1)
    first = task.enqueue(1)
    if end == "cancel":
        pq.cancel(first)
    else:
        [job] = pq.claim("q")
        if end == "complete":
            pq.complete(job)
        elif end == "discard":
            pq.fail(job, pgqueue.Discard())
        elif end == "dead letter":
            pq.fail(job, "broken")
        else:
            admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
            assert pq.rescue("q").dead == [first]
    second = task.enqueue(2)
    assert second != first
    assert live(admin) == [(second, "[2]", "k", None, None)]


def test_keys_of_different_queues_do_not_meet(pq: pgqueue.PgQueue) -> None:
    task = make(pq)
    assert task.enqueue() != task.options(queue="other").enqueue()


def test_a_key_may_be_a_function_of_the_arguments(pq: pgqueue.PgQueue) -> None:
    task = make(pq, unique_key=lambda number, **_: f"n:{number}" if number else None)
    one, two = task.enqueue(1), task.enqueue(2)
    assert (task.enqueue(1), task.enqueue(2)) == (one, two)
    assert task.enqueue(0) != task.enqueue(0), "None means: no key"
    [job] = pq.jobs(ids=one)
    assert job.unique_key == "n:1"


@pytest.mark.parametrize("key", ["", "\0", "\ud800", "x" * 501, 7, lambda: 1 / 0])
def test_a_key_that_cannot_be_one_is_refused_in_a_sentence(key: Any, pq: pgqueue.PgQueue, admin: Admin) -> None:
    with pytest.raises(pgqueue.ConfigurationError, match="unique_key"):
        make(pq, unique_key=key).enqueue()
    assert count(admin, "job") == 0


@pytest.mark.parametrize(
    "options",
    [
        {"unique_key": None, "on_conflict": "replace"},
        {"unique_key": None, "unique_for": 5},
        {"on_conflict": "explode"},
        {"unique_for": 0},
        {"unique_for": "5"},
        {"delay_limit": -1},
    ],
)
def test_options_that_contradict_each_other_are_refused(options: Any, pq: pgqueue.PgQueue) -> None:
    with pytest.raises(pgqueue.ConfigurationError):
        make(pq, **options)


def test_raise_names_the_job_and_leaves_the_transaction_usable(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    task = make(pq, on_conflict="raise")
    first = task.enqueue(1)
    with psycopg.connect(database) as caller:
        with pytest.raises(pgqueue.DuplicateJob) as caught:
            task.enqueue(2, using=caller)
        other = task.options(unique_key="other").enqueue(3, using=caller)
    assert (caught.value.job_id, caught.value.key) == (first, "k")
    assert str(first) in str(caught.value)
    assert [row[0] for row in live(admin)] == [first, other]


def test_a_bulk_that_raises_leaves_nothing(pq: pgqueue.PgQueue, database: str, admin: Admin) -> None:
    task = make(pq, unique_key=lambda number: f"n:{number}", on_conflict="raise")
    first = task.enqueue(7)
    with pytest.raises(pgqueue.DuplicateJob) as caught:
        task.enqueue_many([(number,) for number in range(10)])
    assert caught.value.job_id == first
    with psycopg.connect(database) as caller, pytest.raises(pgqueue.DuplicateJob):
        task.enqueue_many([(number,) for number in range(10)], using=caller)
        caller.commit()
    with pytest.raises(pgqueue.DuplicateJob) as caught:
        task.enqueue_many([(20,), (20,)])
    assert caught.value.job_id is None
    assert [row[0] for row in live(admin)] == [first]


# bulk


def test_a_bulk_answers_in_the_order_of_the_input_with_the_ids_of_what_is_there(
    pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = make(pq, unique_key=lambda number: f"n:{number}" if number else None)
    two, four = task.enqueue(2), task.enqueue(4)
    ids = task.enqueue_many([(5,), (4,), (0,), (3,), (2,), (5,), (0,)])
    assert (ids[1], ids[4], ids[5]) == (four, two, ids[0])
    assert len({*ids}) == 6
    found = dict(rows(admin, "id, args::text FROM pgqueue.job"))
    assert [found[job_id] for job_id in ids] == ["[5]", "[4]", "[0]", "[3]", "[2]", "[5]", "[0]"]
    fresh = [ids[0], ids[2], ids[3], ids[6]]
    assert fresh == sorted(fresh), "first come, first served within the bulk"


@pytest.mark.parametrize(
    ("mode", "left"),
    [
        ("skip", "[[1]]"),
        ("replace", "[[1,3]]"),
        ("supersede", "[[1,3]]"),
        ("merge", "[[1,2,1,3]]"),
        ("merge_distinct", "[[1,2,3]]"),
    ],
)
def test_duplicates_inside_one_bulk_become_one_job_by_the_same_rule(
    mode: str, left: str, pq: pgqueue.PgQueue, admin: Admin
) -> None:
    task = make(pq, on_conflict=mode)
    ids = task.enqueue_many([([1],), ([2],), ([1, 3],)])
    assert len(set(ids)) == 1
    assert live(admin) == [(ids[0], left, "k", None, None)]


def test_a_bulk_of_many_chunks_with_keys_is_all_or_nothing(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, unique_key=lambda number: f"n:{number % 11_000}")
    with pytest.raises(pgqueue.PayloadError):
        make(pq, unique_key=lambda number: "k").enqueue_many([(1,)] * 6000 + [(float("nan"),)])
    assert count(admin, "job") == 0
    ids = task.enqueue_many((number,) for number in range(12_000))
    assert ids[:1000] == ids[11_000:]
    assert count(admin, "job") == 11_000 == len(set(ids))
    assert task.enqueue_many([]) == []


# replace and merge of what waits


@pytest.mark.parametrize("mode", ["replace", "supersede"])
def test_what_waits_is_replaced_under_its_id_and_keeps_its_place(mode: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict=mode)
    first = task.enqueue(1, name="old")
    other = pq.enqueue("other", queue="q")
    assert task.options(priority=0, headers={"a": 1}, max_attempts=3, timeout=5.0).enqueue(2) == first
    [job, behind] = pq.claim("q", limit=2)
    assert (job.id, job.args, job.kwargs, job.headers, job.max_attempts, job.timeout) == (
        first, [2], {}, {"a": 1}, 3, 5.0)  # fmt: skip
    assert behind.id == other
    assert task.options(priority=9, delay=LATER, unique_key="new").enqueue(3)


def test_a_replaced_job_has_all_its_attempts_anew_and_is_due_at_the_new_time(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="replace", max_attempts=2)
    first = task.enqueue(1)
    pq.fail(pq.claim("q"), "broken", delay=LATER)
    assert task.options(priority=5).enqueue(2) == first
    assert pq.promote("q") == [first]
    [job] = pq.claim("q")
    assert (job.attempt, job.args, job.priority) == (1, [2], 5)
    assert rows(admin, "errors FROM pgqueue.job") == [(None,)]
    pq.release(job)
    task.options(delay=LATER).enqueue(3)
    assert pq.claim("q") == []
    assert rows(admin, "run_at > now() + interval '59 min', position FROM pgqueue.job") == [(True, None)]


def test_a_merge_joins_lists_and_takes_the_newer_of_everything_else(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="merge")
    first = task.options(priority=3).enqueue([1, 1e16], "old", tags=["a"], note="old", only={"x": 1})
    assert task.options(priority=1).enqueue([-0.0, "é"], "new", tags=["a", "b"], note=None, more=[3]) == first
    [job] = pq.claim("q")
    assert job.args == [[1, 1e16, -0.0, "é"], "new"]
    assert job.kwargs == {"tags": ["a", "a", "b"], "note": None, "only": {"x": 1}, "more": [3]}
    assert job.priority == 3
    assert "1e+16" in (job.args_json or "")


def test_a_distinct_merge_leaves_out_what_is_there(pq: pgqueue.PgQueue) -> None:
    task = make(pq, on_conflict="merge_distinct")
    task.enqueue([3, 1, {"a": 1}])
    task.enqueue([1, 2, {"a": 1}, 2])
    assert pq.claim("q")[0].args == [[3, 1, {"a": 1}, 2]]


def test_a_merge_is_as_early_as_the_earlier_of_both_but_waits_for_a_retry(pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="merge", delay=LATER)
    first = task.enqueue([1])
    task.options(delay=2 * LATER).enqueue([2])
    assert rows(admin, "run_at < now() + interval '61 min' FROM pgqueue.job") == [(True,)]
    task.options(delay=None).enqueue([3])
    assert pq.promote("q") == [first]
    [job] = pq.claim("q")
    assert job.args == [[1, 2, 3]]
    pq.fail(job, "broken", delay=LATER)
    task.options(delay=None).enqueue([4])
    assert pq.promote("q") == []
    assert rows(admin, "attempt, args::text FROM pgqueue.job") == [(1, "[[1,2,3,4]]")]


@pytest.mark.parametrize("odd", ["'5'", "'{}'", "'null'", "NULL"])
def test_a_merge_into_a_row_written_by_hand_is_no_error(odd: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    task = make(pq, on_conflict="merge")
    task.enqueue([1])
    admin.execute(f"UPDATE pgqueue.job SET args = {odd}, kwargs = '[]'".encode())
    task.enqueue([2], a=1)
    assert rows(admin, "args::text, kwargs::text FROM pgqueue.job") == [("[[2]]", '{"a":1}')]


# what runs

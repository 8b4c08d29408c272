"""What the codec accepts, PostgreSQL stores and gives back; what the command line is given ends with 0 or 2."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pgqueue
from pgqueue.cli import run
from pgqueue.payload import encode_args
from tests.fuzzing import any_text, fuzz, json_like, json_texts


def storable(args: list[Any]) -> bool:
    try:
        encode_args(args)
    except pgqueue.PayloadError:
        return False
    return True


def same(left: Any, right: Any) -> bool:
    """Equal with its types: in Python 1 == 1.0 == True."""
    return repr(left) == repr(right)


@fuzz(0.5)
@given(calls=st.lists(st.lists(json_like, max_size=4).filter(storable), min_size=1, max_size=20))
def test_what_is_accepted_is_stored_and_claimed_as_it_was(pq: pgqueue.PgQueue, calls: list[list[Any]]) -> None:
    name = "t"
    ids = [pq.enqueue(name, args, queue="q") for args in calls]
    jobs = sorted(pq.claim("q", limit=100), key=lambda job: job.id)
    assert [job.id for job in jobs] == ids
    assert all(same(job.args, args) for job, args in zip(jobs, calls, strict=True))
    pq.complete(jobs)


@fuzz(0.5)
@given(errors=st.lists(any_text, min_size=1, max_size=5))
def test_whatever_an_error_says_its_job_fails_and_is_buried(pq: pgqueue.PgQueue, errors: list[str]) -> None:
    for text in errors:
        pq.enqueue("t", queue="q", max_attempts=1)
        pq.fail(pq.claim("q"), ValueError(text))
    assert len(pq.dead_letters()) == len(errors)
    pq.purge()


@fuzz(0.3)
@given(text=json_texts)
def test_json_on_the_command_line_ends_with_zero_or_two_and_one_line(
    database: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PGQUEUE_DATABASE_URL", database)
    for option in ("--args", "--kwargs"):
        status = run(["enqueue", "t", option, text, "--queue", "q", "--unchecked"])
        printed, said = capfd.readouterr()
        assert status in (0, 2), (text, said)
        assert len((printed + said).splitlines()) == 1
        assert (printed.strip().isdecimal(), said) == (True, "") if status == 0 else said.startswith("pgqueue: ")
        assert "Traceback" not in said


@fuzz(0.3)
@given(value=st.one_of(any_text, st.floats().map(str), st.sampled_from(["nan", "inf", "-inf", "1e400", "-0", "１２"])))
def test_a_duration_on_the_command_line_ends_with_zero_or_two_and_one_line(
    database: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PGQUEUE_DATABASE_URL", database)
    for words in (
        ["dead", "purge", "--all", "--yes", f"--older-than={value}"],
        ["enqueue", "t", "--unchecked", f"--delay={value}"],
    ):
        status = run(words)
        printed, said = capfd.readouterr()
        assert status in (0, 2), (words, said)
        assert len((printed + said).splitlines()) == 1, (printed, said)


def test_a_stored_payload_of_another_program_fails_alone(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    for text in ("7", '"x"', "[1e999]", '["\\u0000"]', f"[{'7' * 5000}]", "[" * 300 + "]" * 300, '{"a":1}', "null"):
        admin.execute("INSERT INTO pgqueue.job (queue, task, args) VALUES ('q', 't', %s)", [text])
    refused = 0
    for job in pq.claim("q", limit=100):
        try:
            assert isinstance(job.args, list)
        except pgqueue.PayloadDecodeError:
            refused += 1
    assert refused >= 6

"""Unique keys on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    return CommandLine(tmp_path, database)


def test_enqueue_with_a_unique_key_prints_the_id_of_the_job_that_has_it(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    words = ("enqueue", "shop.note", "--app", "shop", "--unique-key", "note:1")
    first = cli.good(*words, "--args", '["a"]')
    assert cli.good(*words, "--args", '["b"]') == first
    assert cli.good(*words, "--args", '["c"]', "--on-conflict", "replace") == first
    assert cli.good("enqueue", "x", "--unchecked", "--queue", "images", "--unique-key", "note:2", "--unique-for", "60")
    shown = cli.json("jobs", "--args")
    assert [(job["unique_key"], job["args"]) for job in shown] == [("note:1", ["c"]), ("note:2", [])]
    assert "note:1" in cli.good("jobs")
    sentence = cli.sentence(1, *words, "--args", '["d"]', "--on-conflict", "raise")
    assert sentence == f"the unique key is taken by job {first.strip()}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on-conflict", "explode", "--unique-key", "k"), "on_conflict must be one of skip, replace, merge"),
        (("--unique-key", ""), "unique_key must not be empty"),
        (("--on-conflict", "replace"), "on_conflict needs a unique_key"),
        (("--unique-key", "k", "--unique-for", "-1"), "unique_for must be a number of seconds"),
    ],
)
def test_a_key_that_makes_no_sense_is_a_mistake_of_the_command_line(
    words: tuple[str, ...], said: str, cli: CommandLine, pq: pgqueue.PgQueue
) -> None:
    assert said in cli.sentence(2, "enqueue", "shop.note", "--unchecked", *words)
    assert pq.status() == []


def test_a_redrive_names_the_dead_letters_whose_key_is_taken(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    options = {"queue": "images", "unique_key": "k", "max_attempts": 1}
    dead = pq.enqueue("shop.fail", ["x"], **options)
    pq.fail(pq.claim("images"), "no")
    pq.enqueue("shop.fail", ["y"], **options)
    status, output, errors = cli.run("dead", "retry", str(dead))
    assert (status, output) == (1, "0 dead letter(s) are back in line\n")
    assert errors == f"pgqueue: these stay, their unique key has a live job: {dead}\n"
    pq.complete(pq.claim("images"))
    assert cli.good("dead", "retry", str(dead)) == "1 dead letter(s) are back in line\n"

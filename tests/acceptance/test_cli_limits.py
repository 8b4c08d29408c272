"""The commands for limits of queues and rates of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    return CommandLine(tmp_path, database)


def test_a_queue_is_limited_shown_and_let_go(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    for _ in range(5):
        pq.enqueue("shop.note", queue="images")
    said = "queue images is limited to 2 at once and 100 a minute (burst 3)\n"
    assert cli.good("limit", "images", "--running", "2", "--rate", "100", "--per", "60", "--burst", "3") == said
    assert said in cli.good("status")
    assert cli.json("status")[0]["limit"]["running"] == 2
    assert len(pq.claim("images", limit=5)) == 2
    [row] = cli.json("limits")
    assert (row["queue"], row["running"], row["burst"], row["in_code"]) == ("images", 2, 3, False)
    assert row["rate"] == pytest.approx(100 / 60)
    table = cli.good("limits").splitlines()
    assert table[1].split()[:7] == ["images", "2", "100", "a", "minute", "(burst", "3)"]
    assert cli.good("limit", "images", "--rate", "5") == "queue images is limited to 5 a second (burst 5)\n"
    assert cli.good("unlimit", "images") == "queue images is not limited\n"
    assert cli.json("limits") == []
    assert "there is no queue 'imags'" in cli.sentence(1, "limit", "imags", "--running", "5")
    assert cli.good("limit", "later", "--running", "5", "--force") == "queue later is limited to 5 at once\n"


def test_a_key_gets_a_rate(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("shop.note", queue="images", concurrency_key="a", concurrency_limit=5)
    said = "concurrency key a of queue images is limited to 2 and is admitted 30 a minute (burst 1)\n"
    assert cli.good("limit-key", "images", "a", "2", "--rate", "30", "--per", "60") == said
    assert "30 a minute (burst 1)" in cli.good("lanes", "images")
    tenant = cli.good("limit-key", "images", "tenant", "--kind", "fairness", "--rate", "10", "--per", "3600")
    assert tenant == "fairness key tenant of queue images is admitted 10 an hour (burst 1)\n"
    assert [(row["key"], row["width"]) for row in cli.json("lanes", "images")] == [("a", 2), ("tenant", None)]
    assert cli.good("limit-key", "images", "a", "0") == (
        "concurrency key a of queue images has the limit that its jobs say\n"
    )
    assert pq.lanes("images")[0].rate is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("limit", "images"), "limited to what?"),
        (("limit", "images", "--rate", "0"), "rate must be a number above zero"),
        (("limit", "images", "--running", "0"), "running must be a whole number"),
        (("limit", "images", "--running", "1", "--burst", "5"), "burst belongs to a rate"),
        (("limit-key", "images", "a"), "limited to what?"),
        (("limit-key", "images", "a", "2", "--kind", "ordering"), "limit is for a concurrency_key"),
        (("limit-key", "images", "a", "--rate", "1", "--kind", "odd"), "--kind must be one of"),
    ],
)
def test_a_limit_that_makes_no_sense_is_a_usage_mistake(cli: CommandLine, words: tuple[str, ...], part: str) -> None:
    assert part in cli.sentence(2, *words)

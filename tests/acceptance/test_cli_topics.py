"""pgqueue topics, and the worker that has subscriptions in its code."""

from __future__ import annotations

from pathlib import Path

import pytest

import pgqueue
from tests.acceptance.command_line import CommandLine
from tests.conftest import execute

SUBSCRIBED = """
    import pgqueue

    pq = pgqueue.PgQueue()


    @pq.subscriber("orders", group="notes", start="beginning")
    @pq.task(queue="images")
    def note(text):
        with open("marks", "a") as file:
            file.write(f"{text} {pgqueue.current_job().headers['topic']}\\n")
"""
ASYNC = """
    import pgqueue

    pq = pgqueue.AsyncPgQueue()


    @pq.task(queue="letters", priority=3)
    async def send(to): ...
"""


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    line = CommandLine(tmp_path, database)
    line.write("subscribed.py", SUBSCRIBED)
    line.write("letters.py", ASYNC)
    return line


def test_a_worker_replays_for_the_subscriptions_of_its_code_and_runs_what_is_published(cli: CommandLine) -> None:
    cli.good("topics", "keep", "orders", "--count", "100")
    assert cli.good("topics", "publish", "orders", "--args", '["old"]').startswith("0 jobs, message ")
    with cli.started("worker", "--app", "subscribed") as program:
        program.wait_for("wrote the subscriptions orders notes")
        cli.wait_for_mark("old orders")
        assert cli.good("topics", "publish", "orders", "--args", '["new"]').startswith("1 job, message ")
        cli.wait_for_mark("new orders")
        assert "code of live workers" in cli.sentence(1, "topics", "unsubscribe", "orders", "notes")
    assert cli.marks() == ["old orders", "new orders"]


def test_an_operator_keeps_publishes_subscribes_resets_and_unsubscribes(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    keep = ("topics", "keep", "orders")
    assert cli.good(*keep, "--count", "100", "--age", "3600") == "topic orders keeps 100 messages and 3600 s\n"
    for text in ("one", "two"):
        cli.good("topics", "publish", "orders", "--args", f'["{text}"]', "--key", "k")
    subscribe = ("topics", "subscribe", "orders", "letters.send", "--app", "letters", "--start", "beginning")
    assert cli.good(*subscribe, "--ordered") == "group letters.send of topic orders is subscribed\n2 jobs made\n"
    assert cli.good(*subscribe, "--ordered") == "group letters.send of topic orders is there already\n"
    [shown] = cli.json("topics", "subscriptions", "--topic", "orders")
    assert (shown["queue"], shown["priority"], shown["ordered"], shown["state"]) == ("letters", 3, True, "live")
    [topic] = cli.json("topics", "list")
    assert (topic["name"], topic["subscriptions"], topic["messages"]) == ("orders", 1, 2)
    assert "100 messages and 3600 s" in cli.good("topics", "list")
    [job] = pq.claim("letters", limit=5)
    pq.complete(job)
    reset = ("topics", "reset", "orders", "letters.send", "--start", str(topic["newest_id"]))
    assert cli.good(*reset) == f"group letters.send of topic orders starts from {topic['newest_id']}\n1 job made\n"
    assert cli.good(*reset, "--later") == f"group letters.send of topic orders starts from {topic['newest_id']}\n"
    assert "held" in cli.good("topics", "subscriptions")
    assert (
        cli.good("topics", "unsubscribe", "orders", "letters.send")
        == "group letters.send of topic orders is not subscribed any more\n"
    )
    assert cli.good("topics", "subscriptions").splitlines()[-1] == "(none)"
    assert [job.args for job in pq.claim("letters", limit=5)] == [["two"]]
    assert cli.good(*keep, "--nothing") == "topic orders keeps nothing\n"
    assert "no job was made" in cli.good("topics", "publish", "orders")
    assert execute(str(cli.database), "SELECT count(*) FROM pgqueue.message") == [(0,)]


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["publish", "a,b"], 2, "topic name"),
        (["publish", "orders", "--args", "{}"], 2, "JSON list"),
        (["publish", "orders", "--args", '["\\u0000"]'], 2, "--args"),
        (["publish", "orders", "--key", ""], 2, "--key must not be empty"),
        (["subscribe", "orders", "t"], 2, "--unchecked"),
        (["subscribe", "orders", "shop.nothing", "--app", "shop"], 1, "no task named"),
        (["subscribe", "orders", "t", "--unchecked", "--start", "never"], 2, "--start must be new"),
        (["subscribe", "orders", "t", "--unchecked", "--start", "2026-01-01"], 2, "time zone"),
        (["subscribe", "orders", "t", "--unchecked", "--start", "0"], 2, "whole number between 1"),
        (["subscribe", "orders", "t", "--unchecked", "--start", "2999-01-01T00:00Z"], 1, "still to come"),
        (["subscribe", "orders", "t", "--unchecked", "--start", "7"], 1, "holds no message 7"),
        (["subscribe", "orders", "t", "--unchecked", "--park"], 2, "needs --ordered"),
        (["subscribe", "bare", "t", "--unchecked", "--start", "beginning"], 1, "keeps no messages"),
        (["unsubscribe", "ordres", "g"], 1, "similar: orders"),
        (["unsubscribe", "orders", "h"], 1, "known are g"),
        (["reset", "orders", "h"], 1, "known are g"),
        (["subscriptions", "--topic", "ordres"], 1, "similar: orders"),
        (["keep", "orders"], 2, "or --nothing"),
        (["keep", "orders", "--nothing", "--age", "5"], 2, "or --nothing"),
        (["keep", "orders", "--age", "0"], 2, "age must be"),
    ],
)
def test_mistakes_with_topics_are_one_sentence(
    words: list[str], status: int, said: str, cli: CommandLine, pq: pgqueue.PgQueue
) -> None:
    pq.keep_topic("orders", count=10)
    pq.subscribe("orders", "t", group="g")
    assert said in cli.sentence(status, "topics", *words)
    assert execute(str(cli.database), "SELECT name FROM pgqueue.subscription") == [("g",)]

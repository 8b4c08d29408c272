"""The commands of operators: tables and JSON, enqueue, cancel, pause, dead letters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import pgqueue
from pgqueue.cli.reference import reference
from tests.acceptance.command_line import CommandLine, environment
from tests.conftest import execute

ESCAPE = "\x1b[31mred\nnext"


@pytest.fixture
def cli(tmp_path: Path, database: str) -> CommandLine:
    return CommandLine(tmp_path, database)


def die(pq: pgqueue.PgQueue, *, queue: str = "images", task: str = "shop.fail", error: str = "no") -> int:
    """A dead letter."""
    job_id = pq.enqueue(task, ["secret"], queue=queue, max_attempts=1)
    pq.fail(pq.claim(queue), error)
    return job_id


def test_the_reference_in_the_documentation_is_that_of_the_commands() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == reference(), "run python -m pgqueue.cli.reference > docs/cli.md"


def test_importing_the_package_imports_no_command_line() -> None:
    code = "import sys, pgqueue; print([m for m in ('typer', 'click', 'rich', 'alembic', 'sqlalchemy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_printed(cli: CommandLine) -> None:
    assert cli.good("--version") == f"pgqueue {pgqueue.__version__}\n"


def test_without_a_command_the_help_is_shown(cli: CommandLine) -> None:
    status, _, errors = cli.run()
    assert status == 2
    assert "Commands:" in errors


def test_shared_options_stand_before_or_after_the_command(cli: CommandLine) -> None:
    url, cli.database = str(cli.database), None
    assert cli.json("status", "--database-url", url) == []
    assert json.loads(cli.good("--database-url", url, "status", "--json")) == []
    assert "'other' is missing" in cli.sentence(1, "--schema", "other", "status", "--database-url", url)


def test_queues_jobs_and_workers_are_listed_for_people_and_for_programs(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    ready = pq.enqueue("shop.note", ["secret"], queue="images")
    later = pq.enqueue("shop.note", ["secret"], queue="images", delay=3600, priority=5)
    [status] = cli.json("status")
    assert (status["queue"], status["ready"], status["scheduled"], status["running"]) == ("images", 1, 1, 0)
    jobs = cli.json("jobs")
    assert [(job["id"], job["state"], job["priority"]) for job in jobs] == [
        (ready, "ready", 0),
        (later, "scheduled", 5),
    ]
    assert "args" not in jobs[0]
    assert json.loads(cli.good("jobs", "--json", "--args", "--state", "ready"))[0]["args"] == ["secret"]
    table = cli.good("jobs", "--queue", "images", "--id", str(later))
    assert "secret" not in table
    assert "\x1b" not in table
    assert [line.split()[:3] for line in table.splitlines()][1:] == [[str(later), "images", "shop.note"]]
    assert cli.json("workers") == []
    assert "images" in cli.good("status")


def test_names_and_errors_cannot_forge_lines_or_steer_the_terminal(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    execute(
        str(cli.database), "INSERT INTO pgqueue.job (queue, task, errors) VALUES (%s, %s, %s)", ESCAPE, ESCAPE, "[7]"
    )
    die(pq, error=ESCAPE)
    for words in (("jobs",), ("status",), ("dead", "list"), ("jobs", "--json"), ("dead", "list", "--json")):
        printed = cli.good(*words)
        assert "\x1b" not in printed
        assert not any(line.startswith("next") for line in printed.splitlines())
    assert "\x1b" not in cli.good("dead", "show", str(pq.dead_letters()[0].id))


def test_long_ids_and_names_are_not_cut_in_a_pipe(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    name = "n" * 180
    execute(
        str(cli.database), "INSERT INTO pgqueue.job (id, queue, task) VALUES (9007199254740993, %s, %s)", name, name
    )
    line = cli.good("jobs").splitlines()[1]
    assert line.split()[:3] == ["9007199254740993", name, name]


def test_a_reader_that_goes_away_is_no_error(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    execute(
        str(cli.database),
        "INSERT INTO pgqueue.job (queue, task) SELECT 'images', repeat('t', 100) FROM generate_series(1, 3000)",
    )
    with cli.started("jobs", "--limit", "3000") as program:
        assert program.process.stdout is not None
        program.process.stdout.close()
        assert program.wait() == 141
        assert program.errors == ""


def test_enqueue_checks_the_task_and_its_arguments(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    job_id = int(cli.good("enqueue", "shop.note", "--args", '["x"]', "--priority", "7", "--app", "shop:pq"))
    [job] = pq.jobs()
    assert (job.id, job.queue, job.priority, job.args_json) == (job_id, "images", 7, '["x"]')
    assert "similar: shop.note" in cli.sentence(1, "enqueue", "shop.nite", "--app", "shop")
    assert "missing a required argument" in cli.sentence(1, "enqueue", "shop.note", "--app", "shop")
    assert "--unchecked" in cli.sentence(2, "enqueue", "shop.note")


def test_enqueue_without_the_application(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    words = ("--kwargs", '{"a": [1, null]}', "--queue", "q", "--delay", "60", "--max-attempts", "3", "--unchecked")
    cli.good("enqueue", "any.thing", *words)
    [job] = pq.jobs()
    assert (job.task, job.queue, job.state, job.max_attempts) == ("any.thing", "q", "scheduled", 3)
    assert json.loads(str(job.kwargs_json)) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--args", "[1 2]"), "--args is not JSON: Expecting ',' delimiter at character 4"),
        (("--args", "[1,\n2 3]"), "line 2, character 3"),
        (("--args", "[NaN]"), "NaN is no JSON number"),
        (("--args", "[1e999]"), "too large"),
        (("--args", "42"), "must be a JSON list"),
        (("--kwargs", "[1]"), "must be a JSON object"),
        (("--kwargs", '{"a": 1, "a": 2}'), "occurs twice"),
        (("--args", "[" * 100_000), "not JSON"),
        (("--priority", "101"), "priority must be"),
        (("--delay", "-1"), "delay must be"),
        (("--max-attempts", "0"), "max_attempts must be"),
        (("--queue", ""), "queue name"),
    ],
)
def test_bad_enqueues_are_refused_before_anything_is_sent(
    cli: CommandLine, words: tuple[str, ...], expected: str
) -> None:
    cli.database = "postgresql://127.0.0.1:1/nothing"
    assert expected in cli.sentence(2, "enqueue", "t", "--unchecked", *words)


def test_cancel_says_what_became_of_each(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    job_id = pq.enqueue("t", queue="q")
    status, output, _ = cli.run("cancel", str(job_id), "999", "--json")
    assert status == 1
    assert json.loads(output) == [{"id": job_id, "result": "cancelled"}, {"id": 999, "result": "not live"}]


def test_pause_and_resume(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("t", queue="images")
    cli.good("pause", "images")
    assert pq.claim("images") == []
    cli.good("resume", "images")
    assert len(pq.claim("images")) == 1
    assert "similar: images; --force" in cli.sentence(1, "pause", "imges")
    assert "similar: images" in cli.sentence(1, "resume", "imges")
    cli.good("pause", "new", "--force")
    assert {row["queue"] for row in cli.json("status")} == {"images", "new"}


@pytest.mark.parametrize("words", [("status",), ("jobs",), ("dead", "list"), ("dead", "retry"), ("dead", "purge")])
def test_an_unknown_queue_is_named_with_near_matches(
    cli: CommandLine, pq: pgqueue.PgQueue, words: tuple[str, ...]
) -> None:
    pq.enqueue("t", queue="images")
    assert cli.sentence(1, *words, "--queue", "image") == "there is no queue 'image'; similar: images"


def test_dead_letters_are_shown_with_their_arguments_only_when_asked(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    job_id = die(pq, error="out of paper")
    [listed] = cli.json("dead", "list", "--task", "shop.fail")
    assert (listed["id"], "args" in listed) == (job_id, False)
    assert "out of paper" in cli.good("dead", "list")
    [shown] = cli.json("dead", "show", str(job_id))
    assert (shown["args"], shown["errors"][0]["message"]) == (["secret"], "out of paper")
    assert '["secret"]' in cli.good("dead", "show", str(job_id))
    assert cli.run("dead", "show", "999")[0] == 1


def test_retry_and_purge_by_id_need_no_confirmation(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    first, second = die(pq), die(pq)
    cli.good("dead", "retry", str(first))
    assert [job.id for job in pq.jobs()] == [first]
    cli.good("dead", "purge", str(second))
    assert pq.dead_letters() == []
    status, output, errors = cli.run("dead", "retry", str(second))
    assert (status, output) == (1, "0 dead letter(s) are back in line\n")
    assert errors == f"pgqueue: no such dead letter: {second}\n"


@pytest.mark.parametrize("verb", ["retry", "purge"])
def test_more_than_named_ids_needs_a_confirmation(cli: CommandLine, pq: pgqueue.PgQueue, verb: str) -> None:
    for _ in range(3):
        die(pq)
    die(pq, queue="other")
    assert "give ids, --queue, --task or --all" in cli.sentence(2, "dead", verb)
    assert "--all means all" in cli.sentence(2, "dead", verb, "--all", "--queue", "images")
    assert cli.good("dead", verb, "--queue", "images", "--dry-run") == "3\n"
    assert "3 dead letter(s): add --yes" in cli.sentence(2, "dead", verb, "--queue", "images")
    assert len(pq.dead_letters()) == 4
    cli.good("dead", verb, "--queue", "images", "--yes")
    assert [letter.queue for letter in pq.dead_letters()] == ["other"]


def test_purge_by_age(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    die(pq)
    assert cli.good("dead", "purge", "--all", "--older-than", "3600", "--dry-run") == "0\n"


def test_an_interrupted_command_ends_with_130(cli: CommandLine) -> None:
    code = (
        "import os, signal, sys; from pgqueue.cli import jobs, run; from pgqueue.client import PgQueue\n"
        "PgQueue.jobs = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(run(['jobs']))"
    )
    env = environment(cli.folder, cli.database)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_output_in_a_narrow_locale_is_escaped_not_refused(cli: CommandLine, pq: pgqueue.PgQueue) -> None:
    pq.enqueue("tâche", queue="été")
    assert "t\\xe2che" in cli.good("jobs", PYTHONIOENCODING="ascii")

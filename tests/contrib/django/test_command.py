"""manage.py pgqueue: the same command line, in the project, as a user calls it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django
import pytest
from django.core.management import CommandError, call_command

import pgqueue
from pgqueue import migrate
from tests.contrib.django.conftest import refreshed
from tests.contrib.django.settings import BACKEND, database
from tests.contrib.django.shop import tasks
from tests.waiting import wait_until

PATIENCE = 60.0
NEWEST = migrate.revisions()[-1]
ROOT = Path(__file__).parents[3]
MANAGE = Path(__file__).parent / "manage.py"


def environment(**more: str) -> dict[str, str]:
    """Nothing of the host's configuration. Python's own path leads to the packages of this process."""
    bare = {
        name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PG", "DJANGO_", "SHOP_"))
    }
    return {**bare, "PYTHONPATH": str(ROOT), **more}


class Manage:
    """manage.py of the shop, on one database, called from elsewhere."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    def run(self, *words: str, **env: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, str(MANAGE), *words],
            cwd=self.folder,
            env=environment(SHOP_DATABASE=self.url, **env),
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def good(self, *words: str, **env: str) -> str:
        status, output, errors = self.run(*words, **env)
        assert (status, errors) == (0, ""), (status, output, errors)
        return output


@pytest.fixture
def manage(shop: str, tmp_path: Path) -> Manage:
    return Manage(tmp_path, shop)


@contextmanager
def started(words: list[str], folder: Path, env: dict[str, str]) -> Iterator[Program]:
    program = Program(words, folder, env)
    try:
        yield program
    finally:
        program.end()


class Program:
    """A process whose stderr goes to a file."""

    def __init__(self, words: list[str], folder: Path, env: dict[str, str]) -> None:
        self._log = folder / f"stderr-{os.urandom(4).hex()}"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stderr=log, start_new_session=True
            )

    @property
    def errors(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(
            lambda: self.errors.count(text) >= times or self.process.poll() is not None, PATIENCE, f"{text!r} was said"
        )
        assert self.errors.count(text) >= times, self.errors

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def test_the_commands_of_pgqueue_work_on_the_database_of_the_project(manage: Manage, pq: Any) -> None:
    tasks.send_receipt.enqueue(1)
    [queue] = json.loads(manage.good("pgqueue", "status", "--json"))
    assert (queue["queue"], queue["ready"]) == ("mail", 1)
    assert manage.good("pgqueue", "migrate", "--check").endswith(f"is up to date (revision {NEWEST}).\n")
    job_id = manage.good("pgqueue", "enqueue", "tests.contrib.django.shop.tasks.echo", "--args", '["by hand"]').strip()
    out = manage.good("pgqueue", "jobs", "--json", "--settings", "tests.contrib.django.settings")
    assert [str(job["id"]) for job in json.loads(out)][-1] == job_id
    manage.good("pgqueue", "worker", "--drain", "--log-level", "error", "--poll", "0.1")
    assert tasks.echo.get_result(job_id).return_value == "by hand"
    assert json.loads(manage.good("pgqueue", "dead", "list", "--json")) == []


def test_help_names_djangos_own_options(manage: Manage) -> None:
    for words in (("help", "pgqueue"), ("pgqueue", "--help")):
        text = manage.good(*words)
        assert "--backend ALIAS" in text
        assert "worker" in text


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("status", "--backend", "strct"), 1, "TASKS has no 'strct': did you mean 'strict'?"),
        (("status", "--backend", "immediate"), 1, "TASKS['immediate'] has another BACKEND"),
        (("jobs", "--state", "nonsense"), 2, "nonsense"),
        (("worker", "--reload", "--processes", "2"), 2, "--reload is for one worker process that stays"),
        (("worker", "--concurrency", "0"), 2, "concurrency must be a whole number"),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], status: int, sentence: str, manage: Manage) -> None:
    found, output, errors = manage.run("pgqueue", *words)
    assert (found, output) == (status, ""), (found, output, errors)
    assert len(errors.splitlines()) == 1, errors
    assert sentence in errors


def test_a_worker_is_not_started_on_settings_that_are_wrong(manage: Manage) -> None:
    manage.url = "host=127.0.0.1 port=1 dbname=nowhere"
    status, _, errors = manage.run("pgqueue", "worker", "--drain")
    assert status == 1
    assert "cannot" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"OPTIONS": {"shema": "jobs"}}, "TASKS['default']: unknown option 'shema': did you mean 'schema'?"),
        ({"OPTIONS": {"database": "defalt"}}, "DATABASES has no 'defalt': did you mean 'default'?"),
        ({"QUEUES": ["default", 7]}, "TASKS['default']: QUEUES: a queue name must be a non-empty string, not 7"),
    ],
)
def test_broken_settings_are_one_sentence_whatever_the_command(
    entry: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "from tests.contrib.django.settings import *\n"
        f"TASKS = {{'default': {{'BACKEND': {BACKEND!r}, **{entry!r}}}}}\n"
        "INSTALLED_APPS = [name for name in INSTALLED_APPS if not name.startswith('tests.')]\n"
    )
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    for words in (("status",), ("jobs",), ("worker", "--skip-checks")):
        status, output, errors = Manage(tmp_path, "dbname=nowhere").run(
            "pgqueue", *words, DJANGO_SETTINGS_MODULE="broken", PYTHONPATH=path
        )
        assert (status, output, len(errors.splitlines())) == (1, "", 1), errors
        assert sentence in errors


def test_only_the_command_worker_is_a_worker(tmp_path: Path) -> None:
    """Under DEBUG a worker that fails is waited for, until its code changes."""
    manage = Manage(tmp_path, "host=127.0.0.1 port=1 dbname=nowhere")
    for words in (("jobs", "--queue", "worker"), ("pause", "worker"), ("--schema", "worker", "status")):
        status, _, errors = manage.run("pgqueue", *words, SHOP_DEBUG="1")
        assert status == 1
        assert "cannot connect" in errors
        assert "code changes" not in errors


def test_a_missing_schema_is_answered_with_the_command_of_django(empty_database: str, tmp_path: Path) -> None:
    manage = Manage(tmp_path, empty_database)
    for words in (("status",), ("worker", "--drain")):
        status, output, errors = manage.run("pgqueue", *words)
        assert (status, output) == (1, "")
        assert "run `manage.py migrate`" in errors
        assert "`pgqueue migrate`" not in errors


def test_a_worker_says_under_debug_nothing_twice(manage: Manage, pq: Any) -> None:
    result = tasks.noop.enqueue()
    status, _, errors = manage.run("pgqueue", "worker", "--drain", "--poll", "0.1", SHOP_DEBUG="1")
    assert status == 0
    assert refreshed(result).status == "SUCCESSFUL"
    assert errors.count("state=RUNNING") == (1 if django.VERSION >= (6, 0) else 0)  # the backport says that at debug


def test_a_worker_works_and_stops_at_the_signal(manage: Manage, pq: Any) -> None:
    result = tasks.send_receipt.enqueue(1)
    words = [sys.executable, str(MANAGE), "pgqueue", "worker", "--poll", "0.1"]
    with started(words, manage.folder, environment(SHOP_DATABASE=manage.url)) as program:
        program.wait_for("started: queues")
        wait_until(lambda: refreshed(result).is_finished, PATIENCE, "the job is done")
        assert program.stop() == 0
    assert result.status == "SUCCESSFUL"


def test_several_processes_are_started_through_the_same_manage_py(manage: Manage, pq: Any) -> None:
    enqueued = [tasks.note.enqueue(str(number)) for number in range(20)]
    words = [sys.executable, str(MANAGE), "pgqueue", "worker", "--processes", "2", "--poll", "0.1"]
    with started(words, manage.folder, environment(SHOP_DATABASE=manage.url)) as program:
        program.wait_for("started: queues", times=2)
        wait_until(lambda: not pq.jobs(), PATIENCE, "all jobs are done")
        assert program.stop() == 0
    for result in enqueued:
        result.refresh()
        assert result.status == "SUCCESSFUL", result.errors


def test_call_command_prints_and_raises_as_other_commands_do(pq: Any) -> None:
    before = dict(os.environ)
    tasks.noop.enqueue()
    out = io.StringIO()
    call_command("pgqueue", "status", "--json", stdout=out)
    assert json.loads(out.getvalue())[0]["ready"] == 1
    with pytest.raises(CommandError, match="pgqueue jobs --state nonsense ended with status 2"):
        call_command("pgqueue", "jobs", "--state", "nonsense", stderr=io.StringIO())
    assert dict(os.environ) == before


PROJECT = """
    DATABASES = {{"default": {database!r}}}
    TASKS = {{"default": {{"BACKEND": {backend!r}}}}}
    INSTALLED_APPS = ["pgqueue.contrib.django", "letters"]
    DEBUG = True
    USE_TZ = True
    SECRET_KEY = "x"
"""
LETTERS = """
    from pathlib import Path

    from pgqueue.contrib.django import task


    @task
    def write(text):
        Path("written").open("a").write(text + " {word}\\n")
"""


def test_in_development_a_worker_starts_again_when_its_code_changes(
    pq: pgqueue.PgQueue, shop: str, tmp_path: Path
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "__init__.py").touch()
    code = tmp_path / "letters" / "tasks.py"
    (tmp_path / "project.py").write_text(textwrap.dedent(PROJECT.format(database=database(shop), backend=BACKEND)))
    written = tmp_path / "written"
    env = environment(DJANGO_SETTINGS_MODULE="project", PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}")

    def change(word: str) -> None:
        before = code.stat().st_mtime if code.exists() else 0.0
        code.write_text(textwrap.dedent(LETTERS.format(word=word)))
        os.utime(code, (before + 5, before + 5))  # a file system may count in seconds

    def wait_for_the_word(text: str, word: str) -> None:
        pq.enqueue("letters.tasks.write", [text])
        wait_until(lambda: written.exists() and f"{text} {word}" in written.read_text(), PATIENCE, f"{text} {word}")

    change("old")
    words = [sys.executable, "-m", "django", "pgqueue", "worker", "--poll", "0.1"]  # DEBUG is on
    with started(words, tmp_path, env) as program:
        wait_for_the_word("first", "old")
        change("new")
        program.wait_for("started: queues", times=2)
        wait_for_the_word("second", "new")
        # A mistake in the code is waited out.
        code.write_text("def broken(:\n")
        os.utime(code, (code.stat().st_atime, code.stat().st_mtime + 10))
        program.wait_for("it is started again when its code changes")
        change("mended")
        wait_for_the_word("third", "mended")
        assert program.stop() == 0


def test_the_application_is_found_without_manage_py_too(shop: str, tmp_path: Path) -> None:
    result = tasks.send_receipt.enqueue(1)
    env = environment(DJANGO_SETTINGS_MODULE="tests.contrib.django.settings", SHOP_DATABASE=shop)
    words = [
        sys.executable,
        "-m",
        "pgqueue",
        "worker",
        "--app",
        "pgqueue.contrib.django.app",
        "--drain",
        "--poll",
        "0.1",
    ]
    subprocess.run(words, cwd=tmp_path, env=env, check=True, timeout=PATIENCE, capture_output=True)
    result.refresh()
    assert result.status == "SUCCESSFUL"

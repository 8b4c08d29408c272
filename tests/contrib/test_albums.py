"""The example applications, started as a user starts them, killed and started again: the page and the jobs agree."""

from __future__ import annotations

import io
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from PIL import Image

from pgqueue.demo.photographs import Upload, sample_photographs, uploads
from tests.contrib.album import (
    EXAMPLES,
    EXAMPLES_BY_NAME,
    PATIENCE,
    Site,
    command_line,
    environment,
    is_answered,
    started,
)
from tests.waiting import wait_until

Admin = psycopg.Connection[Any]
COUNT = 6


@pytest.fixture(scope="module")
def photographs() -> list[Upload]:
    """Real photographs, and one file that was cut in half."""
    return list(uploads(sample_photographs(), COUNT))


def locked_tasks(admin: Admin) -> int:
    rows = admin.execute("SELECT count(*) FROM pg_locks WHERE relation = 'thumbnail'::regclass AND NOT granted")
    return int(rows.fetchall()[0][0])


def check_that_page_and_jobs_agree(site: Site, admin: Admin, sent: list[Upload]) -> None:
    shown, page = site.photos(), site.get("/").decode()
    assert sorted(name for name, _ in shown.values()) == sorted(upload.name for upload in sent)
    assert Counter(state for _, state in shown.values()) == {"ready": COUNT - 1, "failed": 1}
    rows = admin.execute(
        "SELECT photo.id, archive.state, dead_letter.id IS NOT NULL, thumbnail.picture FROM photo"
        " LEFT JOIN pgqueue.archive ON archive.id = photo.job_id"
        " LEFT JOIN pgqueue.dead_letter ON dead_letter.id = photo.job_id"
        " LEFT JOIN thumbnail ON thumbnail.photo_id = photo.id"
    ).fetchall()
    assert len(rows) == COUNT
    for number, ended, dead, picture in rows:
        ready = shown[number][1] == "ready"
        assert (ended == "completed", dead, picture is not None) == (ready, not ready, ready), shown[number]
        if ready:
            assert site.get(f"/photos/{number}/thumbnail.jpg") == picture
            assert f"/photos/{number}/thumbnail.jpg" in page
            with Image.open(io.BytesIO(picture)) as image:
                assert image.size == (256, 256)
    live, jobs = "SELECT count(*) FROM pgqueue.job", "SELECT count(*) FROM pgqueue.archive"
    assert [admin.execute(query.encode()).fetchone() for query in (live, jobs)] == [(0,), (COUNT - 1,)]


@pytest.mark.parametrize("name", EXAMPLES_BY_NAME)
def test_the_page_and_the_jobs_of_an_example_agree_after_both_processes_were_killed(
    name: str, empty_database: str, tmp_path: Path, photographs: list[Upload]
) -> None:
    example, env = EXAMPLES_BY_NAME[name], environment(empty_database, tmp_path)
    for words in example.setup:
        command = command_line(words.split())
        done = subprocess.run(command, cwd=EXAMPLES, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    serve = (*example.server.split(), *example.free_port)
    worker = (*example.worker.split(), "--lease", "2", "--concurrency", "2", "--breaker", "0")
    with psycopg.connect(empty_database, autocommit=True) as admin:
        with started(serve, env) as server:
            site = Site(example, server)
            site.get("/")  # the application is there, and so are its tables
            with started(worker, env) as killed, psycopg.connect(empty_database) as holder:
                holder.execute("LOCK TABLE thumbnail IN EXCLUSIVE MODE")
                for upload in photographs:
                    site.upload(upload.name, upload.content)
                wait_until(
                    lambda: locked_tasks(admin), PATIENCE, f"a job is about to write its thumbnail:\n{killed.said}"
                )
                killed.kill()
            server.kill()
            assert not is_answered(lambda: site.get("/"))
        with started(serve, env) as server, started(worker, env) as second:
            site = Site(example, server)
            states = lambda: Counter(state for _, state in site.photos().values())  # noqa: E731
            wait_until(lambda: not states()["waiting"], PATIENCE, f"no photograph waits:\n{second.said}")
            check_that_page_and_jobs_agree(site, admin, photographs)
            assert second.stop(signal.SIGTERM) == 0, second.said


@pytest.mark.parametrize("name", EXAMPLES_BY_NAME)
def test_the_readme_of_an_example_has_the_commands_that_are_tested(name: str) -> None:
    example, text = EXAMPLES_BY_NAME[name], (EXAMPLES / f"{name}_album" / "README.md").read_text(encoding="utf-8")
    commands = [line.partition("  #")[0].strip() for line in text.splitlines()]
    for command in (*example.setup, example.server, example.worker):
        assert command in commands


@pytest.mark.parametrize("name", EXAMPLES_BY_NAME)
def test_what_no_photograph_is_gets_an_answer_of_its_own(name: str, empty_database: str, tmp_path: Path) -> None:
    example, env = EXAMPLES_BY_NAME[name], environment(empty_database, tmp_path)
    for words in example.setup:
        subprocess.run(command_line(words.split()), cwd=EXAMPLES, env=env, capture_output=True, check=True)
    with started((*example.server.split(), *example.free_port), env) as server:
        site = Site(example, server)
        for number in ("1", "2147483648", "9" * 40, "x"):
            assert site.status_of(f"/photos/{number}/thumbnail.jpg") in (404, 422), number
        odd = "ä 100% <b>&'.jpg"
        site.upload(odd, b"")
        assert list(site.photos().values()) == [(odd, "waiting")]

"""The demo, as a user runs it: in a process of its own, with real photographs, real workers and a real SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import pgqueue

PIL = pytest.importorskip("PIL.Image")
SAMPLES = pytest.importorskip("pgqueue.demo.photographs")
TIME = 150


def environment(folder: Path, **more: str) -> dict[str, str]:
    """No database configured; the private server would be in `folder`."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "AVATARS_"))}
    return {**bare, "PGQUEUE_DATA_DIR": str(folder / "server"), **more}


def start(folder: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "demo", *words],
        cwd=folder,
        env=environment(folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *words: str, **more: str) -> tuple[int, str, str]:
    """The exit status, and what was printed to stdout and stderr."""
    process = start(folder, *words, **more)
    output, errors = process.communicate(timeout=TIME)
    return process.returncode, output, errors


def processes_of(folder: Path) -> Iterator[str]:
    """Command lines of processes that were started for a demo in `folder`: workers by environment, servers by argument."""
    needle = os.fsencode(folder)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if needle in words or needle in (process / "environ").read_bytes():
                yield words.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


def only_sentence(errors: str) -> str:
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    return lines[0]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with two photographs, a text and a picture that is broken."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, photograph in enumerate(SAMPLES.sample_photographs()[:2]):
        (folder / f"{number}.jpg").write_bytes(photograph.read_bytes())
    (folder / "notes.txt").write_text("not a picture")
    (folder / "half.jpg").write_bytes((folder / "0.jpg").read_bytes()[:9000])
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twice_in_a_row_with_nothing_configured_the_sums_agree_and_no_process_is_left(tmp_path: Path) -> None:
    for _ in range(2):
        status, output, errors = run(tmp_path)
        assert status == 0, output + errors
        assert re.search(r"jobs enqueued +40  = 39 completed \+ 1 dead \+ 0 others", output)
        assert re.search(r"dead letter +3x  upload \d+: OSError: image file is truncated", output)
        assert re.search(r"worker \d \(pid \d+\) killed with SIGKILL while it held uploads \d", output)
        assert re.search(r"jobs rescued +[1-9]", output)
        seconds = re.search(r"wall time +([\d.]+) s", output)
        assert seconds is not None
        assert 0 < float(seconds[1]) < TIME
        assert not list(processes_of(tmp_path))
    folder = tmp_path / "pgqueue-demo"
    thumbnails = sorted(folder.glob("thumbnails/*.jpg"))
    assert len(thumbnails) == 39
    for file in [*thumbnails, folder / "contact-sheet.png"]:
        with PIL.open(file) as image:
            image.load()


def test_in_a_database_of_the_user_it_leaves_the_queue_of_the_user_alone(
    tmp_path: Path, pictures: Path, database: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[object]
) -> None:
    mine = pq.enqueue("somebody.elses.task", [1], queue="avatars")
    words = ["--images", str(pictures), "--uploads", "9", "--workers", "3", "--output", "somewhere"]
    status, output, errors = run(tmp_path, *words, "--database-url", database)
    assert status == 0, output + errors
    assert "2 photographs in" in output
    assert [(job.id, job.attempt) for job in pq.jobs()] == [(mine, 0)]
    assert len(list((tmp_path / "somewhere" / "thumbnails").iterdir())) == 8
    assert admin.execute("SELECT count(*) FROM avatars_demo.upload").fetchall() == [(9,)]
    assert admin.execute("SELECT count(*) FROM pgqueue_demo.job").fetchall() == [(0,)]
    assert not list(processes_of(tmp_path))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_its_workers_and_its_server(tmp_path: Path, number: signal.Signals, status: int) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "killed with SIGKILL" in line:
            break
    assert any("worker" in words for words in processes_of(tmp_path))
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIME)
    assert process.returncode == status
    assert only_sentence(errors) == "pgqueue: the demo was stopped; its workers are ended"
    assert not list(processes_of(tmp_path))


def test_a_second_demo_in_the_same_database_waits_for_nothing_and_says_so(tmp_path: Path, database: str) -> None:
    with psycopg.connect(database) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended('pgqueue demo', 0))")
        status, _, errors = run(tmp_path, "--database-url", database)
    assert status == 1
    assert "Another `pgqueue demo` runs in this database" in only_sentence(errors)


def test_a_schema_that_it_did_not_make_is_not_dropped(
    tmp_path: Path, database: str, admin: psycopg.Connection[object]
) -> None:
    admin.execute("CREATE SCHEMA avatars_demo")
    admin.execute("CREATE TABLE avatars_demo.precious ()")
    status, _, errors = run(tmp_path, "--database-url", database)
    assert status == 1
    assert "a schema avatars_demo that `pgqueue demo` did not make" in only_sentence(errors)
    admin.execute("SELECT FROM avatars_demo.precious")


def test_a_folder_that_it_did_not_make_is_not_emptied(tmp_path: Path, pictures: Path, database: str) -> None:
    before = sorted(pictures.iterdir())
    status, _, errors = run(tmp_path, "--output", str(pictures), "--database-url", database)
    assert status == 1
    assert "this folder holds something else" in only_sentence(errors)
    assert sorted(pictures.iterdir()) == before


def test_a_folder_without_a_picture_is_one_sentence(tmp_path: Path, database: str) -> None:
    (tmp_path / "notes.txt").write_text("not a picture")
    status, _, errors = run(tmp_path, "--images", str(tmp_path), "--database-url", database)
    assert status == 1
    assert "no picture that Pillow can read" in only_sentence(errors)
    status, _, errors = run(tmp_path, "--images", str(tmp_path / "nowhere"), "--database-url", database)
    assert status == 1
    assert "no such file or directory" in only_sentence(errors)


def test_a_wrong_database_is_one_sentence_without_its_password(tmp_path: Path) -> None:
    url = "postgresql://me:s3cret@127.0.0.1:1/nowhere"
    status, output, errors = run(tmp_path, "--database-url", url)
    assert status == 1
    assert "database 'nowhere' on 127.0.0.1:1 cannot be used" in only_sentence(errors)
    assert "s3cret" not in output + errors


@pytest.mark.parametrize(
    ("missing", "what"),
    [("sys.modules['PIL'] = None", "Pillow"), ("metadata.files = missing", "The package of sample photographs")],
)
def test_without_the_extra_it_says_what_to_install(tmp_path: Path, database: str, missing: str, what: str) -> None:
    code = f"""
import sys
from importlib import metadata
def missing(name): raise metadata.PackageNotFoundError(name)
{missing}
sys.argv = ['pgqueue', 'demo', '--database-url', {database!r}]
from pgqueue.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME,
    )
    assert done.returncode == 1, done.stderr
    sentence = f"pgqueue: {what} is not installed: run `pip install '.[demo]'` in a checkout of pgqueue."
    assert only_sentence(done.stderr) == sentence

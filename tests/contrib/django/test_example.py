"""The application of examples/darkroom, started as a user starts it: processes, HTTP requests, a photograph."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import pgqueue
from pgqueue.demo.photographs import sample_photographs
from tests.conftest import execute
from tests.contrib.django.test_command import Program, environment, started
from tests.waiting import wait_until

PATIENCE = 60.0
PROJECT = Path(__file__).parents[3] / "examples" / "darkroom"


class Darkroom:
    """The project on a database of its own, and its pages."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.env = environment(DATABASE_URL=url, PYTHONPATH=str(Path(__file__).parents[3]), PYTHONUNBUFFERED="1")

    def words(self, *words: str) -> list[str]:
        return [sys.executable, str(PROJECT / "manage.py"), *words]

    def serving(self) -> Any:
        return started(self.words("runserver", "--noreload", f"127.0.0.1:{self.port}"), self.folder, self.env)

    def working(self) -> Any:
        words = self.words("pgqueue", "worker", "--concurrency", "2", "--lease", "2", "--poll", "0.1")
        return started(words, self.folder, self.env)

    def get(self, page: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{page}", timeout=PATIENCE) as answer:
            content: bytes = answer.read()
            return content

    def is_up(self) -> bool:
        with suppress(urllib.error.URLError, ConnectionError):
            return bool(self.get("/state/"))
        return False

    def upload(self, name: str, content: bytes, then: str = "") -> None:
        """As a browser sends a form."""
        mark = "a-boundary-that-is-in-no-picture"
        head = f'--{mark}\r\nContent-Disposition: form-data; name="then"\r\n\r\n{then}\r\n--{mark}\r\n'
        head += (
            f'Content-Disposition: form-data; name="photograph"; filename="{name}"\r\nContent-Type: image/jpeg\r\n\r\n'
        )
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/upload/",
            head.encode() + content + f"\r\n--{mark}--\r\n".encode(),
            {"Content-Type": f"multipart/form-data; boundary={mark}"},
        )
        urllib.request.urlopen(request, timeout=PATIENCE).close()

    def photographs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.get("/state/"))["photographs"]
        return found

    def wait_for(self, **wanted: Any) -> list[dict[str, Any]]:
        def all_are() -> list[dict[str, Any]]:
            found = self.photographs()
            return found if all(one[name] == value for one in found for name, value in wanted.items()) else []

        return wait_until(all_are, PATIENCE, f"every photograph is {wanted}")


@pytest.fixture
def darkroom(empty_database: str, tmp_path: Path) -> Darkroom:
    room = Darkroom(empty_database, tmp_path)
    subprocess.run(room.words("migrate", "--verbosity", "0"), env=room.env, cwd=tmp_path, check=True, timeout=120)
    return room


def kill(program: Program) -> None:
    os.kill(program.process.pid, signal.SIGKILL)
    program.process.wait(PATIENCE)


def test_photographs_are_developed_and_page_and_queue_agree_after_both_processes_were_killed(
    darkroom: Darkroom, empty_database: str
) -> None:
    picture = sample_photographs()[0].read_bytes()
    with darkroom.serving() as server, darkroom.working() as worker:
        wait_until(darkroom.is_up, PATIENCE, "the server answers")
        worker.wait_for("started: queues")
        darkroom.upload("first.jpg", picture)
        [first] = darkroom.wait_for(status="SUCCESSFUL", developed=True)
        with Image.open(io.BytesIO(darkroom.get(f"/print/{first['pk']}/"))) as made:
            assert (made.format, made.mode, max(made.size)) == ("JPEG", "L", 320)
        with pytest.raises(urllib.error.HTTPError):
            darkroom.upload("never.jpg", picture, then="fail")
        kill(worker)
        for number in range(4):
            darkroom.upload(f"{number}.jpg", picture)
        assert [one["status"] for one in darkroom.photographs()] == ["READY"] * 4 + ["SUCCESSFUL"]
        kill(server)
    with darkroom.serving(), darkroom.working() as worker:
        wait_until(darkroom.is_up, PATIENCE, "the server answers again")
        found = darkroom.wait_for(status="SUCCESSFUL", developed=True)
        assert [one["name"] for one in found] == ["3.jpg", "2.jpg", "1.jpg", "0.jpg", "first.jpg"]
        darkroom.upload("broken.jpg", b"this is no picture")
        [broken] = wait_until(
            lambda: [one for one in darkroom.photographs() if one["status"] == "FAILED"],
            PATIENCE,
            "the broken one is failed",
        )
        assert (broken["name"], broken["attempts"]) == ("broken.jpg", 3)
        assert "UnidentifiedImageError" in broken["error"]
        assert b"UnidentifiedImageError" in darkroom.get("/")
        assert worker.stop() == 0
    with pgqueue.PgQueue(empty_database) as pq:
        assert pq.jobs() == []
        assert [str(letter.task) for letter in pq.dead_letters()] == ["darkroom.gallery.tasks.develop"]
    # Every photograph has its job, and every job its photograph.
    jobs = "SELECT id::text FROM pgqueue.archive UNION ALL SELECT id::text FROM pgqueue.dead_letter ORDER BY 1"
    assert execute(empty_database, "SELECT job FROM gallery_photograph ORDER BY 1") == execute(empty_database, jobs)


def test_the_pages_stand_wrong_input_and_a_job_that_nothing_is_known_of_any_more(
    darkroom: Darkroom, empty_database: str
) -> None:
    with darkroom.serving():
        wait_until(darkroom.is_up, PATIENCE, "the server answers")
        page = f"http://127.0.0.1:{darkroom.port}/upload/"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(page, b"photograph=no+file", timeout=PATIENCE)
        assert refused.value.code == 400
        refused.value.close()
        assert darkroom.photographs() == []
        darkroom.upload(f"{'long' * 60}.jpg", b"whatever it is")
        [long] = darkroom.photographs()
        assert long["name"] == "long" * 50
        execute(empty_database, "DELETE FROM gallery_photograph")
        execute(empty_database, "DELETE FROM pgqueue.job")
        darkroom.upload("lost.jpg", b"whatever it is")
        with pgqueue.PgQueue(empty_database) as pq:
            [job] = pq.jobs()
            pq.cancel(job.id)
        assert [one["status"] for one in darkroom.photographs()] == ["FAILED"]
        execute(empty_database, "DELETE FROM pgqueue.archive")
        assert [one["status"] for one in darkroom.photographs()] == ["FORGOTTEN"]
        assert b"lost.jpg: FORGOTTEN" in darkroom.get("/")

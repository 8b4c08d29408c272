"""Runs of pytest that are stopped by force, and what is left of their private server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgqueue import embedded
from pgqueue.testing import leftovers
from tests.waiting import wait_until

HANGING = """
import pathlib, time

def test_hangs(pgqueue_cloned):
    pathlib.Path("ready").touch()
    time.sleep(100)
"""
QUICK = """
def test_is_quick(pgqueue_database):
    pass
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_uid == os.geteuid() and place != Path("/tmp"):
            place.chmod(0o755)  # root's server runs as another account
    return folder


@pytest.fixture
def start(tmp_path: Path, temporary: Path) -> Iterator[Start]:
    """Begin a run of pytest, in a process group of its own."""
    running: list[subprocess.Popen[str]] = []
    left_out = ("PYTEST_", "PGQUEUE_TEST_DATABASE_URL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:asyncio\n", encoding="utf-8")

    def begin(test: str, *words: str) -> subprocess.Popen[str]:
        (tmp_path / "ready").unlink(missing_ok=True)
        (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *words],
            cwd=tmp_path,
            env={**kept, "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def postmasters(temporary: Path) -> list[int]:
    """Servers whose data lie there."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "-D" in words and words[words.index("-D") + 1].startswith(str(temporary)):
            found.append(int(place.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.parametrize("parallel", [[], ["-n", "1"]], ids=["one process", "xdist"])
def test_ctrl_c_ends_the_run_and_its_server(parallel: list[str], start: Start, tmp_path: Path, temporary: Path) -> None:
    process = start(HANGING, *parallel)
    wait_until((tmp_path / "ready").exists, 60, "the test runs")
    assert len(postmasters(temporary)) == 1
    os.killpg(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert "KeyboardInterrupt" in said
    assert not re.search(r"pgqueue/(testing|embedded)/", said), said
    assert postmasters(temporary) == []
    assert list(temporary.glob("pgqueue-testing-*")) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_the_next_run_ends_the_server_of_one_that_was_killed(start: Start, tmp_path: Path, temporary: Path) -> None:
    killed = start(HANGING)
    wait_until((tmp_path / "ready").exists, 60, "the test runs")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    [left] = temporary.glob("pgqueue-testing-*")
    assert len(postmasters(temporary)) == 1
    assert start(QUICK).wait(timeout=60) == 0
    assert not left.exists()
    assert postmasters(temporary) == []
    assert list(temporary.glob("pgqueue-testing-*")) == []


def test_folders_of_the_living_of_users_and_of_others_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    ended = subprocess.Popen(["true"])
    ended.wait()
    living = leftovers.server_folder()
    used = temporary / f"pgqueue-testing-{ended.pid}"
    other = temporary / "pgqueue-testing-of-somebody"
    for folder in (living, other):
        folder.mkdir()
    (temporary / "elsewhere").mkdir()
    link = temporary / "pgqueue-testing-99999999999999999999"
    link.symlink_to(temporary / "elsewhere")
    with embedded.start(used):
        leftovers.remove_abandoned()
        assert used.exists()
    leftovers.remove_abandoned()
    assert not used.exists()
    assert all(folder.exists() for folder in (living, other, link))
    leftovers.remove_server(0.0)
    assert not living.exists()

"""The locks that tell who lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pgqueue.embedded.locks import Lock, is_free

HOLD = """
import os, pathlib, sys
from pgqueue.embedded.locks import Lock
lock = Lock(pathlib.Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""

HAND_TO_CHILD = """
import os, pathlib, sys
from pgqueue.embedded.locks import Lock, is_free
path = pathlib.Path(sys.argv[1])
lock = Lock(path)
lock.acquire()
ours, theirs = os.pipe()
if os.fork() == 0:
    os.close(theirs)
    os.read(ours, 1)
    os._exit(0)
lock.release()
print(is_free(path))
os.close(theirs)
os.wait()
"""


def test_two_locks_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def test_shared_locks_live_together_and_keep_the_exclusive_one_out(tmp_path: Path) -> None:
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    first.acquire(shared=True)
    second.acquire(shared=True)
    first.release()
    assert not is_free(tmp_path / "lock")
    second.release()
    assert is_free(tmp_path / "lock")


def test_a_killed_process_loses_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert not is_free(path)
        holder.kill()
        holder.wait()
    assert is_free(path)


def test_a_released_lock_does_not_stay_with_a_forked_child(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HAND_TO_CHILD, str(tmp_path / "lock")], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_a_closed_lock_stays_with_the_process_that_inherited_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = Lock(path)
    lock.acquire()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]) as heir:
        lock.close()
        assert not is_free(path)
        assert heir.stdin is not None
        heir.stdin.close()
        heir.wait()
    assert is_free(path)

"""Where the private server of a run lives, and its end, also after runs that were killed.

Importing this imports nothing heavy: every run of pytest does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "pgqueue-testing-"


def server_folder() -> Path:
    """Where the private server of this run lives: named after the process that began the run."""
    beginner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return Path(tempfile.gettempdir()) / f"{PREFIX}{beginner}"


def remove_server(patience: float) -> None:
    """Nothing of it stays, once nobody uses it; for that we wait so many seconds. To be called by the process that began the
    run, at its end."""
    folder = server_folder()
    end = time.monotonic() + patience
    while _is_ours(folder) and not _removed(folder) and time.monotonic() < end:
        time.sleep(0.05)


def remove_abandoned() -> None:
    """End what is left of runs that were killed: their process is gone, and nobody uses their server."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        beginner = folder.name.removeprefix(PREFIX)
        if beginner.isdecimal() and _is_ours(folder) and not _lives(int(beginner)):
            _removed(folder)


def _is_ours(folder: Path) -> bool:
    try:
        return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _removed(folder: Path) -> bool:
    """Stop the server of this folder and remove both, unless somebody uses it, starts it or stops it at this moment."""
    from pgqueue.embedded.cluster import shut_server_down
    from pgqueue.embedded.folder import Folder
    from pgqueue.embedded.locks import Lock, is_free
    from pgqueue.errors import EmbeddedError

    place = Folder(Path(os.path.realpath(folder)))
    with contextlib.suppress(OSError, EmbeddedError):  # nothing here may spoil a run; the next one tries again
        lock = Lock(place.lock)
        try:
            if not lock.try_acquire() or not is_free(place.users):
                return False
            shut_server_down(place)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            lock.close()
    return True

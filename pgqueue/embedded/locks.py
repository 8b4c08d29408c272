"""File locks that the kernel drops with their last holder, however it dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

if sys.platform != "win32":
    import fcntl


class Lock:
    """One `flock` on `path`, not yet taken.

    Each instance opens the file anew, so two of them in one process exclude each other as two processes would.
    Closed on exec, kept across a fork. Every method raises `OSError` as the system calls do.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def acquire(self, *, shared: bool = False) -> None:
        """Wait for the lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Take the lock, exclusively, if it is free now."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Give the lock up, also for the processes that inherited it, and close."""
        # Closing alone would leave it with a forked child for as long as that lives.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        """Close this process's end; whoever inherited the descriptor keeps the lock."""
        os.close(self._descriptor)

    def fileno(self) -> int:
        """The descriptor, to be inherited."""
        return self._descriptor

    def owner(self) -> int:
        """The user id that owns the file, which is who first made it."""
        return os.fstat(self._descriptor).st_uid

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_free(path: Path) -> bool:
    """Whether nobody holds the lock of `path`, in any way, at this moment."""
    lock = Lock(path)
    try:
        return lock.try_acquire()
    finally:
        lock.release()

"""The end of the process."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

PATIENCE = 3.0
"""Seconds for what applications do at exit."""


def leave(status: int) -> None:
    """Run the exit functions, flush, and end the process; does not return.

    Python itself would wait for every thread that is no daemon, so one hung thread of an application (or a pool of
    them) would keep a worker that has stopped from leaving, until somebody kills it. The order is that of
    `multiprocessing`, which ends its children in the same way.
    """
    hurry = threading.Timer(PATIENCE, os._exit, (status,))
    hurry.daemon = True
    hurry.start()
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)

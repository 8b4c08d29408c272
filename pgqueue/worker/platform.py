"""What child processes need of the operating system. Everything else of a worker runs wherever Python and psycopg do."""

from __future__ import annotations

import os
import select
import signal

from pgqueue.errors import ConfigurationError

_NEEDED = ((os, "killpg"), (os, "register_at_fork"), (signal, "pthread_sigmask"), (signal, "SIGKILL"), (select, "poll"))


def lacks() -> list[str]:
    """What is missing here for child processes that can be reached and ended for sure; nothing on Unix."""
    return [f"{module.__name__}.{name}" for module, name in _NEEDED if not hasattr(module, name)]


def require_children(what: str) -> None:
    """ConfigurationError where `what` cannot be had for want of such processes."""
    if missing := lacks():
        raise ConfigurationError(f"{what} needs a Unix system: this one lacks {', '.join(missing)}")

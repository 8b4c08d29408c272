"""For the tests of applications: what was enqueued, running it in the test, an inline mode, a clock; see docs/testing.md.

The fixtures are those of a pytest plugin, which pytest finds by itself. What is here needs no pytest, and is loaded when
it is asked for: the plugin lies here as well, and pytest loads that in every run.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgqueue.testing.calling import Ran, TooManyJobs
    from pgqueue.testing.clock import Clock, install_clock
    from pgqueue.testing.inlining import inline
    from pgqueue.testing.looking import (
        Enqueued,
        assert_enqueued,
        assert_enqueued_async,
        enqueued_jobs,
        enqueued_jobs_async,
    )
    from pgqueue.testing.pointing import bound, pointed
    from pgqueue.testing.running import run_jobs, run_jobs_async

__all__ = [
    "Clock",
    "Enqueued",
    "Ran",
    "TooManyJobs",
    "assert_enqueued",
    "assert_enqueued_async",
    "bound",
    "enqueued_jobs",
    "enqueued_jobs_async",
    "inline",
    "install_clock",
    "pointed",
    "run_jobs",
    "run_jobs_async",
]

_HOMES = {
    "Clock": "clock",
    "Enqueued": "looking",
    "Ran": "calling",
    "TooManyJobs": "calling",
    "assert_enqueued": "looking",
    "assert_enqueued_async": "looking",
    "bound": "pointing",
    "enqueued_jobs": "looking",
    "enqueued_jobs_async": "looking",
    "inline": "inlining",
    "install_clock": "clock",
    "pointed": "pointing",
    "run_jobs": "running",
    "run_jobs_async": "running",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

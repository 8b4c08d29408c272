"""For the tests of applications: what was enqueued, running it in the test, an inline mode, a clock; see docs/testing.md.

The fixtures are those of a pytest plugin, which pytest finds by itself. What is here needs no pytest.
"""

from pgqueue.testing.calling import Ran, TooManyJobs
from pgqueue.testing.clock import Clock, install_clock
from pgqueue.testing.inline import inline
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

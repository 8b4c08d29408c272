"""The error of the demo."""

from __future__ import annotations

from pgqueue.errors import PgQueueError


class DemoError(PgQueueError):
    """The demo cannot run here, or what it found at the end does not add up."""


def extra_is_missing(what: str) -> DemoError:
    """The sentence for an installation without the extra `demo`."""
    return DemoError(f"{what} is not installed: run `pip install '.[demo]'` in a checkout of pgqueue.")

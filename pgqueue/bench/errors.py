"""Why a run brings no figure."""

from __future__ import annotations


class Miscount(Exception):
    """A run executed another number of jobs than were enqueued: its figure would mean nothing."""


class Skipped(Exception):
    """A case cannot run here; the message says why."""

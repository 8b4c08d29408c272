"""Faults that are planted into worker processes, to show that the checker finds them. Never by a switch in the product: the
statements' texts are changed in the process that imports the test's application, or a method is replaced there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import psycopg

import pgqueue.sql
from pgqueue.ops import settle as settle_ops
from pgqueue.outcome import COMPLETED
from pgqueue.worker.claimer import Claimer
from pgqueue.worker.maintenance import Maintenance

VARIABLE = "HISTORY_PLANTED"
FENCE = r"\s+AND lease_id = \(%\(tokens\)b::int8\[\]\)\[width_bucket\(id, %\(ids\)b::int8\[\]\)\]"


def plant(name: str) -> None:
    """Plant this fault into this process; nothing for an empty name."""
    if name:
        PLANTS[name]()


def _change(statement: str, *changes: tuple[str, str]) -> None:
    """Replace pieces (regular expressions) of a statement; ValueError where a piece is not there any more."""
    text = pgqueue.sql.TEXTS[statement]
    for piece, replacement in changes:
        changed = re.sub(piece, replacement, text)
        if changed == text:
            raise ValueError(f"{statement} holds nothing like {piece}: plant the fault anew")
        text = changed
    pgqueue.sql.TEXTS = MappingProxyType({**pgqueue.sql.TEXTS, statement: text})
    pgqueue.sql.statements.cache_clear()


def _without_the_token() -> None:
    """Settles act on whoever owns the job."""
    for statement in ("job_complete", "job_retry", "job_bury"):
        _change(statement, (FENCE, ""))


def _acknowledged_before_run() -> None:
    """Jobs are completed when they are claimed, and run afterwards."""
    hand_over: Callable[..., None] = Claimer._hand_over

    def settle_first(self: Claimer, helds: Any) -> None:
        pairs = [(held.job, COMPLETED) for held in helds]
        self.link.run(settle_ops.settle(helds[0].job.queue, pairs, options=settle_ops.SettleOptions()))
        hand_over(self, helds)

    Claimer._hand_over = settle_first  # type: ignore[method-assign]


def _rescue_without_maximum() -> None:
    """What a lost worker held always goes back into the queue."""
    _change("job_rescue", (r"WHEN attempt >= max_attempts THEN 'dead' ", ""))


def _deleted_instead_of_retried() -> None:
    """A failed job is gone."""
    _change(
        "job_retry",
        (r"\(SELECT id FROM locked WHERE ended\)", "(SELECT id FROM locked)"),
        (r"\(SELECT id FROM locked WHERE NOT ended\)", "(SELECT id FROM locked WHERE false)"),
        (r"FROM gone\s+WHERE %\(archive\)s::bool", "FROM gone WHERE cancel_requested AND %(archive)s::bool"),
    )


def _dead_loop() -> None:
    """The process lives, and one of its loops does nothing any more."""

    def idle(self: Maintenance) -> None:
        self.stopping.wait(1.0)

    Maintenance.turn = idle  # type: ignore[method-assign]


def _admission_without_the_lock() -> None:
    """Two workers may be at one lane at once. An admission takes a moment here, as on a busier machine."""
    _change("admission_take", (r"pg_try_advisory_xact_lock\(hash\) AS ours", "true AS ours"))
    _change(
        "lane_admit",
        (r"WITH room AS", "WITH nap AS MATERIALIZED (SELECT pg_sleep(0.3)), room AS"),
        (r"FROM unnest\(%\(lanes\)b::text\[\]\) AS given\(lane\)", r"\g<0> CROSS JOIN nap"),
    )


def _settle_without_admission() -> None:
    """A completion does not say that its lane has a free slot."""
    _change("job_complete", (r"FROM gone WHERE lane IS NOT NULL", "FROM gone WHERE false"))


def _retries_hold_no_slot() -> None:
    """An admission counts only those in line or in work; and the index that would refuse the second one is gone."""
    _change("lane_admit", (r"AND a\.admitted\)", "AND a.admitted AND a.run_at IS NULL)"))
    with psycopg.connect(os.environ["HISTORY_URL"], autocommit=True) as connection:
        connection.execute("DROP INDEX IF EXISTS pgqueue.job_lane_head")


PLANTS: dict[str, Callable[[], None]] = {
    "settle without the token": _without_the_token,
    "acknowledged before run": _acknowledged_before_run,
    "rescue without the maximum": _rescue_without_maximum,
    "deleted instead of retried": _deleted_instead_of_retried,
    "dead loop": _dead_loop,
    "admission without the lock": _admission_without_the_lock,
    "settle without an admission row": _settle_without_admission,
    "retries hold no slot": _retries_hold_no_slot,
}

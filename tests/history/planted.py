"""Faults that are planted into worker processes, to show that the checker finds them. Never by a switch in the product: the
statements' texts are changed in the process that imports the test's application, or a method is replaced there."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

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
        (r"\(SELECT id FROM locked WHERE cancel_requested\)", "(SELECT id FROM locked)"),
        (r"\(SELECT id FROM locked WHERE NOT cancel_requested\)", "(SELECT id FROM locked WHERE false)"),
        (r"FROM gone\s+WHERE %\(archive\)s::bool", "FROM gone WHERE cancel_requested AND %(archive)s::bool"),
    )


def _dead_loop() -> None:
    """The process lives, and one of its loops does nothing any more."""

    def idle(self: Maintenance) -> None:
        self.stopping.wait(1.0)

    Maintenance.turn = idle  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    "settle without the token": _without_the_token,
    "acknowledged before run": _acknowledged_before_run,
    "rescue without the maximum": _rescue_without_maximum,
    "deleted instead of retried": _deleted_instead_of_retried,
    "dead loop": _dead_loop,
}

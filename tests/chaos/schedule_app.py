"""An application with a schedule that ticks every second, whose every tick counts."""

from __future__ import annotations

import pgqueue

pq = pgqueue.PgQueue()


@pq.schedule("* * * * * *", name="every second", missed="all", grace=0)
@pq.task(name="note", queue="chaos")
def note() -> None:
    """Nothing to do: the archive keeps which tick it was."""

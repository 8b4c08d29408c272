"""pgqueue result."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pgqueue.cli.database import queue
from pgqueue.cli.errors import UsageMistake
from pgqueue.cli.jobs import Ids
from pgqueue.cli.options import AsJson, Place, placed
from pgqueue.cli.output import decoded, write_json, write_table
from pgqueue.client import PgQueue
from pgqueue.errors import WaitTimeout
from pgqueue.ops import result as result_ops
from pgqueue.result import JobResult, Progress


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("result")(result)


@placed
def result(
    place: Place,
    ids: Ids,
    wait: Annotated[
        float | None,
        typer.Option("--wait", metavar="S", min=0.0, help="Wait up to so many seconds until all have ended."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show how jobs ended and what they returned, and the progress of those that run. Exit status 1 if one is not completed.

    A value is shown where the task keeps results (keep_result). "ended" is a job that is gone without a trace.
    """
    if len(set(ids)) < len(ids):
        raise UsageMistake("an id is named twice")
    with queue(place) as pq:
        ended, running, known = _look(pq, ids, wait)
    rows = [_row(job_id, ended.get(job_id), running.get(job_id), job_id in known) for job_id in ids]
    if as_json:
        write_json(rows)
    else:
        write_table(list(rows[0]), [tuple(_shown(value) for value in row.values()) for row in rows])
    return int(any(row["state"] != "completed" for row in rows))


def _look(
    pq: PgQueue, ids: list[int], wait: float | None
) -> tuple[dict[int, JobResult], dict[int, Progress], dict[int, str]]:
    """The ends of those that have ended, what the others say of themselves, and the states of the others."""
    try:
        ended = pq.wait(ids, wait or 0.0)
    except WaitTimeout as error:
        ended = error.ended
    live = [job_id for job_id in ids if job_id not in ended]
    states = {job.id: job.state for job in pq.jobs(ids=live, limit=len(live))} if live else {}
    return ended, pq.run(result_ops.progress(live)) if live else {}, states


def _row(job_id: int, ended: JobResult | None, said: Progress | None, live: bool) -> dict[str, Any]:
    state: str = "ended"
    if ended is None:
        state = "live" if live or said is not None else "ended"
    elif ended.state is not None:
        state = ended.state.value
    return {
        "id": job_id,
        "state": state,
        "value": None if ended is None else decoded(ended.value_json),
        "error": None if ended is None else ended.error,
        "percent": None if said is None else said.percent,
        "message": None if said is None else said.message,
        "finished": None if ended is None else ended.finished_at,
        "kept_until": None if ended is None else ended.expires_at,
    }


def _shown(value: Any) -> Any:
    from datetime import datetime

    import orjson

    return value if value is None or isinstance(value, (str, int, float, datetime)) else orjson.dumps(value).decode()

"""pgqueue status and pgqueue workers."""

from __future__ import annotations

from typing import Any

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.limits import in_words
from pgqueue.cli.options import AsJson, Place, QueueName, placed
from pgqueue.cli.output import cell, write, write_json, write_table
from pgqueue.ops.status import MOST, HeldBack, QueueStatus


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("workers")(workers)


@placed
def status(place: Place, queue_name: QueueName = None, as_json: AsJson = False) -> int:
    """Show every queue: how many jobs are ready, blocked, scheduled, running and dead, what is paused, who holds it back.

    A worker holds a task back while its attempts keep failing for one reason. A job is blocked while it waits for its key.
    """
    with queue(place) as pq:
        check_queue(pq, queue_name)
        found = pq.status(None if queue_name is None else [queue_name])
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["queue", "ready", "blocked", "scheduled", "running", "dead", "oldest ready, s", "paused since"],
        [
            (
                row.queue,
                _count(row.ready),
                _count(row.blocked),
                _count(row.scheduled),
                _count(row.running),
                _count(row.dead),
                row.oldest_ready,
                row.paused_at,
            )
            for row in found
        ],
    )
    for row in found:
        for line in _settings(row):
            write(line)
        for held in row.held_back:
            write(_held_back(row.queue, held))
    return 0


def _settings(row: QueueStatus) -> list[str]:
    lines = []
    if row.paused_until is not None:
        lines.append(f"queue {cell(row.queue)} is paused until {cell(row.paused_until)}")
    for pause in row.paused_tasks:
        until = "" if pause.until is None else f" until {cell(pause.until)}"
        lines.append(f"task {cell(pause.task)} of queue {cell(row.queue)} is paused{until}")
    if row.ageing is not None:
        lines.append(f"jobs that wait in queue {cell(row.queue)} move up by one priority every {row.ageing:g} s")
    if row.limit is not None:
        lines.append(f"queue {cell(row.queue)} is limited to {in_words(row.limit)}")
    return lines


def _held_back(queue_name: str, held: HeldBack) -> str:
    return (
        f"task {cell(held.task)} of queue {cell(queue_name)} is held back by worker {held.worker_id} ({cell(held.worker)}) "
        f"for {held.seconds:.0f} s: "
        f"{held.failures} attempts in a row failed with {cell(held.reason)}; it tries one job every {held.pause:.0f} s"
    )


@placed
def workers(place: Place, as_json: AsJson = False) -> int:
    """Show every worker: what it serves, what it holds, and how long it has been silent."""
    with queue(place) as pq:
        found = pq.workers()
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["id", "name", "host", "pid", "queues", "concurrency", "holds", "lease, s", "silent, s", "started", "version"],
        [
            (
                row.id,
                row.name,
                row.hostname,
                row.pid,
                row.queues,
                row.concurrency,
                row.held,
                row.lease_seconds,
                row.silent,
                row.started_at,
                row.version,
            )
            for row in found
        ],
    )
    return 0


def _count(number: int) -> Any:
    return number if number < MOST else f"{MOST} or more"

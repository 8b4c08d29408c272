"""pgqueue dead: list, show, retry, purge."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from pgqueue.cli.database import check_queue, queue
from pgqueue.cli.errors import Refused, UsageMistake, usage
from pgqueue.cli.options import AsJson, Limit, Place, QueueName, TaskName, Yes, placed
from pgqueue.cli.output import cell, decoded, note, note_hidden, without, write, write_json, write_table
from pgqueue.cli.questions import confirm
from pgqueue.client import PgQueue
from pgqueue.failure import one_line
from pgqueue.ops.dead_letter import DeadLetter
from pgqueue.retry import seconds

SomeIds = Annotated[list[int] | None, typer.Argument(metavar="ID", min=1, help="Ids of dead letters.")]
ShownIds = Annotated[list[int], typer.Argument(metavar="ID", min=1, help="Ids of dead letters.")]
Everything = Annotated[bool, typer.Option("--all", help="All dead letters.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print how many it would be.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Jobs that could not be done.")
    group.command("list")(list_)
    group.command("show")(show)
    group.command("retry")(retry)
    group.command("purge")(purge)
    app.add_typer(group, name="dead")


@placed
def list_(
    place: Place, queue_name: QueueName = None, task: TaskName = None, limit: Limit = 50, as_json: AsJson = False
) -> int:
    """Show dead letters, newest first."""
    with queue(place) as pq:
        check_queue(pq, queue_name)
        found = pq.dead_letters(queue=queue_name, task=task, limit=limit)
    note_hidden(found)
    if as_json:
        left_out = ("args_json", "kwargs_json", "headers_json", "errors_json", "hidden")
        write_json(without(letter, *left_out) for letter in found)
        return 0
    write_table(
        ["id", "queue", "task", "attempt", "lost", "died", "reason"],
        [
            (row.id, row.queue, row.task, f"{row.attempt}/{row.max_attempts}", row.lost, row.died_at, row.reason)
            for row in found
        ],
    )
    return 0


@placed
def show(place: Place, ids: ShownIds, as_json: AsJson = False) -> int:
    """Show all that is known of dead letters, their arguments and tracebacks included."""
    with queue(place) as pq:
        found = pq.dead_letters(ids=ids, limit=len(ids))
    note_hidden(found)
    if as_json:
        write_json(_everything(letter) for letter in found)
    else:
        write("\n\n".join(_page(letter) for letter in found) if found else "(none)")
    return _missing(ids, {letter.id for letter in found})


@placed
def retry(
    place: Place,
    ids: SomeIds = None,
    queue_name: QueueName = None,
    task: TaskName = None,
    everything: Everything = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Put dead letters back into their queues, under their ids and with all attempts anew."""
    selection = _selection(ids, queue_name, task, everything)
    with queue(place) as pq:
        count = _ask(pq, "redrive", selection, yes, dry_run)
        if count is not None:
            return count
        moved = pq.redrive(**selection)
        locked = _left(pq, ids or [], {*moved, *moved.skipped}, selection)
    write(f"{len(moved)} dead letter(s) are back in line")
    _missing(locked, set(), "somebody else is changing them, try again")
    _missing(moved.skipped, set(), "these stay, their unique key has a live job")
    stay = {*locked, *moved.skipped}
    return max(_missing(ids or [], {*moved, *stay}), int(bool(stay)))


@placed
def purge(
    place: Place,
    ids: SomeIds = None,
    queue_name: QueueName = None,
    task: TaskName = None,
    everything: Everything = False,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="S", min=0.0, help="Only what died at least so many seconds ago.")
    ] = 0.0,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> int:
    """Delete dead letters for good."""
    selection = _selection(ids, queue_name, task, everything)
    with usage():
        seconds("--older-than", older_than)
    with queue(place) as pq:
        count = _ask(pq, "delete", selection, yes, dry_run, older_than=older_than)
        if count is not None:
            return count
        gone = pq.purge(**selection, older_than=older_than)
    write(f"{gone} dead letter(s) are deleted")
    if ids and gone < len(set(ids)):
        left = len(set(ids)) - gone
        raise Refused(f"{left} of these ids are not among the chosen dead letters, or somebody else is changing them")
    return 0


def _selection(ids: list[int] | None, queue_name: str | None, task: str | None, everything: bool) -> dict[str, Any]:
    named = bool(ids or queue_name is not None or task is not None)
    if not named and not everything:
        raise UsageMistake("which dead letters? give ids, --queue, --task or --all")
    if named and everything:
        raise UsageMistake("--all means all: leave out the ids, --queue and --task")
    return {"ids": ids or None, "queue": queue_name, "task": task}


def _ask(
    pq: PgQueue, verb: str, selection: dict[str, Any], yes: bool, dry_run: bool, older_than: float = 0.0
) -> int | None:
    """None to go on; an exit status when the command ends here."""
    check_queue(pq, selection["queue"])
    by_ids_alone = selection["ids"] and selection["queue"] is None and selection["task"] is None
    if by_ids_alone and not dry_run:
        return None
    count = pq.count_dead_letters(**selection, older_than=older_than)
    if dry_run:
        write(str(count))
        return 0
    if count:
        confirm(f"this would {verb} {count} dead letter(s)", yes)
    return None


def _left(pq: PgQueue, wanted: list[int], moved: set[int], selection: dict[str, Any]) -> list[int]:
    """What was meant, is there, and was passed by: a transaction of somebody else holds it."""
    missing = [job_id for job_id in dict.fromkeys(wanted) if job_id not in moved]
    if not missing:
        return []
    return [letter.id for letter in pq.dead_letters(**{**selection, "ids": missing}, limit=len(missing))]


def _missing(wanted: list[int], found: set[int], why: str = "no such dead letter") -> int:
    missing = [str(job_id) for job_id in dict.fromkeys(wanted) if job_id not in found]
    if missing:
        note(f"{why}: {', '.join(missing)}")
    return int(bool(missing))


def _everything(letter: DeadLetter) -> Any:
    texts = {field.name for field in dataclasses.fields(letter) if field.name.endswith("_json")}
    values = {name.removesuffix("_json"): decoded(getattr(letter, name)) for name in sorted(texts)}
    return without(letter, *texts, "hidden", **values)


def _page(letter: DeadLetter) -> str:
    shown = _everything(letter)
    errors = shown.pop("errors")
    lines = [
        f"{name + ':':14}{cell(value)}" for name, value in shown.items() if name not in ("args", "kwargs", "headers")
    ]
    for name in ("args", "kwargs", "headers"):
        lines.append(f"{name + ':':14}{one_line(str(getattr(letter, name + '_json') or '-'), 100_000)}")
    for error in errors if isinstance(errors, list) else []:
        if isinstance(error, dict):
            lines += _error(error)
    return "\n".join(lines)


def _error(error: dict[str, Any]) -> list[str]:
    head = ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))
    lines = [f"attempt {error.get('attempt', '?')} at {error.get('at', '?')}: {head}"]
    lines += [f"  {line}" for line in str(error.get("traceback") or "").splitlines()]
    return [one_line(line, 2000) for line in lines]

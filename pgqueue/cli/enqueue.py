"""pgqueue enqueue."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Annotated, Any, NoReturn

import typer

from pgqueue.cli.application import application, known_app
from pgqueue.cli.database import queue as queue_of
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.options import AppName, Place, placed
from pgqueue.cli.output import write
from pgqueue.client import PgQueue
from pgqueue.config import validate_name
from pgqueue.errors import PayloadError
from pgqueue.keys import CONFLICTS
from pgqueue.payload import encode_call
from pgqueue.task import TaskOptions

_LONGEST = 512 * 1024 * 1024
"""Bytes: the limit of the settings is checked where these are known."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("enqueue")(enqueue)


@placed
def enqueue(
    place: Place,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The name of the task, as in `pgqueue jobs`.")],
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="A list: the positional arguments.")] = "[]",
    kwargs: Annotated[str, typer.Option("--kwargs", metavar="JSON", help="An object: the keywords.")] = "{}",
    queue: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Not the task's own queue.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="-100 to 100, higher first.")] = None,
    delay: Annotated[float | None, typer.Option("--delay", metavar="S", help="Seconds to wait before it runs.")] = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", metavar="N", help="Runs in all.")] = None,
    expires_in: Annotated[
        float | None, typer.Option("--expires-in", metavar="S", help="Seconds after which it is not started any more.")
    ] = None,
    unique_key: Annotated[
        str | None, typer.Option("--unique-key", metavar="KEY", help="One job of this key at a time in the queue.")
    ] = None,
    on_conflict: Annotated[
        str | None,
        typer.Option("--on-conflict", metavar="WHAT", help=f"If the key has a job: {', '.join(CONFLICTS)}."),
    ] = None,
    unique_for: Annotated[
        float | None, typer.Option("--unique-for", metavar="S", help="No second job of the key for so many seconds.")
    ] = None,
    app: AppName = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Enqueue without the application: name and arguments are not checked.")
    ] = False,
) -> int:
    """Enqueue one job and print its id; that of the job which has the unique key already, if it has one."""
    positional = parsed("--args", args, list, "list, such as '[42]'")
    keywords = parsed("--kwargs", kwargs, dict, """object, such as '{"upload_id": 42}'""")
    times = {"delay": delay, "expires_in": expires_in}
    keys = {"unique_key": unique_key, "on_conflict": on_conflict, "unique_for": unique_for}
    chosen = {"queue": queue, "priority": priority, "max_attempts": max_attempts, **times, **keys}
    options = {name: value for name, value in chosen.items() if value is not None}
    with usage():
        validate_name("task", task)
        TaskOptions().changed({"unique_key": "that of the task", **options})
        if unchecked:
            TaskOptions().changed(options)
    try:
        encode_call(positional, keywords, max_bytes=_LONGEST)
    except PayloadError as error:  # such as a NUL: JSON, but nothing that PostgreSQL can store
        raise UsageMistake(f"--{error}") from None
    if unchecked:
        with queue_of(place) as pq:
            write(str(pq.enqueue(task, positional, keywords, **options)))
        return 0
    name = known_app(app)
    if not name:
        raise UsageMistake("give --app module:attribute, so that name and arguments can be checked, or --unchecked")
    with application(place, name) as core:
        core.tasks.find(task)
        op = core.enqueue_named_op(task, positional, keywords, options)
        with PgQueue(**dataclasses.asdict(core.settings)) as pq:
            write(str(pq.run(op)))
    return 0


class _NotJson(ValueError):
    """Python's reader would take it, JSON does not."""


def parsed(option: str, text: str, kind: type, expected: str) -> Any:
    """What the JSON of an option says; UsageMistake unless it is of that kind."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        place = f"character {error.colno}" if error.lineno == 1 else f"line {error.lineno}, character {error.colno}"
        raise UsageMistake(f"{option} is not JSON: {error.msg} at {place}") from None
    except (ValueError, RecursionError) as error:  # Python reads no number of more than 4,300 digits
        raise UsageMistake(f"{option} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise UsageMistake(f"{option} must be a JSON {expected}")
    return value


def _refuse(word: str) -> NoReturn:
    raise _NotJson(f"{word} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotJson(f"{text} is too large for a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _NotJson("a key occurs twice in one object")
    return value

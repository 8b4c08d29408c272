"""pgqueue topics: list, subscriptions, publish, subscribe, unsubscribe, reset, keep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer

from pgqueue.cli.application import application
from pgqueue.cli.database import queue
from pgqueue.cli.enqueue import parsed
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.options import APP_VARIABLE, AppName, AsJson, Place, placed
from pgqueue.cli.output import write, write_json, write_table
from pgqueue.client import PgQueue
from pgqueue.config import validate_name
from pgqueue.errors import PayloadError
from pgqueue.failure import one_line
from pgqueue.keys import CONTINUE, PARK, validate_key
from pgqueue.ops.topic import known_topic
from pgqueue.task import BaseTask, TaskOptions
from pgqueue.topic import BEGINNING, NEW, Start, validate_kept, validate_start

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The name of the topic.")]
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the subscription.")]
From = Annotated[
    str,
    typer.Option(
        "--start", metavar="WHERE", help="new, beginning, a time such as 2030-01-31T18:00Z, or a message's id."
    ),
]
Later = Annotated[bool, typer.Option("--later", help="Leave the replay to the workers, and do not wait for it.")]


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What is published to many queues at once.")
    group.command("list")(list_)
    for command in (subscriptions, publish, subscribe, unsubscribe, reset, keep):
        group.command(command.__name__)(command)
    app.add_typer(group, name="topics")


@placed
def list_(place: Place, as_json: AsJson = False) -> int:
    """Show all topics, and the messages that they keep."""
    with queue(place) as pq:
        found = pq.topics()
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["name", "subscriptions", "keeps", "messages", "oldest", "newest", "since"],
        [
            (
                t.name,
                t.subscriptions,
                _kept(t.keep_count, t.keep_age),
                t.messages,
                t.oldest_id,
                t.newest_id,
                t.oldest_at,
            )
            for t in found
        ],
    )
    return 0


@placed
def subscriptions(
    place: Place,
    name: Annotated[str | None, typer.Option("--topic", metavar="NAME", help="Only this topic.")] = None,
    as_json: AsJson = False,
) -> int:
    """Show who subscribes to what, and how far replays are."""
    with queue(place) as pq:
        if name is not None:
            pq.run(known_topic(name))
        found = pq.subscriptions(name)
    if as_json:
        write_json(found)
        return 0
    write_table(
        ["topic", "group", "task", "queue", "ordered", "state", "replayed to", "from"],
        [(s.topic, s.group, s.task, s.queue, s.ordered, s.state, s.replayed_to, s.origin) for s in found],
    )
    return 0


@placed
def publish(
    place: Place,
    name: Name,
    args: Annotated[str, typer.Option("--args", metavar="JSON", help="A list: the positional arguments.")] = "[]",
    kwargs: Annotated[str, typer.Option("--kwargs", metavar="JSON", help="An object: the keywords.")] = "{}",
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Messages of one key are run in order where that is wanted."),
    ] = None,
) -> int:
    """Publish one message: a job for every subscription of a topic."""
    call = (parsed("--args", args, list, "list"), parsed("--kwargs", kwargs, dict, "object"))
    with usage():
        validate_name("topic", name)
        if key is not None:
            validate_key("--key", key)
    with queue(place) as pq:
        try:
            done = pq.publish(name, *call, key=key)
        except PayloadError as error:
            raise UsageMistake(f"--{error}") from None
    if done.message_id is None and not done.jobs:
        write(f"nobody subscribes to topic {one_line(name)}, and it keeps nothing: no job was made")
        return 0
    message = "" if done.message_id is None else f", message {done.message_id}"
    write(f"{done.jobs} {'job' if done.jobs == 1 else 'jobs'}{message}")
    return 0


@placed
def subscribe(
    place: Place,
    name: Name,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The name of the task.")],
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Else the name of the task.")] = None,
    queue_name: Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Not the task's own queue.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="-100 to 100, higher first.")] = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", metavar="N", help="Runs in all.")] = None,
    start: From = NEW,
    ordered: Annotated[
        bool,
        typer.Option("--ordered", help="Messages of one key run one at a time, in order; new ones wait for a replay."),
    ] = False,
    park: Annotated[bool, typer.Option("--park", help="With --ordered: a dead letter stops its key.")] = False,
    later: Later = False,
    app: AppName = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Without the application: the task is not checked.")
    ] = False,
) -> int:
    """Make a job of a task for every message of a topic, from now on, and for those that it keeps as --start says."""
    given = {"queue": queue_name, "priority": priority, "max_attempts": max_attempts}
    options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    with usage():
        validate_name("topic", name)
        validate_name("task", task)
        if group is not None:
            validate_name("group", group)
        TaskOptions().changed(options)
        if park and not ordered:
            raise UsageMistake("--park stops a line of jobs: it needs --ordered")
    where = _start(start)
    chosen = app or os.environ.get(APP_VARIABLE)
    if not chosen and not unchecked:
        raise UsageMistake("give --app module:attribute, so that the task can be checked, or --unchecked")
    with _where(place, None if unchecked else chosen, task) as (pq, known):
        shape: dict[str, Any] = {
            "group": group,
            "start": where,
            "ordered": ordered,
            "on_dead": PARK if park else CONTINUE,
        }
        new = pq.subscribe(name, known, **shape, **options)
        shown = group or (known if isinstance(known, str) else known.name)
        write(f"group {one_line(shown)} of topic {one_line(name)} {'is subscribed' if new else 'is there already'}")
        _replay(pq, name, later or not new or where == NEW)
    return 0


@placed
def unsubscribe(place: Place, name: Name, group: Group) -> int:
    """End a subscription that no live worker has in its code; its jobs stay, and run."""
    with queue(place) as pq:
        pq.unsubscribe(name, group)
    write(f"group {one_line(group)} of topic {one_line(name)} is not subscribed any more")
    return 0


@placed
def reset(place: Place, name: Name, group: Group, start: From = BEGINNING, later: Later = False) -> int:
    """Replay the messages that a topic keeps once more for one group; its jobs that wait stay."""
    where = _start(start)
    with queue(place) as pq:
        pq.reset_subscription(name, group, where)
        write(f"group {one_line(group)} of topic {one_line(name)} starts from {one_line(start)}")
        _replay(pq, name, later or where == NEW)
    return 0


@placed
def keep(
    place: Place,
    name: Name,
    count: Annotated[int | None, typer.Option("--count", metavar="N", help="The last N messages.")] = None,
    age: Annotated[float | None, typer.Option("--age", metavar="S", help="Those of the last S seconds.")] = None,
    nothing: Annotated[
        bool, typer.Option("--nothing", help="None any more; those that are there are dropped.")
    ] = False,
) -> int:
    """Say how many messages of a topic are kept, so that subscriptions can start with older ones."""
    if nothing == (count is not None or age is not None):
        raise UsageMistake("give --count, --age or both, or --nothing")
    with usage():
        validate_name("topic", name)
        kept = validate_kept(count, age)
    with queue(place) as pq:
        pq.keep_topic(name, count=count, age=age)
    write(f"topic {one_line(name)} keeps {_kept(*kept) or 'nothing'}")
    return 0


@contextmanager
def _where(place: Place, app: str | None, task: str) -> Iterator[tuple[PgQueue, str | BaseTask[..., Any]]]:
    """The queue, and the task as an application of either colour knows it."""
    if app is None:
        with queue(place) as pq:
            yield pq, task
        return
    with application(place, app) as core:
        known = core.tasks.find(task)
        with PgQueue(**dataclasses.asdict(core.settings)) as pq:
            yield pq, known


def _replay(pq: PgQueue, topic: str, later: bool) -> None:
    if not later:
        made = pq.tend_topics(topic)
        write(f"{made} {'job' if made == 1 else 'jobs'} made")


def _kept(count: int | None, age: float | None) -> str | None:
    said = [f"{count} messages" if count is not None else "", f"{age:g} s" if age is not None else ""]
    return " and ".join(part for part in said if part) or None


def _start(text: str) -> Start:
    if text in (NEW, BEGINNING):
        return text
    with usage():
        if text.isascii() and text.isdigit():
            return validate_start(int(text[:20]))
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise UsageMistake(
                "--start must be new, beginning, a time such as 2030-01-31T18:00+00:00, or the id of a message"
            ) from None
        if time.utcoffset() is None:
            raise UsageMistake("--start must end in a time zone, such as Z or +02:00")
        return time

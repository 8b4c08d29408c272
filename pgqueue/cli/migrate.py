"""pgqueue migrate."""

from __future__ import annotations

from typing import Annotated

import typer

from pgqueue.cli.database import configured, database
from pgqueue.cli.errors import UsageMistake
from pgqueue.cli.options import Place, Yes, placed
from pgqueue.cli.output import write
from pgqueue.cli.questions import confirm
from pgqueue.config import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("migrate")(migrate)


@placed
def migrate(
    place: Place,
    to: Annotated[
        str, typer.Option("--to", metavar="REV", help="A revision, up or down; base removes everything, with all jobs.")
    ] = "",
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the SQL for an empty database; connect to nothing.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Say whether the schema fits; change nothing.")] = False,
    yes: Yes = False,
) -> int:
    """Make the schema, or bring it to the newest revision."""
    from pgqueue import migrate as migrations

    if check and (sql or to):
        raise UsageMistake("give --check alone, or --to with or without --sql")
    if sql:
        write(migrations.script(configured(place).schema, to or "head"))
        return 0
    with database(place, ready=False) as settings:
        if check:
            found = migrations.check(str(settings.database_url), settings.schema)
            write(found.sentence)
            return int(found.state is not migrations.SchemaState.CURRENT)
        return _migrate(settings, to, yes)


def _migrate(settings: Settings, to: str, yes: bool) -> int:
    from pgqueue import migrate as migrations

    url, schema = str(settings.database_url), settings.schema
    if to == migrations.BASE and migrations.current(url, schema=schema) is not None:
        confirm(f"this removes the schema {schema} with all its jobs", yes)
    done = migrations.to(url, to, schema=schema) if to else migrations.upgrade(url, schema=schema)
    if done.before == done.after:
        write(f"schema {schema}: nothing to do ({_named(done.after)})")
    else:
        write(f"schema {schema}: {_named(done.before)} → {_named(done.after)}")
    return 0


def _named(revision: str | None) -> str:
    return f"revision {revision}" if revision else "no queue"

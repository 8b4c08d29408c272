"""Options that every command has, wherever they stand on the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from pgqueue.cli.errors import usage
from pgqueue.config import validate_schema
from pgqueue.version import __version__

P = ParamSpec("P")
URL_VARIABLE, SCHEMA_VARIABLE, APP_VARIABLE = "PGQUEUE_DATABASE_URL", "PGQUEUE_SCHEMA", "PGQUEUE_APP"

DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database-url", metavar="URL", help=f"The database, instead of {URL_VARIABLE}.", show_default=False),
]
SchemaName = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help=f"The schema of the queue, instead of {SCHEMA_VARIABLE}."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not say which database is used when none is configured.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON array instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
QueueName = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Only this queue.")]
TaskName = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only this task.")]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=1_000_000, help="At most so many.")]
AppName = Annotated[
    str | None,
    typer.Option(
        "--app", metavar="MODULE:ATTR", help=f"Where the application's PgQueue is, instead of {APP_VARIABLE}."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the queue is, as far as the command line says so; the environment and the application may know more."""

    database_url: str | None = None
    schema: str | None = None
    quiet: bool = False

    def completed(self, other: Place) -> Place:
        """This one, with what it leaves open taken from `other`."""
        return Place(
            database_url=self.database_url if self.database_url is not None else other.database_url,
            schema=self.schema if self.schema is not None else other.schema,
            quiet=self.quiet or other.quiet,
        )

    def variables(self) -> dict[str, str]:
        """The same as environment variables, for another process."""
        named = {URL_VARIABLE: self.database_url, SCHEMA_VARIABLE: self.schema}
        return {name: value for name, value in named.items() if value}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pgqueue {__version__}")
        raise typer.Exit


def top(
    context: typer.Context,
    database_url: DatabaseUrl = None,
    schema: SchemaName = None,
    quiet: Quiet = False,
    traceback: Traceback = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A job queue inside PostgreSQL.

    The database is that of --database-url or PGQUEUE_DATABASE_URL. With neither, pgqueue starts a private PostgreSQL for
    the time of the command.
    """
    context.obj = _place(database_url, schema, quiet)


def placed(function: Callable[Concatenate[Place, P], int | None]) -> Callable[..., int | None]:
    """A command whose first parameter is filled from the options that all commands share."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, annotation, default in (
            ("database_url", DatabaseUrl, None),
            ("schema", SchemaName, None),
            ("quiet", Quiet, False),
            ("traceback", Traceback, False),
        )
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [*shared, context]

    @functools.wraps(function)
    def wrapper(**values: Any) -> int | None:
        outer = values.pop("context").obj or Place()
        values.pop("traceback")  # read from the words themselves, since errors are reported outside of any command
        place = _place(values.pop("database_url"), values.pop("schema"), values.pop("quiet"))
        return function(place.completed(outer), **values)  # type: ignore[call-arg]

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _place(database_url: str | None, schema: str | None, quiet: bool) -> Place:
    if schema is not None:
        with usage():
            validate_schema(schema)
    return Place(database_url=database_url, schema=schema, quiet=quiet)

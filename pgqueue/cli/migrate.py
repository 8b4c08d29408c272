"""pgqueue migrate."""

from __future__ import annotations

from typing import Annotated

import typer

from pgqueue.cli.database import configured, database
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.host import as_typed
from pgqueue.cli.options import Place, Yes, placed
from pgqueue.cli.output import write
from pgqueue.cli.questions import confirm
from pgqueue.config import Settings

Roles = Annotated[
    bool,
    typer.Option("--roles", help="Also make the roles of least privilege, or bring their grants up to date."),
]
RolePrefix = Annotated[
    str | None,
    typer.Option(
        "--role-prefix", metavar="NAME", help="Roles NAME_worker, NAME_producer, NAME_reader; else the schema's name."
    ),
]
WithPayloads = Annotated[
    bool, typer.Option("--with-payloads", help="The reader may also see arguments, headers, errors and reasons.")
]


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
        bool,
        typer.Option(
            "--sql", help="Print the SQL for an empty database, or with --roles that of the roles; connect to nothing."
        ),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Say whether the schema fits; change nothing.")] = False,
    roles: Roles = False,
    role_prefix: RolePrefix = None,
    with_payloads: WithPayloads = False,
    yes: Yes = False,
) -> int:
    """Make the schema, or bring it to the newest revision."""
    from pgqueue import migrate as migrations

    if check and (sql or to or roles):
        raise UsageMistake("give --check alone, or --to with or without --sql")
    if roles and to:
        raise UsageMistake("--roles is for the newest revision: leave out --to")
    if (role_prefix is not None or with_payloads) and not roles:
        raise UsageMistake("--role-prefix and --with-payloads need --roles")
    if roles:
        return _migrate_with_roles(place, role_prefix, with_payloads, sql)
    if sql:
        write(migrations.script(configured(place).schema, to or "head"))
        return 0
    with database(place, ready=False) as settings:
        if check:
            found = migrations.check(str(settings.database_url), settings.schema)
            write(as_typed(found.sentence))
            return int(not found.fits)
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


def _migrate_with_roles(place: Place, prefix: str | None, with_payloads: bool, sql: bool) -> int:
    """First whether all of it is allowed: a new schema without its roles would be half of what was asked for."""
    from pgqueue import roles

    schema = configured(place).schema
    with usage():
        names = roles.names(schema, prefix)
    if sql:
        write(roles.script(schema, prefix=prefix, with_payloads=with_payloads))
        return 0
    with database(place, ready=False) as settings:
        url = str(settings.database_url)
        roles.check(url, schema=schema, prefix=prefix)
        _migrate(settings, "", yes=False)
        done = roles.create(url, schema=schema, prefix=prefix, with_payloads=with_payloads)
    made = f"made {', '.join(done.made)}; " if done.made else ""
    write(f"roles: {made}the grants of {', '.join(names)} are as this version needs them")
    return 0


def _named(revision: str | None) -> str:
    return f"revision {revision}" if revision else "no queue"

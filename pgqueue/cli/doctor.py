"""pgqueue doctor: look at everything that a queue needs from its database, and say what to do about what is missing."""

from __future__ import annotations

import dataclasses

import typer

from pgqueue.cli.checks import Finding, Level, examine
from pgqueue.cli.database import database
from pgqueue.cli.options import AsJson, Place, placed
from pgqueue.cli.output import write, write_json
from pgqueue.failure import one_line


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


@placed
def doctor(place: Place, as_json: AsJson = False) -> int:
    """Check the database: server, schema, rights, notifications, old transactions, dead rows, workers, clock.

    Every line is OK, WARN or FAIL. Exit status 1 if one is FAIL.
    """
    with database(place) as settings:
        findings = list(examine(settings))
    if as_json:
        write_json(dataclasses.asdict(finding) for finding in findings)
    else:
        for finding in findings:
            write(_line(finding))
    return int(any(finding.level is Level.FAIL for finding in findings))


def _line(finding: Finding) -> str:
    advice = f" → {finding.advice}" if finding.advice else ""
    return one_line(f"{finding.level:4}  {finding.check}: {finding.found}{advice}", 2000)

"""Asking before something that cannot be taken back, or that concerns more than was named one by one."""

from __future__ import annotations

import sys

import typer

from pgqueue.cli.errors import UsageMistake


def confirm(what: str, yes: bool) -> None:
    """Return if the user agrees. Where nobody can be asked, UsageMistake names --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageMistake(f"{what}: add --yes if that is what you want")
    typer.confirm(f"{what[:1].upper()}{what[1:]}. Go on?", abort=True, err=True)

"""The command line. `main` is the program; every other file is a group of commands or a tool that they share.

To add a command: write a module with a function ``register(app)``, and name it in `_rooms`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgqueue.cli.host import Host


def main() -> None:
    """The program `pgqueue`: runs `sys.argv`, and ends the process with the status."""
    if "worker" in sys.argv[1:] and hasattr(signal, "SIGTERM"):
        # Until the worker takes its signals over there is nothing to finish; and as PID 1 of a container a process
        # without a handler would not hear SIGTERM at all. It is put in place before anything slow is imported.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    status = run(sys.argv[1:])
    from pgqueue.cli.ending import leave

    leave(status)


def run(arguments: Sequence[str], host: Host | None = None) -> int:
    """Run one command line; returns the exit status. Whatever goes wrong has been said on stderr.

    `host`: the framework's command that this is a part of.
    """
    from pgqueue.cli.errors import report
    from pgqueue.cli.host import hosted

    # What the driver's pool remarks is for a log; a command has none, and one sentence of its own.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    with hosted(host):
        try:
            name = "pgqueue" if host is None else host.name
            status = command().main(list(arguments), prog_name=name, standalone_mode=False)
            sys.stdout.flush()
        except BaseException as error:  # noqa: BLE001 - the one place where errors become sentences
            return report(error, arguments)
    return int(status or 0)


def command() -> Any:
    """The whole command, ready to be called with a list of words."""
    import typer

    from pgqueue.cli.options import top

    app = typer.Typer(
        name="pgqueue",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="A job queue inside PostgreSQL.",
    )
    app.callback()(top)
    for room in _rooms():
        room.register(app)
    return typer.main.get_command(app)


def _rooms() -> tuple[ModuleType, ...]:
    """In the order of the help."""
    from pgqueue.cli import (
        bench,
        dead,
        demo,
        doctor,
        enqueue,
        jobs,
        lanes,
        limits,
        migrate,
        queues,
        result,
        schedules,
        status,
        topics,
        worker,
    )

    operating = (queues, limits, lanes, schedules, topics, doctor)
    return (migrate, worker, enqueue, status, jobs, result, dead, *operating, demo, bench)

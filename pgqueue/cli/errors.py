"""Errors as sentences: the one place that decides what a user reads, and the exit status.

0 done, 1 failed, 2 called wrongly, 130 interrupted, 141 nobody reads the output any more (as if ended by SIGPIPE).
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
import typer

from pgqueue.cli.host import as_typed
from pgqueue.drivers.execute import first_line
from pgqueue.errors import ConfigurationError, PgQueueError
from pgqueue.failure import one_line
from pgqueue.worker.processes import Stopped

FAILED, USAGE, INTERRUPTED, UNREAD = 1, 2, 130, 141
_LONGEST = 2000
# Greedy up to the last @ of the word: a password may hold one that should have been escaped.
_IN_URL = re.compile(r"(?P<head>://[^\s:/@]*:)\S*@")
_IN_KEYWORDS = re.compile(r"(?P<head>\b(?:ssl)?password\s*=\s*)(?:'(?:[^'\\]|\\.)*'|[^\s&'\"]+)", re.IGNORECASE)


class UsageMistake(PgQueueError):
    """The command line itself is wrong: exit status 2."""


class Unread(Exception):
    """Nobody reads stdout any more."""


class Refused(PgQueueError):
    """The command cannot be carried out, for a reason in the words of the message: exit status 1."""


@contextmanager
def usage() -> Iterator[None]:
    """A bad value inside the block is a mistake in the command line."""
    try:
        yield
    except ConfigurationError as error:
        raise UsageMistake(str(error)) from error


def report(error: BaseException, arguments: Sequence[str] = ()) -> int:
    """Say on stderr what went wrong; returns the exit status."""
    if isinstance(error, Stopped):
        return 0
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (Unread, BrokenPipeError)):
        _stop_writing()
        return UNREAD
    if "--traceback" in arguments:
        trace = "".join(traceback.format_exception(error))
        _write("\n".join(one_line(hide_passwords(line), _LONGEST) for line in trace.splitlines()))
    if type(error).__name__ == "NoArgsIsHelpError":  # called without a command: the text is the help
        _write(_words(error))
    else:
        _write(f"pgqueue: {sentence(error)}")
    return _status(error)


def sentence(error: BaseException) -> str:
    """One line for people; no password is in it."""
    return one_line(hide_passwords(as_typed(" ".join(_words(error).split()))), _LONGEST)


def hide_passwords(text: str) -> str:
    """`text` with every password of a connection string replaced."""
    if secret := os.environ.get("PGPASSWORD"):
        text = text.replace(secret, "***")
    return _IN_KEYWORDS.sub(r"\g<head>***", _IN_URL.sub(r"\g<head>***@", text))


def _words(error: BaseException) -> str:
    if isinstance(error, PgQueueError):
        return str(error)
    if isinstance(error, typer.Abort):
        return "nothing was done"
    if hasattr(error, "format_message"):  # every error of the command line parser has it
        return str(error.format_message())
    if isinstance(error, psycopg.OperationalError):
        return f"the database cannot be reached: {first_line(error)}"
    if isinstance(error, psycopg.Error):
        return f"the database refused: {first_line(error)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"this is a fault of pgqueue; --traceback shows where: {type(error).__name__}: {error}"


def _status(error: BaseException) -> int:
    if isinstance(error, UsageMistake):
        return USAGE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    return int(getattr(error, "exit_code", FAILED))


def _write(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return  # nobody listens


def _stop_writing() -> None:
    """Whatever is still buffered goes nowhere, instead of into a second error at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        return
    finally:
        os.close(nowhere)

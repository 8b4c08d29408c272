"""manage.py pgqueue: the command line of pgqueue, on the application's own queue."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, SystemCheckError
from django.db import connections

from pgqueue import cli
from pgqueue.cli.ending import leave
from pgqueue.cli.errors import report
from pgqueue.cli.host import worded
from pgqueue.cli.options import APP_VARIABLE
from pgqueue.contrib.django import checks, options, reload
from pgqueue.contrib.django.queues import queue
from pgqueue.worker import processes

ABOUT = """\
Django's own options, beside those below: --settings, --pythonpath, --skip-checks; and
  --backend ALIAS           the entry of TASKS; else "default", or the first that is pgqueue's
  --reload / --no-reload    worker: start again when code changes; else where DEBUG is on
"""
_MISTAKE = 2
_WITH_VALUES = ("--database-url", "--schema")
"""Options that may stand before the command, with a word that belongs to them."""


class Command(BaseCommand):
    """See the module."""

    help = "Jobs, workers, dead letters and schedules: `manage.py pgqueue --help` lists the commands."
    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        """For call_command; the words of a command line are read by pgqueue's own parser."""
        parser.add_argument("words", nargs=argparse.REMAINDER)

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """`manage.py help pgqueue`."""
        sys.stdout.write(ABOUT)
        sys.stdout.flush()
        cli.run(["--help"])

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """The command line; ends the process with the status."""
        given, words = _parser().parse_known_args(list(argv[2:]))
        if _subcommand(words) == "worker":
            # As PID 1 of a container a process without a handler would not hear SIGTERM at all; see pgqueue.cli.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(reload.status(0)))
        elif words[:1] in (["--help"], ["help"], []):
            sys.stdout.write(ABOUT)
            sys.stdout.flush()
        leave(self._from_the_command_line(given, words, argv))

    def handle(self, *args: Any, **given: Any) -> None:
        """call_command("pgqueue", "status", "--json"): CommandError where it did not succeed."""
        ours, words = _parser().parse_known_args([str(word) for word in given["words"]])
        out: Any = self.stdout._out
        errors: Any = self.stderr._out
        with redirect_stdout(out), redirect_stderr(errors), _environment(_variables(_alias(ours.backend))):
            status = cli.run(words)
        if status:
            raise CommandError(f"pgqueue {' '.join(words)} ended with status {status}", returncode=status)

    def _from_the_command_line(self, given: argparse.Namespace, words: list[str], argv: Sequence[str]) -> int:
        works = _subcommand(words) == "worker"
        try:
            if works and _reloads(given, words) and not reload.is_child():
                return reload.supervise()
            alias = _alias(given.backend)
            environment = _variables(alias)
            if works:
                self._look_before_working(given, words, alias)
        except (ImproperlyConfigured, CommandError) as error:
            if isinstance(error, SystemCheckError):
                self.stderr.write(str(error), lambda text: text)
            else:
                self.stderr.write(f"pgqueue: {' '.join(str(error).split())}", lambda text: text)
            return error.returncode if isinstance(error, CommandError) else 1
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return report(error, words)
        processes.PROGRAM[:] = _this_command(given, argv)
        with _environment(environment):
            connections.close_all()  # what the checks have opened would stay open for as long as a worker lives
            if works:
                _leave_the_terminal_to_the_worker()
            if reload.is_child():
                reload.watch()
            return reload.status(cli.run(words))

    def _look_before_working(self, given: argparse.Namespace, words: list[str], alias: str) -> None:
        if not given.skip_checks:
            self.check()
        concurrency = _number_after("--concurrency", words)
        problem = checks.pool_too_small(queue(alias).database, concurrency) if concurrency else None
        if problem:
            self.stderr.write(f"pgqueue: {problem}", lambda text: text)


def _parser() -> argparse.ArgumentParser:
    """Django's options and ours, which may stand among the words of the command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--settings", "--pythonpath", "--backend"):
        parser.add_argument(name)
    for name in ("--skip-checks", "--no-color", "--force-color"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--reload", action=argparse.BooleanOptionalAction)
    parser.add_argument("--verbosity", "-v")
    return parser


def _alias(given: str | None) -> str:
    """Which entry of TASKS; ImproperlyConfigured where there is none of ours."""
    if given is not None:
        return queue(given).alias
    ours = options.our_aliases()
    return ours[0] if ours else queue(options.DEFAULT).alias


def _subcommand(words: Sequence[str]) -> str | None:
    """The first word that is neither an option nor its value: `jobs --queue worker` is no worker."""
    rest = iter(words)
    for word in rest:
        if word in _WITH_VALUES:
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return None


def _variables(alias: str) -> dict[str, str]:
    """What the commands of pgqueue read, which know nothing of Django; ImproperlyConfigured where that cannot be said."""
    given = dataclasses.asdict(queue(alias).settings)
    wanted = {f"PGQUEUE_{name.upper()}": str(value) for name, value in given.items() if value is not None}
    return {**wanted, APP_VARIABLE: f"pgqueue.contrib.django.app:queues.{alias}"}


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """These variables, and the words of this command, for the time of the block."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with worded({"`pgqueue migrate`": "`manage.py migrate`", "`pgqueue ": "`manage.py pgqueue "}):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _leave_the_terminal_to_the_worker() -> None:
    """Where DEBUG is on, Django prints what its loggers say; so does a worker, where the project configures no logging."""
    chosen = logging.getLogger("django")
    if not logging.root.handlers:
        for handler in list(chosen.handlers):
            if getattr(handler, "stream", None) is sys.stderr:
                chosen.removeHandler(handler)


def _reloads(given: argparse.Namespace, words: Sequence[str]) -> bool:
    """Explicitly, or in development: with several processes, or until the queues are empty, only code that stays is run."""
    one = _number_after("--processes", words) in (None, 1) and "--drain" not in words
    if given.reload and not one:
        raise CommandError("--reload is for one worker process that stays", returncode=_MISTAKE)
    return bool(settings.DEBUG and one) if given.reload is None else bool(given.reload)


def _number_after(option: str, words: Sequence[str]) -> int | None:
    """What the last of these options says; None for none, and for what is no number: pgqueue's own parser says that."""
    found = None
    for place, word in enumerate(words):
        name, sign, text = word.partition("=")
        if name == option:
            text = text if sign else "".join(words[place + 1 : place + 2])
            found = int(text) if text.isdecimal() else found
    return found


def _this_command(given: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """How the processes of a worker are started: through the same manage.py, or django-admin."""
    program = reload.program()
    options_of_django = [f"--pythonpath={given.pythonpath}"] if given.pythonpath else []
    return [*program, argv[1], *options_of_django, "--skip-checks", "--no-reload"]

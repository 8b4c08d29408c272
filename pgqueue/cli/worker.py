"""pgqueue worker: the command, its log, and the thread that waits for signals while the worker works."""

from __future__ import annotations

import dataclasses
import enum
import gc
import logging
import os
import threading
import time
from typing import Annotated, Any

import typer

from pgqueue import log
from pgqueue.cli.application import app_name, application
from pgqueue.cli.errors import UsageMistake, usage
from pgqueue.cli.host import GIVEN_URL, current_host
from pgqueue.cli.options import AppName, Place, placed
from pgqueue.failure import one_line
from pgqueue.worker import Worker, WorkerOptions, platform
from pgqueue.worker.processes import LISTENING, STARTED, Line, Parent, Signals, this_program

BRIEF = 1.0
"""Seconds that a start under way gets when a stop was asked for before it had ended."""
YOUNG_OBJECTS = 10_000


class LogLevel(enum.StrEnum):
    """What --log-level takes. The hot events (claimed, started, settled) are logged at debug."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Queues = Annotated[
    str, typer.Option("--queues", metavar="A,B", help="Serve these, in this order; else those of the tasks.")
]
Concurrency = Annotated[int, typer.Option("--concurrency", metavar="N", help="Jobs at once, per process.")]
Processes = Annotated[int, typer.Option("--processes", metavar="N", help="Processes under one parent.")]
Lease = Annotated[float, typer.Option("--lease", metavar="S", help="Seconds until silence counts as loss.")]
Heartbeat = Annotated[
    float | None, typer.Option("--heartbeat", metavar="S", help="Seconds between renewals; else a third of the lease.")
]
Grace = Annotated[float, typer.Option("--grace", metavar="S", help="Seconds that running jobs get after SIGTERM.")]
Poll = Annotated[float, typer.Option("--poll", metavar="S", help="Seconds between looks without notice.")]
Drain = Annotated[bool, typer.Option("--drain", help="Leave when the queues are empty.")]
Breaker = Annotated[
    int, typer.Option("--breaker", metavar="N", help="Failures in a row that hold a queue back; 0: never.")
]
Unfit = Annotated[
    int, typer.Option("--unfit", metavar="N", help="Failures in a row, not shared by others, that end it; 0: never.")
]
Schedules = Annotated[
    bool, typer.Option("--no-schedules", help="Write no schedules, and make no jobs of theirs; others do.")
]
Label = Annotated[str | None, typer.Option("--name", metavar="LABEL", help="A label for `pgqueue workers`.")]
Level = Annotated[
    LogLevel, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error, on stderr.")
]
LineDescriptor = Annotated[int | None, typer.Option("--line", hidden=True)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("worker")(worker)


@placed
def worker(
    place: Place,
    app: AppName = None,
    queues: Queues = "",
    concurrency: Concurrency = 10,
    processes: Processes = 1,
    lease: Lease = 30.0,
    heartbeat: Heartbeat = None,
    grace: Grace = 30.0,
    poll: Poll = 1.0,
    drain: Drain = False,
    breaker: Breaker = 20,
    unfit: Unfit = 100,
    no_schedules: Schedules = False,
    name: Label = None,
    log_level: Level = LogLevel.INFO,
    line: LineDescriptor = None,
) -> int:
    """Run the jobs of an application.

    SIGTERM, SIGINT and SIGHUP end it gracefully: no new jobs, those that run get --grace seconds. A second signal gives
    back at once what still runs, with no attempt burned. Nothing is reloaded on SIGHUP.
    """
    numbers: dict[str, Any] = {"concurrency": concurrency, "lease": lease, "heartbeat": heartbeat}
    numbers |= {"breaker_failures": breaker, "unfit_failures": unfit, "schedules": not no_schedules}
    with usage():
        options = WorkerOptions(queues=_split(queues), grace=grace, poll=poll, drain=drain, name=name, **numbers)
    if not 1 <= processes <= 256:
        raise UsageMistake(f"--processes must be between 1 and 256, not {processes}")
    if processes > 1:
        with usage():
            platform.require_children("--processes")
    chosen = app_name(app)
    signals = Signals()
    signals.install(children=processes > 1)
    if processes > 1:
        return _parent(place, chosen, options, processes, log_level, signals)
    if line is None:
        return _alone(place, chosen, options, log_level, signals, None)
    inherited = dataclasses.replace(place, database_url=place.database_url or os.environ.get(GIVEN_URL))
    return _alone(inherited, chosen, options, log_level, signals, Line(line))


def _alone(
    place: Place, app: str, options: WorkerOptions, log_level: LogLevel, signals: Signals, line: Line | None
) -> int:
    with application(place, app) as core:
        signals.install()  # once more: what was imported may have put its own handlers in place
        _log_to_stderr(log_level)
        end_log = log.subscribe_logging(core.events)
        with usage():
            work = Worker(core, options)
        _spare_the_collector()
        try:
            return Running(work, signals, line).run()
        finally:
            end_log()  # what is left of the worker must not complain that its private server goes away


def _spare_the_collector() -> None:
    """Every job makes a dozen objects that are gone with it: at the default threshold the search for cycles takes an eighth
    of the time of small jobs. What the application has loaded is set aside, so that no later search goes through it."""
    gc.collect()
    gc.freeze()
    threshold, *others = gc.get_threshold()
    if 0 < threshold < YOUNG_OBJECTS:  # 0: the application has switched the collector off
        gc.set_threshold(YOUNG_OBJECTS, *others)


def _split(queues: str) -> tuple[str, ...] | None:
    if not queues.strip():
        return None
    names = tuple(dict.fromkeys(name.strip() for name in queues.split(",")))
    if "" in names:
        raise UsageMistake(f"--queues {queues!r}: an empty name between two commas")
    return names


class Running:
    """One worker at work in a thread of its own; this thread waits for requests to stop, and for its end.

    What a signal to this process and the parent's request over the line ask for is the same thing: where a supervisor
    signals both, it is one request. So the larger of the two counts decides, not their sum.
    """

    def __init__(self, worker: Worker, signals: Signals, line: Line | None) -> None:
        self._worker = worker
        self._signals = signals
        self._line = line
        self._heard = 0
        self._stops = 0
        self._error: BaseException | None = None
        self._status = 0
        self._over = threading.Event()

    def run(self) -> int:
        """The exit status of the worker; raises what its start raised."""
        if self._line:
            self._line.say(LISTENING)
        self._signals.starting = False
        threading.Thread(target=self._work, name="pgqueue-worker", daemon=True).start()
        told, give_up_at = False, float("inf")
        while not self._over.is_set():
            started = self._worker.started.is_set()
            if started and not told and self._line:
                self._line.say(STARTED)
            told = told or started
            if self._stops and not started and time.monotonic() >= give_up_at:
                log.say(log.STOPPED_EARLY)
                return 0
            self._listen(1.0 if told else 0.05)
            if self._stops and give_up_at == float("inf"):
                give_up_at = time.monotonic() + BRIEF
        if self._error is not None and not (self._stops and not self._worker.started.is_set()):
            raise self._error
        return self._status

    def _work(self) -> None:
        try:
            self._status = self._worker.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._error = error
        finally:
            self._over.set()
            self._signals.wake()

    def _listen(self, seconds: float) -> None:
        heard, readable = self._signals.wait(seconds, self._line.sockets() if self._line else ())
        self._heard += heard
        if readable and self._line:
            self._line.read()
        wanted = max(self._heard, self._line.asked if self._line else 0)
        while self._stops < wanted:
            log.say(log.STOP_NOW if self._stops else log.STOP_REQUESTED)
            self._worker.stop()
            self._stops += 1


def _parent(place: Place, app: str, options: WorkerOptions, count: int, log_level: LogLevel, signals: Signals) -> int:
    _log_to_stderr(log_level)
    words = ["--log-level", log_level.value, *_words(options)]
    words += ["--schema", place.schema] if place.schema else []
    # The URL travels in the environment: a command line can be read by everybody on the machine.
    given = {GIVEN_URL: place.database_url} if place.database_url else {}
    for variable, value in {**place.variables(), **given}.items():
        os.environ[variable] = value
    if (host := current_host()) is None:
        program = this_program(["worker", "--app", app, *words])
    else:
        program = [*host.program, "worker", *words]
    signals.starting = False
    return Parent(program, ["--quiet"], count, signals, drain=options.drain).run()


def _words(options: WorkerOptions) -> list[str]:
    words = []
    for option, value in (
        ("--queues", ",".join(options.queues or ())),
        ("--concurrency", options.concurrency),
        ("--lease", options.lease),
        ("--heartbeat", options.heartbeat),
        ("--grace", options.grace),
        ("--poll", options.poll),
        ("--breaker", options.breaker_failures),
        ("--unfit", options.unfit_failures),
        ("--name", options.name),
    ):
        if value not in (None, ""):
            words += [option, str(value)]
    flags = (("--drain", options.drain), ("--no-schedules", not options.schedules))
    return [*words, *(flag for flag, wanted in flags if wanted)]


class _OneLine(logging.Formatter):
    """One record, one line, but for tracebacks: a text with a newline in it must not look like two records."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        record.message = one_line(record.message, 8192)
        return super().formatMessage(record)


def _log_to_stderr(level: LogLevel) -> None:
    """Log to stderr, unless the application has configured logging itself; then only our level is set."""
    log.logger.setLevel(level.name)
    log.logger.disabled = False  # an application's dictConfig switches off what it does not know
    if not logging.root.handlers:
        handler = logging.StreamHandler()
        handler.setLevel(level.name)  # loggers of frameworks have levels of their own
        handler.setFormatter(_OneLine("%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"))
        logging.root.addHandler(handler)

"""Flask: `PgQueue(app)` or `init_app`, `PGQUEUE_*` in the configuration, `flask pgqueue …`, an application context per job.

One object serves any number of applications, as `db = SQLAlchemy()` does. Tasks belong to the object; the settings, the
connections and with them the database that an enqueue goes to are those of the current application.
"""

from __future__ import annotations

import difflib
import functools
import gc
import os
import re
import signal
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from flask import Flask, current_app, has_app_context
from flask.cli import NoAppException, ScriptInfo, with_appcontext

from pgqueue import client
from pgqueue.batch import Batch
from pgqueue.cli import run
from pgqueue.cli.ending import leave
from pgqueue.cli.host import Host, is_promised
from pgqueue.config import OTHER_VARIABLES, Settings, load_settings
from pgqueue.current import CurrentJob
from pgqueue.errors import ConfigurationError
from pgqueue.middleware import Middleware
from pgqueue.ops import Op
from pgqueue.ops.enqueue import Envelope
from pgqueue.task import BaseTask, TaskOptions
from pgqueue.worker.processes import stop_signals

__all__ = ["AppQueue", "PgQueue"]

T = TypeVar("T")
EXTENSION = "pgqueue"
PREFIX = "PGQUEUE_"
CHILDREN_LOAD = "PGQUEUE_FLASK_APP"
"""How the child processes of a worker find its application: the worker's pid, a colon, and what `flask --app` was given."""
_SETTINGS = tuple(field.name for field in fields(Settings))
_SCHEME = re.compile(r"\Apostgres(?:ql)?(?:\+\w+)?://")


class PgQueue(client.PgQueue):
    """A pgqueue.PgQueue for Flask applications: ``pq = PgQueue(app)``, or ``pq = PgQueue()`` and ``pq.init_app(app)``.

    Its tasks are those of every application. Everything else happens in the queue of the current application, or of the only
    one where no application context is there; ConfigurationError where that leaves a choice. `options` are settings that an
    application may override in its configuration.
    """

    home = ""

    def __init__(self, app: Flask | None = None, **options: Any) -> None:
        options = {name: _text_of_url(value) for name, value in options.items()}
        # Not that of the parent: what it would make for itself, each application makes for itself.
        self._without_app = client.PgQueue(**options)
        self._of_apps = frozenset(vars(self._without_app)) - _definitions(self._without_app).keys()
        vars(self).update(_definitions(self._without_app))
        self.chain.add(_Contexts(self))
        self._options = options
        self._apps: weakref.WeakSet[Flask] = weakref.WeakSet()
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Give an application its queue, from ``app.config["PGQUEUE_DATABASE_URL"]`` and the like (see Settings).

        The database is by default that of the environment's PGQUEUE_DATABASE_URL, or else of SQLALCHEMY_DATABASE_URI.
        Nothing is connected. ConfigurationError names what is wrong, and a near match.
        """
        _check_app(app)
        if EXTENSION in app.extensions:
            raise ConfigurationError(f"the Flask application {app.name!r} has a PgQueue already: use that one")
        options = {**self._options, **_configuration(app.config)}
        of_environment = os.environ.get(f"{PREFIX}DATABASE_URL")
        if not options.get("database_url") and (not of_environment or is_promised(of_environment)):
            options["database_url"] = _url_of_sqlalchemy(app.config.get("SQLALCHEMY_DATABASE_URI"))
        app.extensions[EXTENSION] = AppQueue(self, app, options)
        app.cli.add_command(command)
        self._apps.add(app)

    def for_app(self, app: Flask) -> AppQueue:
        """The queue of one application, to be used without its context: what ``Worker(…)`` takes where there are several."""
        _check_app(app)
        queue = app.extensions.get(EXTENSION)
        if not isinstance(queue, AppQueue) or queue.extension is not self:
            raise ConfigurationError(
                f"the Flask application {app.name!r} does not know this PgQueue: call init_app first"
            )
        return queue

    def only_app(self) -> Flask:
        """The application where there is one; in a child process of a worker, the one that it serves."""
        app = _of_the_worker()
        if app is not None:
            return app
        if len(self._apps) > 1:
            gc.collect()  # an application holds itself: one that a test is through with may still be there
        apps = list(self._apps)
        if len(apps) == 1:
            return apps[0]
        if _is_child():
            return _of_the_environment()
        if apps:
            raise ConfigurationError(
                "this PgQueue has several Flask applications: push the context of the one you mean"
            )
        raise ConfigurationError("this PgQueue has no Flask application yet: make one, and push its context")

    def _queue(self) -> AppQueue:
        app = current_app._get_current_object() if has_app_context() else self.only_app()  # type: ignore[attr-defined]
        return self.for_app(app)

    def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """See pgqueue.PgQueue.run: in the queue of the current application."""
        return self._queue().run(op, using, atomic=atomic)

    if not TYPE_CHECKING:  # a checker would take every name for known

        def __getattr__(self, name: str) -> Any:
            if name in vars(self).get("_of_apps", ()):
                return getattr(self._queue(), name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name in vars(self).get("_of_apps", ()):
                setattr(self._queue(), name, value)
            else:
                super().__setattr__(name, value)

    def _envelope(self, task: BaseTask[..., Any], options: TaskOptions) -> Envelope:
        return self._queue()._envelope(task, options)

    def _job(self, *args: Any) -> Mapping[str, Any]:
        # A schedule stands in a module that is imported before there is any application.
        return self._without_app._job(*args)


def _check_app(app: Any) -> None:
    if not isinstance(app, Flask):
        raise ConfigurationError(
            f"PgQueue of pgqueue.contrib.flask needs a Flask application, not a value of type {type(app).__name__}; "
            "a database is given as PgQueue(database_url=…), or in the application's configuration"
        )


def _definitions(queue: client.PgQueue) -> dict[str, Any]:
    """Tasks, schedules, events, middleware: what is public belongs to the code, and the rest, with the settings, to an
    application."""
    return {name: value for name, value in vars(queue).items() if name != "settings" and not name.startswith("_")}


class AppQueue(client.PgQueue):
    """The queue of one application, with the tasks, schedules, middleware and events of its extension."""

    def __init__(self, extension: PgQueue, app: Flask, options: Mapping[str, Any]) -> None:
        super().__init__(**options)
        vars(self).update({name: getattr(extension, name) for name in _definitions(self)})
        self.extension = extension
        self.flask_app = app
        self._envelopes: weakref.WeakKeyDictionary[BaseTask[..., Any], Envelope] = weakref.WeakKeyDictionary()

    def _envelope(self, task: BaseTask[..., Any], options: TaskOptions) -> Envelope:
        # Not kept at the task, as elsewhere: it names the channel of one application.
        if options is not task.defaults or options.headers is not None:
            return super()._envelope(task, options)
        envelope = self._envelopes.get(task)
        if envelope is None:
            envelope = self._envelopes[task] = self.envelope(task.name, options, task.retry_json)
        return envelope


class _Contexts(Middleware):
    """An application context around every run of a job, or of a batch, in the thread, event loop or process of the run."""

    def __init__(self, extension: PgQueue) -> None:
        self.extension = extension

    def run(self, job: CurrentJob, proceed: Callable[[], Any]) -> Any:
        with self._app(job).app_context():
            return proceed()

    async def run_async(self, job: CurrentJob, proceed: Callable[[], Awaitable[Any]]) -> Any:
        with self._app(job).app_context():
            return await proceed()

    def run_batch(self, batch: Batch, proceed: Callable[[], Any]) -> Any:
        with self._app(batch[0]).app_context():
            return proceed()

    async def run_batch_async(self, batch: Batch, proceed: Callable[[], Awaitable[Any]]) -> Any:
        with self._app(batch[0]).app_context():
            return await proceed()

    def _app(self, job: CurrentJob) -> Flask:
        queue = job.served_by
        return queue.flask_app if isinstance(queue, AppQueue) else self.extension.only_app()


# Configuration


def _configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a Flask configuration. Texts are read as they would be from the environment, by the same rules."""
    given: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for key in [key for key in config if key.startswith(PREFIX) and key not in OTHER_VARIABLES]:
        name = key.removeprefix(PREFIX).lower()
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, _SETTINGS, n=1)  # without the prefix, which makes all of them alike
            known = ", ".join(f"{PREFIX}{known.upper()}" for known in _SETTINGS)
            hint = f"; did you mean {PREFIX}{near[0].upper()}?" if near else f"; known are {known}"
            raise ConfigurationError(f"unknown configuration {key}{hint}")
        if isinstance(config[key], str):
            texts[key] = config[key]
        elif config[key] is not None:
            given[name] = _text_of_url(config[key])
    read = load_settings({}, texts)
    names = [key.removeprefix(PREFIX).lower() for key, said in texts.items() if said]
    return given | {name: getattr(read, name) for name in names}


def _url_of_sqlalchemy(uri: Any) -> str | None:
    """The same database for libpq: without the name of a driver. None where it is not PostgreSQL."""
    text = uri.render_as_string(hide_password=False) if hasattr(uri, "render_as_string") else uri
    if not isinstance(text, str) or not _SCHEME.match(text):
        return None
    return _SCHEME.sub("postgresql://", text)


def _text_of_url(value: Any) -> Any:
    """A URL object of SQLAlchemy as libpq reads it; everything else as it is."""
    return _url_of_sqlalchemy(value) or value if hasattr(value, "render_as_string") else value


# The command line


@click.command(
    "pgqueue",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="The job queue: migrate, worker, status, jobs, dead and more.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
@with_appcontext
def command(context: click.Context, words: tuple[str, ...]) -> None:
    """The program `pgqueue` on the queue of this application."""
    queue = current_app.extensions[EXTENSION]
    _remember(context.find_object(ScriptInfo))
    host = Host(name="flask pgqueue", program=_program(words), queue=queue)
    if "worker" in words and sys.stdout is sys.__stdout__:
        leave(run(words, host))  # a hung thread must not keep it
    with _handlers_kept():  # a test runner, with streams of its own, goes on afterwards
        status = run(words, host)
    context.exit(status)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in stop_signals()]
    try:
        yield
    finally:
        for number, handler in before:
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                signal.set_wakeup_fd(-1)


def _program(words: tuple[str, ...]) -> tuple[str, ...]:
    """What was typed up to and with `pgqueue`, for another process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    start = ("-m", spec.name.removesuffix(".__main__")) if spec is not None else (sys.argv[0],)
    return (sys.executable, *start, *sys.argv[1 : len(sys.argv) - len(words)])


def _remember(info: ScriptInfo | None) -> None:
    """Tell the child processes that a worker may start which application it is."""
    if info is None:
        return
    path, factory = info.app_import_path or "", info.create_app
    if factory is not None:
        path = f"{factory.__module__}:{getattr(factory, '__qualname__', '')}"
    if path.isprintable() and "<" not in path:
        os.environ[CHILDREN_LOAD] = f"{os.getpid()}:{path}"


@functools.cache
def _of_the_worker() -> Flask | None:
    """In a child process of a worker, its application, made as `flask` made it there; None in any other process."""
    pid, _, path = os.environ.get(CHILDREN_LOAD, "").partition(":")
    return _made(path) if _is_child() and pid == str(os.getppid()) else None


@functools.cache
def _of_the_environment() -> Flask:
    """In a child process of a worker that `flask` did not start, the application of FLASK_APP."""
    path = os.environ.get("FLASK_APP")
    if not path:
        raise ConfigurationError(
            "this child process of a worker cannot know its Flask application: start the worker with "
            "`flask --app … pgqueue worker`, or set FLASK_APP to what makes the application"
        )
    return _made(path)


def _is_child() -> bool:
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return main is not None and main.name == "pgqueue.worker.child"


def _made(path: str) -> Flask:
    try:
        return ScriptInfo(app_import_path=path or None).load_app()
    except NoAppException as error:
        raise ConfigurationError(f"the worker's application cannot be made here: {error.format_message()}") from error

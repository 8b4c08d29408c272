"""Finding the application's PgQueue: ``module:attribute``, or the only one of a module."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import psycopg

from pgqueue.cli.database import check_url, configured, private_server
from pgqueue.cli.errors import UsageMistake, sentence
from pgqueue.cli.host import current_host, promise
from pgqueue.cli.options import APP_VARIABLE, SCHEMA_VARIABLE, URL_VARIABLE, Place
from pgqueue.core import Core
from pgqueue.errors import DatabaseUnavailable, PgQueueError
from pgqueue.worker.processes import Stopped

USUAL_NAMES = ("pq", "app", "queue")


class AppError(PgQueueError):
    """The application cannot be imported, or holds no PgQueue where it was said to."""


def app_name(given: str | None) -> str:
    """What --app or PGQUEUE_APP says; UsageMistake when neither is given."""
    name = known_app(given)
    if not name:
        raise UsageMistake(f"which application? give --app module:attribute, or set {APP_VARIABLE}")
    return name


def known_app(given: str | None) -> str | None:
    """The same, and None when neither is given. A host has one application, which nobody else names."""
    if (host := current_host()) is None:
        return given or os.environ.get(APP_VARIABLE)
    if given:
        raise UsageMistake(f"leave out --app: `{host.name}` works on its own application")
    return host.name


@contextmanager
def application(place: Place, name: str) -> Iterator[Core]:
    """The application's PgQueue with a database.

    An explicit --database-url or --schema wins over what the application says, that wins over the environment, and with
    no database anywhere it is the private one: its URL is in the environment before the application is imported, and
    the server is started once it is known that the application does not bring its own.
    """
    if (host := current_host()) is not None:
        with _hosted(place, host.queue) as core:
            yield core
        return
    for variable, value in ((URL_VARIABLE, place.database_url), (SCHEMA_VARIABLE, place.schema)):
        if value:
            os.environ[variable] = value
    if configured(place).database_url:
        yield _moved(load(name), database_url=place.database_url, schema=place.schema)
        return
    os.environ[URL_VARIABLE] = promised = _private_url()
    promise(promised)
    try:
        app = load(name)
    except AppError as error:
        if not isinstance(error.__cause__, (psycopg.OperationalError, DatabaseUnavailable)):
            raise
        app = None  # it wants its database at import already
    if app is not None and app.settings.database_url not in (None, promised):
        del os.environ[URL_VARIABLE]
        yield _moved(app, schema=place.schema)
        return
    with private_server(place, place.schema or (app.settings if app else configured(place)).schema) as url:
        os.environ[URL_VARIABLE] = url
        yield _moved(app or load(name), database_url=url, schema=place.schema)


@contextmanager
def _hosted(place: Place, core: Core) -> Iterator[Core]:
    if place.database_url or core.settings.database_url:
        yield _moved(core, database_url=place.database_url, schema=place.schema)
        return
    with private_server(place, place.schema or core.settings.schema) as url:
        yield _moved(core, database_url=url, schema=place.schema)


def load(name: str) -> Core:
    """Import the module, with the current directory first on the path, and find the PgQueue in it; AppError says why not."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    module = _import(module_name)
    found = _named(module, attribute) if attribute else _only(module)
    if found.home == "":
        found.home = module_name
    return found


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Stopped:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _import_error(name, error) from error
        hint = (
            f"; give a module, such as {Path(name).stem!r}, not a file" if name.endswith(".py") or "/" in name else ""
        )
        raise AppError(f"there is no module {name!r} in {Path.cwd()} or among the installed packages{hint}") from error
    except (Exception, SystemExit) as error:
        raise _import_error(name, error) from error


def _import_error(name: str, error: BaseException) -> AppError:
    said = str(error)
    if isinstance(error, SyntaxError):
        said = f"{error.msg} ({error.filename}, line {error.lineno})"
    if isinstance(error, PgQueueError):
        said = sentence(error)
    return AppError(f"importing {name!r} failed with {type(error).__name__}: {said}")


def _named(module: ModuleType, attribute: str) -> Core:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, dir(value), n=3)
            hint = f"; similar: {', '.join(near)}" if near else ""
            raise AppError(f"module {module.__name__!r} has no {attribute!r}{hint}")
        value = getattr(value, part)
    if not isinstance(value, Core):
        raise AppError(
            f"{module.__name__}:{attribute} is of type {type(value).__name__}, not a PgQueue or AsyncPgQueue"
        )
    return value


def _only(module: ModuleType) -> Core:
    for name in USUAL_NAMES:
        if isinstance(found := getattr(module, name, None), Core):
            return found
    known = {id(value): name for name, value in vars(module).items() if isinstance(value, Core)}
    if len(known) == 1:
        return _named(module, next(iter(known.values())))
    if known:
        choices = ", ".join(f"{module.__name__}:{name}" for name in sorted(known.values()))
        raise AppError(f"module {module.__name__!r} holds several queues, say which: {choices}")
    raise AppError(
        f"module {module.__name__!r} holds no PgQueue or AsyncPgQueue; say where it is with module:attribute"
    )


def _moved(app: Core, **changes: str | None) -> Core:
    """The same object with other settings. Nothing is connected yet: both kinds of pool open at first use."""
    check_url(changes.get("database_url") or app.settings.database_url)
    wanted = {name: value for name, value in changes.items() if value and getattr(app.settings, name) != value}
    if wanted:
        app.settings = dataclasses.replace(app.settings, **wanted)  # type: ignore[arg-type]
        app._pool.settings = app.settings  # type: ignore[attr-defined]
    return app


def _private_url() -> str:
    """The URL that the private server will have: it follows from its folder."""
    import platformdirs

    from pgqueue.embedded.folder import PORT, Folder
    from pgqueue.embedded.server import check_platform

    check_platform()
    root = os.environ.get("PGQUEUE_DATA_DIR") or platformdirs.user_data_path("pgqueue") / "postgres"
    sockets = Folder(Path(os.path.realpath(root))).sockets
    return f"postgresql://postgres@/postgres?host={quote(str(sockets))}&port={PORT}"

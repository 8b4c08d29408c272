"""Which database a command works on: the configured one, or the private one for as long as the command runs."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgqueue.cli.host import current_host
from pgqueue.cli.options import Place
from pgqueue.cli.output import note
from pgqueue.client import PgQueue
from pgqueue.config import Settings, load_settings
from pgqueue.drivers.address import unreadable
from pgqueue.errors import ConfigurationError, UnknownQueue
from pgqueue.ops.status import queue_names


def configured(place: Place) -> Settings:
    """The settings of the command line and the environment, or of the host; `database_url` may be open."""
    given = {"database_url": place.database_url, "schema": place.schema}
    if (host := current_host()) is None:
        settings = load_settings(given)
    else:
        changes: dict[str, Any] = {name: value for name, value in given.items() if value}
        settings = dataclasses.replace(host.queue.settings, **changes)
    check_url(settings.database_url)
    check_url(settings.listen_url)
    return settings


def check_url(url: str | None) -> None:
    """ConfigurationError when libpq cannot read it. Its own message is not shown: it may quote a piece of the password."""
    try:
        conninfo_to_dict(url or "")
    except psycopg.ProgrammingError:
        raise ConfigurationError(unreadable(url)) from None


@contextmanager
def database(place: Place, *, ready: bool = True) -> Iterator[Settings]:
    """Settings with a URL. `ready`: a private database also gets its schema."""
    settings = configured(place)
    if settings.database_url:
        yield settings
        return
    with private_server(place, settings.schema, ready=ready) as url:
        yield dataclasses.replace(settings, database_url=url)


@contextmanager
def queue(place: Place) -> Iterator[PgQueue]:
    """A PgQueue on the database of this command."""
    with database(place) as settings, PgQueue(**dataclasses.asdict(settings)) as pq:
        yield pq


@contextmanager
def private_server(place: Place, schema: str, *, ready: bool = True) -> Iterator[str]:
    """The URL of the private PostgreSQL, started or joined; one line on stderr says so."""
    from pgqueue import embedded

    with embedded.start() as server:
        news = _prepare(server.url, schema) if ready else ""
        if not place.quiet:
            where = f"the private PostgreSQL {server.version} in {server.data.parent}"
            note(f"no database configured; using {where}{news}")
        yield server.url


def _prepare(url: str, schema: str) -> str:
    from pgqueue import migrate

    done = migrate.upgrade(url, schema=schema)
    if done.before == done.after:
        return ""
    if done.before is None:
        return f" (its schema {schema} was made now)"
    return f" (its schema {schema} was brought from revision {done.before} to {done.after})"


def known_queues(pq: PgQueue) -> list[str]:
    """Every queue that holds something, has a setting, or is served by a worker."""
    served = {name for worker in pq.workers() for name in worker.queues}
    return sorted({*pq.run(queue_names()), *served})


def check_queue(pq: PgQueue, name: str | None, advice: str = "") -> None:
    """UnknownQueue, with near matches, for a name that no queue has."""
    if name is None:
        return
    known = known_queues(pq)
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"; similar: {', '.join(near)}" if near else f"; known are {', '.join(known[:10])}" if known else ""
    raise UnknownQueue(f"there is no queue {name!r}{hint}{advice}")

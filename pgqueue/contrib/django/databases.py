"""From an alias of DATABASES to what pgqueue needs of it."""

from __future__ import annotations

import difflib
import re
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from pgqueue.worker import places

_KEYWORDS = frozenset(known.keyword.decode() for known in psycopg.pq.Conninfo.get_defaults()) - {"client_encoding"}


PLACE = ("NAME", "HOST", "PORT", "USER", "PASSWORD")


def places_of_all() -> dict[str, dict[str, str]]:
    """Where Django's databases are in this process: a test runner gives them other names than the settings do."""
    return {
        alias: {name: str(entry[name]) for name in PLACE if entry.get(name) is not None}
        for alias, entry in connections.settings.items()
    }


def be_where_the_parent_is() -> None:
    """In a child process of a worker, have Django's connections lead where those of its parent do."""
    moved = False
    for alias, place in places.told.get("databases", {}).items():
        entry = connections.settings.get(alias)
        if entry is None or all(str(entry.get(name)) == value for name, value in place.items()):
            continue
        entry.update(place)
        moved = True
    if moved:
        connections.close_all()  # an application may have been quick to ask something


def unfit(alias: str) -> str | None:
    """Why no queue can be in this database, in one sentence; None where one can. Nothing is connected."""
    known = list(connections)
    if alias not in known:
        near = difflib.get_close_matches(alias, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(map(repr, known))}"
        return f"DATABASES has no {alias!r}: {hint}"
    connection: Any = connections[alias]
    if connection.vendor != "postgresql":
        name = getattr(connection, "display_name", connection.vendor)
        return f"database {alias!r} is {name}: pgqueue needs PostgreSQL, ENGINE django.db.backends.postgresql"
    if connection.Database.__name__ != "psycopg":
        return (
            f"Django's connections to {alias!r} are those of {connection.Database.__name__}: "
            "pgqueue needs psycopg 3, run `pip install 'psycopg[binary]'`"
        )
    return None


def url_of(alias: str) -> str:
    """How to connect to this database as Django does, as keywords of libpq; ImproperlyConfigured where no queue can be."""
    if problem := unfit(alias):
        raise ImproperlyConfigured(problem)
    connection: Any = connections[alias]
    given = connection.get_connection_params()
    chosen = {name: str(value) for name, value in given.items() if name in _KEYWORDS and value is not None}
    if role := connection.settings_dict.get("OPTIONS", {}).get("assume_role"):
        escaped = re.sub(r"([\\\s])", r"\\\1", str(role))  # as libpq reads words
        chosen["options"] = f"{chosen.get('options', '')} -c role={escaped}".strip()
    return psycopg.conninfo.make_conninfo(**chosen)

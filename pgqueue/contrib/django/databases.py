"""From an alias of DATABASES to what pgqueue needs of it."""

from __future__ import annotations

import difflib
from typing import Any

import psycopg
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

_KEYWORDS = frozenset(known.keyword.decode() for known in psycopg.pq.Conninfo.get_defaults()) - {"client_encoding"}


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
    return psycopg.conninfo.make_conninfo(
        **{name: str(value) for name, value in given.items() if name in _KEYWORDS and value is not None}
    )

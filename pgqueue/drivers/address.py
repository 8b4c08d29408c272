"""What is wrong with a database URL that libpq cannot read. Its own message is not shown: it repeats pieces of passwords."""

from __future__ import annotations

import difflib
import re
from urllib.parse import unquote

from psycopg import pq

CANNOT = "the database URL cannot be read"
_WITH_DRIVER = re.compile(r"\Apostgres(?:ql)?\+[^:/@]*://")
_URL = re.compile(r"\Apostgres(?:ql)?://")
_KEY = re.compile(r"[A-Za-z_]{1,40}")
_MAY_BE_SECRET = re.compile("@|pass", re.IGNORECASE)


def unreadable(url: str | None) -> str:
    """One sentence. A parameter is named where it cannot be a piece of a password that was not escaped."""
    text = url or ""
    if _WITH_DRIVER.match(text):
        return f"{CANNOT}: leave out the name of the driver, so that it begins with postgresql://"
    unknown = _unknown_parameter(text)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, sorted(_known()), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{CANNOT}: libpq has no parameter {unknown!r}{hint}"
    return f"{CANNOT}: it is neither a postgresql:// URL with known parameters nor key=value pairs"


def _unknown_parameter(url: str) -> str | None:
    query = url.partition("?")[2]
    if not _URL.match(url) or _MAY_BE_SECRET.search(unquote(query)):
        return None
    for part in query.split("&"):
        key = unquote(part.partition("=")[0])
        if key not in _known():
            return key if "=" in part and _KEY.fullmatch(key) else None
    return None


def _known() -> frozenset[str]:
    # libpq itself reads ssl=true as sslmode=require.
    return frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults()) | {"ssl"}

"""Settings: one frozen object, validated once; the environment is read in one function."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import unquote_to_bytes

from pgqueue.errors import ConfigurationError

SCHEMA_PATTERN = re.compile(r"[a-z_][a-z0-9_]{0,39}")
MAX_SECONDS = 10 * 365 * 86400.0
PRIORITIES = range(-100, 101)
MAX_NAME_BYTES = 200
LONGEST_SHOWN = 80
OTHER_VARIABLES = frozenset(
    f"PGQUEUE_{name}"
    for name in (
        "APP", "DATA_DIR", "FLASK_APP", "GIVEN_DATABASE_URL", "PG_BIN", "PG_USER",
        "BENCH_NODE", "BENCH_TALLY", "FUZZ_EXAMPLES", "HISTORY_SECONDS", "HISTORY_SEED", "SOAK_RATE", "SOAK_SECONDS",
        "TEST_DATABASE_URL", "TEST_FAKETIME", "TEST_PGBOUNCER", "UPDATE_GOLDEN",
    )
)  # fmt: skip
"""The variables of the environment that are no settings: what was copied from there may hold them."""
_URL = re.compile(r"postgres(?:ql)?://")
_USER = re.compile(r"[^@/]*@")
_BRACKETS = re.compile(r"\[[^\]]*\]")
_HOST_AND_PORT = re.compile(r"[^:]*(?::\d*)?")


def shown(value: Any) -> str:
    """`value` for an error message: short, and never an error itself (Python writes no int of more than 4,300 digits)."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - an object may do anything when it is looked at
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def validate_url(url: str | None) -> str | None:
    """Return `url`; ConfigurationError for one in which a password is not escaped, and for what is no text at all.

    libpq would take a piece of the password for a host, a port or a database, and what names those in an error or a log
    would show it. The message repeats nothing.
    """
    if url is not None and not isinstance(url, str):
        raise ConfigurationError(f"the database URL must be a text, not a value of type {type(url).__name__}")
    if url and _URL.match(url):
        rest = url.partition("://")[2]
        user = _USER.match(
            rest
        )  # as libpq reads it: up to the first @, and a / before that means that there is no user
        authority, _, path = rest[user.end() if user else 0 :].partition("?")[0].partition("/")
        places = _BRACKETS.sub("", authority).split(",")
        misread = "@" in authority or "@" in path or any(not _HOST_AND_PORT.fullmatch(one) for one in places)
        if misread or not _is_text(url):
            raise ConfigurationError(
                "the database URL cannot be read: after the host comes a port number, and in user and password "
                "@ is written %40, / is %2F and : is %3A"
            )
    return url


def _is_text(url: str) -> bool:
    """Whether what is escaped is UTF-8; elsewhere the driver's error would hold the bytes of the password."""
    try:
        unquote_to_bytes(url).decode()
    except UnicodeError:
        return False
    return True


def validate_schema(name: str) -> str:
    """Return `name`; ConfigurationError unless it is a plain lower-case identifier of at most 40 characters."""
    if not isinstance(name, str) or not SCHEMA_PATTERN.fullmatch(name):
        raise ConfigurationError(
            f"schema {shown(name)}: use lower-case letters, digits and underscores, starting with a letter, at most 40"
        )
    return name


def validate_name(kind: str, name: str) -> str:
    """Return `name`; ConfigurationError unless it can name a queue or a task in SQL, in logs and on a command line."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a {kind} name must be a non-empty string, not {shown(name)}")
    if not name.isprintable() or name != name.strip():
        raise ConfigurationError(f"{kind} name {shown(name)}: no control characters, no spaces at its ends")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES or "," in name:
        raise ConfigurationError(f"{kind} name {name[:40]!r}…: at most {MAX_NAME_BYTES} bytes and no comma")
    return name


def validate_seconds(what: str, value: Any, *, least: float = 0.0) -> float:
    """Return `value` as float seconds; ConfigurationError unless it is a finite number between `least` and ten years."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= MAX_SECONDS:
        raise ConfigurationError(
            f"{what} must be a number of seconds between {least:g} and {MAX_SECONDS:g}, not {shown(value)}"
        )
    return float(value)


def validate_duration(what: str, value: Any, *, least: float = 0.0) -> float:
    """The same for a duration that may be given as a timedelta."""
    return validate_seconds(what, value.total_seconds() if isinstance(value, timedelta) else value, least=least)


def validate_count(what: str, value: Any, *, least: int = 1, most: int = 2**31 - 1) -> int:
    """Return `value`; ConfigurationError unless it is an int (not a bool) between `least` and `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigurationError(f"{what} must be a whole number between {least} and {most}, not {shown(value)}")
    return value


def validate_priority(value: Any) -> int:
    """Return `value`; ConfigurationError unless it is an int between -100 and 100 (higher runs first)."""
    return validate_count("priority", value, least=PRIORITIES[0], most=PRIORITIES[-1])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a PgQueue is built with. Every field has an environment variable, ``PGQUEUE_`` and its name in capitals.

    `database_url`: a postgresql:// URL or libpq keyword string; needed only once a connection of our own is needed.
    `listen_url`: where to LISTEN, when `database_url` leads through a pooler in transaction mode.
    `schema`: the schema of all tables. `archive`: keep finished jobs, for `archive_days`.
    `notify`: wake workers by NOTIFY at enqueue. `prepare`: server-side prepared statements; None, the default, means
    where no pooler is in between. True is right behind PgBouncer 1.21 and newer with its `max_prepared_statements`.
    `max_payload_bytes`: the most that arguments of one job may take as JSON; `max_result_bytes`: the same of its result.
    `pool_size`: connections of the own pool.
    """

    database_url: str | None = dataclasses.field(default=None, repr=False)
    listen_url: str | None = dataclasses.field(default=None, repr=False)
    schema: str = "pgqueue"
    archive: bool = True
    archive_days: float = 7.0
    notify: bool = True
    prepare: bool | None = None
    max_payload_bytes: int = 1024 * 1024
    max_result_bytes: int = 256 * 1024
    pool_size: int = 10
    connect_timeout: float = 10.0

    def __post_init__(self) -> None:
        validate_url(self.database_url)
        validate_url(self.listen_url)
        validate_schema(self.schema)
        validate_seconds("archive_days", self.archive_days, least=0.01)
        validate_count("max_payload_bytes", self.max_payload_bytes, least=2, most=512 * 1024 * 1024)
        validate_count("max_result_bytes", self.max_result_bytes, least=2, most=512 * 1024 * 1024)
        validate_count("pool_size", self.pool_size, most=1000)
        validate_seconds("connect_timeout", self.connect_timeout, least=1)
        for name in ("archive", "notify", "prepare"):
            if not isinstance(getattr(self, name), bool) and (name, getattr(self, name)) != ("prepare", None):
                raise ConfigurationError(f"{name} must be True or False, not {getattr(self, name)!r}")


_FIELDS = {field.name: field for field in dataclasses.fields(Settings)}


def load_settings(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from `options`, completed from the environment; ConfigurationError names what is wrong and a near match."""
    unknown = [name for name in options if name not in _FIELDS]
    if unknown:
        near = difflib.get_close_matches(unknown[0], _FIELDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(_FIELDS)}"
        raise ConfigurationError(f"unknown setting {unknown[0]!r}{hint}")
    values = _from_environment(os.environ if environ is None else environ)
    values.update({name: value for name, value in options.items() if value is not None})
    return Settings(**values)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        variable = f"PGQUEUE_{name.upper()}"
        text = environ.get(variable, "")
        if text:
            values[name] = _parse(variable, text, bool if name == "prepare" else type(field.default))
    return values


def _parse(variable: str, text: str, kind: type) -> Any:
    if kind is bool:
        known = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if text.lower() not in known:
            raise ConfigurationError(f"{variable} must be true or false")
        return known[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ConfigurationError(f"{variable} must be a number") from None
    return text

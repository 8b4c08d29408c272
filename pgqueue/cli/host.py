"""A framework's own command that runs this command line: `flask pgqueue …` has its application and its settings at hand."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pgqueue.core import Core

GIVEN_URL = "PGQUEUE_GIVEN_DATABASE_URL"
"""How a parent's --database-url reaches its children: what a command line says wins over the application."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`name`: the words before ours, as a user types them. `program`: the same as another process is started with.
    `queue`: what every command works on."""

    name: str
    program: tuple[str, ...]
    queue: Core


_promised: contextvars.ContextVar[str | None] = contextvars.ContextVar("pgqueue_promised_url", default=None)
_words: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar(
    "pgqueue_command_words", default=()
)
_host: contextvars.ContextVar[Host | None] = contextvars.ContextVar("pgqueue_command_host", default=None)


def current_host() -> Host | None:
    """Who runs this command line; None where it is the program `pgqueue`."""
    return _host.get()


def promise(url: str) -> None:
    """The private server will be there, for an application that brings no database; PGQUEUE_DATABASE_URL has it already."""
    _promised.set(url)


def is_promised(url: str) -> bool:
    """Whether this is the private server, and so nothing that anybody has configured."""
    return url == _promised.get()


def as_typed(text: str) -> str:
    """A text with the commands that it recommends as a user types them here."""
    for ours, theirs in _words.get():
        text = text.replace(ours, theirs)
    host = current_host()
    return text if host is None else text.replace("`pgqueue ", f"`{host.name} ")


@contextmanager
def worded(words: Mapping[str, str]) -> Iterator[None]:
    """In texts of the block these commands are called otherwise; the first that fits counts."""
    token = _words.set(tuple(words.items()))
    try:
        yield
    finally:
        _words.reset(token)


@contextmanager
def hosted(host: Host | None) -> Iterator[None]:
    """Commands of the block belong to this host."""
    token = _host.set(host)
    try:
        yield
    finally:
        _host.reset(token)

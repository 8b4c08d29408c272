"""The keys of a job, as they are given where it is enqueued and as they are stored.

A lane is what jobs share a line with: 'o' and an ordering key (one at a time, in order), 'c' and a concurrency key (so many
at a time), 'f' and a fairness key (taken in turns).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pgqueue.errors import ConfigurationError

if TYPE_CHECKING:
    from pgqueue.task import TaskOptions

MAX_KEY_BYTES: Final = 500
"""Keys stand in indexes, whose entries must fit on a page several times."""
ORDERING, CONCURRENCY, FAIRNESS = "o", "c", "f"
FAIR_WIDTH: Final = 100
"""Jobs of one fairness key that stand in line at once: so many of one are run before another has its turn."""
PARK, CONTINUE = "park", "continue"

Key = str | Callable[..., str | None]
"""A key, or a function of the call's arguments that makes it; None from the function means: no key for this call."""


def validate_key(what: str, key: object) -> str:
    """The key; ConfigurationError for what is no text, empty, too long, or not storable."""
    if not isinstance(key, str):
        raise ConfigurationError(f"{what} must be text, not {type(key).__name__}")
    if not key:
        raise ConfigurationError(f"{what} must not be empty")
    if "\x00" in key:
        raise ConfigurationError(f"{what} must not contain the character U+0000")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ConfigurationError(f"{what} must not contain lone surrogates") from None
    if size > MAX_KEY_BYTES:
        raise ConfigurationError(f"{what} must not be longer than {MAX_KEY_BYTES} bytes; this one has {size}")
    return key


def validate_key_option(what: str, key: object) -> None:
    """The same for an option, which may also be a function."""
    if key is not None and not callable(key):
        validate_key(what, key)


def lane_of(options: TaskOptions, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The lane of one call."""
    for kind, what, key in (
        (ORDERING, "ordering_key", options.ordering_key),
        (CONCURRENCY, "concurrency_key", options.concurrency_key),
        (FAIRNESS, "fairness_key", options.fairness_key),
    ):
        if key is not None:
            made = key_of(what, key, args, kwargs)
            return None if made is None else kind + made
    return None


def width_of(options: TaskOptions) -> int | None:
    """How many jobs of one lane may be admitted at once; None where a job of these options has no lane."""
    if options.ordering_key is not None:
        return 1
    return FAIR_WIDTH if options.fairness_key is not None else options.concurrency_limit


def key_of(what: str, key: Key | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The key of one call; ConfigurationError when the function fails or returns what is no key."""
    if key is None or isinstance(key, str):
        return key
    try:
        made = key(*args, **kwargs)
    except Exception as error:
        raise ConfigurationError(f"{what} could not be made from the arguments: {type(error).__name__}") from error
    return None if made is None else validate_key(what, made)

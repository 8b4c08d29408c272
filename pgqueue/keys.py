"""The keys of a job, as they are given where it is enqueued and as they are stored.

A lane is what jobs share a line with: 'o' and an ordering key (one at a time, in order), 'c' and a concurrency key (so many
at a time), 'f' and a fairness key (taken in turns).

A unique key has one job at a time in its queue; `on_conflict` says what becomes of a second one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import orjson

from pgqueue.errors import ConfigurationError

if TYPE_CHECKING:
    from pgqueue.task import TaskOptions

MAX_KEY_BYTES: Final = 500
"""Keys stand in indexes, whose entries must fit on a page several times."""
ORDERING, CONCURRENCY, FAIRNESS = "o", "c", "f"
FAIR_WIDTH: Final = 100
"""Jobs of one fairness key that stand in line at once: so many of one are run before another has its turn."""
PARK, CONTINUE = "park", "continue"
SKIP, REPLACE, MERGE, MERGE_DISTINCT, SUPERSEDE, RAISE = (
    "skip", "replace", "merge", "merge_distinct", "supersede", "raise")  # fmt: skip
CONFLICTS: Final = (SKIP, REPLACE, MERGE, MERGE_DISTINCT, SUPERSEDE, RAISE)
MERGING: Final = (MERGE, MERGE_DISTINCT)
MODES: Final = {MERGE: 1, MERGE_DISTINCT: 1, REPLACE: 2, SUPERSEDE: 3}
"""As stored in `job.next_mode`; of several that fell together the largest counts."""
Payloads = tuple[str | None, str | None]

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


def debounce(key: Key, quiet: float | timedelta, *, at_most: float | timedelta | None = None) -> dict[str, Any]:
    """Options for a job that runs once its calls have been quiet for so long, with the arguments of the last one.

    ``task.options(**pgqueue.debounce("index:7", 5, at_most=60)).enqueue(7)``. `at_most`: and no later than so long after the
    first call, however many come. Seconds or a timedelta.
    """
    return {"unique_key": key, "on_conflict": REPLACE, "delay": quiet, "delay_limit": at_most}


def throttle(key: Key, every: float | timedelta) -> dict[str, Any]:
    """Options for a job that starts at most once in so long: the first call at once, those after it together as one job at
    the end of that time, with the arguments of the last one. Seconds or a timedelta.

    ``task.options(**pgqueue.throttle("stats:7", 60)).enqueue(7)``. With `on_conflict="skip"` beside it, the later calls are
    dropped instead.
    """
    return {"unique_key": key, "on_conflict": REPLACE, "unique_for": every}


def merge_payloads(old: Payloads, new: Payloads, *, once: bool) -> Payloads:
    """The JSON texts of two calls as one. What the function payload_merge does with a stored job, for calls of one bulk."""
    return _merge(old[0], new[0], once), _merge(old[1], new[1], once)


def _merge(old: str | None, new: str | None, once: bool) -> str | None:
    if old is None or new is None:
        return old if new is None else new
    left, right = orjson.loads(old), orjson.loads(new)
    if isinstance(left, list):
        pairs = [_joined(one, other, once) for one, other in zip(left, right, strict=False)]
        merged: Any = pairs + left[len(pairs) :] + right[len(pairs) :]
    else:
        both = {name: _joined(left[name], right[name], once) for name in left if name in right}
        merged = left | right | both
    return orjson.dumps(merged).decode()


def _joined(old: Any, new: Any, once: bool) -> Any:
    if not isinstance(old, list) or not isinstance(new, list):
        return new
    return list({orjson.dumps(item): item for item in old + new}.values()) if once else old + new

"""The two ways in which payloads are merged agree: in the database, with a stored job, and in Python, inside one bulk."""

from __future__ import annotations

from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue.keys import merge_payloads

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=5)
)
ITEMS = SCALARS | st.sampled_from([1, 2, "a"]) | st.dictionaries(st.sampled_from("ab"), SCALARS, max_size=2)
VALUES = ITEMS | st.lists(ITEMS | st.lists(ITEMS, max_size=2), max_size=5)
ARGS = st.none() | st.lists(VALUES, min_size=1, max_size=4)
KWARGS = st.none() | st.dictionaries(st.sampled_from(["a", "b", "é", 'q"', "c\n"]), VALUES, min_size=1, max_size=4)


def text(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


@pytest.fixture
def session(admin: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    return admin


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(args=st.tuples(ARGS, ARGS), kwargs=st.tuples(KWARGS, KWARGS), once=st.booleans())
def test_a_merge_in_the_database_is_that_of_a_bulk(
    session: psycopg.Connection[Any], args: tuple[Any, Any], kwargs: tuple[Any, Any], once: bool
) -> None:
    old, new = (text(args[0]), text(kwargs[0])), (text(args[1]), text(kwargs[1]))
    [merged] = session.execute(
        "SELECT pgqueue.payload_merge(%s::json, %s::json, %s)::text, pgqueue.payload_merge(%s::json, %s::json, %s)::text",
        [old[0], new[0], once, old[1], new[1], once],
    ).fetchall()
    here = merge_payloads(old, new, once=once)
    for ours, theirs in zip(here, merged, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert repr(orjson.loads(ours)) == repr(orjson.loads(theirs))


@settings(max_examples=100, deadline=None)
@given(old=st.lists(ITEMS, max_size=6), new=st.lists(ITEMS, max_size=6))
def test_a_merge_loses_no_item_and_a_distinct_one_repeats_none(old: list[Any], new: list[Any]) -> None:
    [joined] = orjson.loads(merge_payloads((text([old]), None), (text([new]), None), once=False)[0] or "")
    assert repr(joined) == repr(old + new)
    [distinct] = orjson.loads(merge_payloads((text([old]), None), (text([new]), None), once=True)[0] or "")
    assert [text(item) for item in distinct] == list(dict.fromkeys(text(item) for item in old + new))

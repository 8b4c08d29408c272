"""Fuzzing of what is written in schedules: any text ticks in order, or is refused in one sentence."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pgqueue.cron import Missed, Timing, plan, timing
from pgqueue.errors import ConfigurationError
from pgqueue.schedule import Definition, check_changes, rhythm
from tests.fuzzing import any_text, fuzz, json_like

START = datetime(2026, 3, 28, 12, tzinfo=UTC)
numbers = st.integers(-1, 100).map(str)
words = st.sampled_from(["*", "L", "LW", "MON", "FRI", "JAN", "5L", "MON#2", "1L", "?", "W", "٣", "0x1", ""])
atoms = numbers | words
pieces = st.one_of(
    atoms,
    st.builds("{}-{}".format, atoms, atoms),
    st.builds("{}/{}".format, atoms, atoms),
    st.builds("{}-{}/{}".format, atoms, atoms, atoms),
    st.text("0123456789*/,-#LWlw", max_size=8),
)
near_fields = st.lists(pieces, min_size=1, max_size=3).map(",".join)
near_crons = st.lists(near_fields, min_size=4, max_size=7).map(" ".join)
texts = st.one_of(any_text, near_crons, st.text("0123456789*/,-#LW \t\n@", max_size=300), st.just("@daily"))
zones = st.one_of(
    any_text, st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "../x", "/etc/passwd", "Etc"])
)


def refused(error: ConfigurationError) -> None:
    said = str(error)
    assert said
    assert "\n" not in said
    assert len(said) < 400


def assert_ticks(ticking: Timing) -> None:
    after, seen = START, 0
    while seen < 20 and (tick := ticking.after(after)) is not None:
        assert tick > after
        assert tick.utcoffset() == timedelta(0)
        after, seen = tick, seen + 1
    for missed in Missed:
        found = plan(ticking, START, START + timedelta(hours=30), missed=missed, grace=60)
        assert found.ticks == sorted(set(found.ticks))
        assert all(START < tick <= START + timedelta(hours=30) for tick in found.ticks)


@fuzz(4)
@given(text=texts, zone=zones)
def test_any_cron_text_ticks_in_order_or_is_refused_in_one_sentence(text: str, zone: str) -> None:
    try:
        ticking = timing(text, None, zone)
    except ConfigurationError as error:
        refused(error)
    else:
        assert_ticks(ticking)


@fuzz(4)
@given(text=near_crons)
def test_texts_that_are_nearly_crons_tick_in_order_or_are_refused(text: str) -> None:
    try:
        ticking = timing(text, None, "America/New_York")
    except ConfigurationError as error:
        refused(error)
    else:
        assert_ticks(ticking)


anything = st.one_of(json_like, st.timedeltas(), st.floats(), any_text)


@fuzz(2)
@given(every=anything, grace=anything, missed=anything, overlap=anything, cron=st.one_of(st.none(), texts), tz=zones)
def test_any_interval_and_policy_is_taken_or_refused_in_one_sentence(**given_: Any) -> None:
    try:
        made = rhythm(given_.pop("cron"), **given_)
    except ConfigurationError as error:
        refused(error)
    else:
        Definition(name="s", rhythm=made, job={}).fingerprint()
        assert_ticks(timing(made.cron, made.every, made.tz, START))


@fuzz()
@given(every=st.floats(1, 3e8) | st.integers(1, 10**8) | st.timedeltas(timedelta(seconds=1), timedelta(days=3000)))
def test_every_interval_ticks_in_order(every: float | timedelta) -> None:
    assert_ticks(timing(None, every, "UTC", START))


@fuzz()
@given(changes=st.dictionaries(any_text | st.sampled_from(["cron", "every"]), anything, max_size=3))
def test_any_change_is_known_or_refused_in_one_sentence(changes: dict[str, Any]) -> None:
    try:
        assert set(check_changes(changes)) <= {"cron", "every", "tz", "missed", "grace", "overlap"}
    except ConfigurationError as error:
        refused(error)

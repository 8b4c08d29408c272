"""When a schedule ticks: across changes of the clock, from wherever one looks, and after nobody has looked for long."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.cron import MOST_TICKS, Cron, Every, Missed, Timing, plan, timing
from pgqueue.errors import ConfigurationError
from tests.fuzzing import fuzz

MINUTE = timedelta(minutes=1)
CHANGES = {
    "Europe/Berlin": ["2026-03-29 01:00", "2026-10-25 01:00"],
    "America/New_York": ["2026-03-08 07:00", "2026-11-01 06:00"],
    "Australia/Lord_Howe": ["2026-04-04 15:00", "2026-10-03 15:30"],
    "America/Sao_Paulo": ["2018-02-18 02:00", "2018-11-04 03:00"],
    "Antarctica/Troll": ["2026-03-29 01:00", "2026-10-25 01:00"],
    "Pacific/Apia": ["2011-12-30 10:00"],
    "Africa/Casablanca": ["2026-02-15 02:00", "2026-03-22 02:00"],
    "Asia/Kolkata": ["2026-03-29 01:00"],
}
"""Zones, and when their clocks change, in UTC: by an hour, by half an hour, at midnight, by two hours, by a day, for
Ramadan; and one whose clock does not."""


def ticks(timing: Timing, after: datetime, count: int) -> list[datetime]:
    found = []
    for _ in range(count):
        tick = timing.after(after)
        assert tick is not None
        found.append(tick)
        after = tick
    return found


def shown(text: str, zone: str, after: str, count: int) -> list[str]:
    """Ticks as the clock of the zone shows them, from a time of that zone on."""
    start = datetime.fromisoformat(after).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
    found = ticks(Cron(text, zone), start, count)
    return [tick.astimezone(ZoneInfo(zone)).strftime("%d %H:%M:%S%z").removesuffix("00") for tick in found]


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["29 03:00:00+02", "30 02:30:00+02"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24 12:00", ["25 02:30:00+02", "26 02:30:00+01"]),
        ("0 30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["29 03:00:00+02", "30 02:30:00+02"]),
        ("15 30 2 * * *", "Europe/Berlin", "2026-10-24 12:00", ["25 02:30:15+02", "26 02:30:15+01"]),
        ("0,30 2 * * *", "Europe/Berlin", "2026-03-28 12:00", ["29 03:00:00+02", "30 02:00:00+02"]),
        ("30 2 * * *", "America/New_York", "2026-03-07 12:00", ["08 03:00:00-04", "09 02:30:00-04"]),
        ("30 1 * * *", "America/New_York", "2026-10-31 12:00", ["01 01:30:00-04", "02 01:30:00-05"]),
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03 12:00", ["04 02:30:00+11", "05 02:15:00+11"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04 12:00", ["05 01:45:00+11", "06 01:45:00+1030"]),
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03 12:00", ["04 01:00:00-02", "05 00:00:00-02"]),
        ("30 2 * * *", "Asia/Kolkata", "2026-03-28 12:00", ["29 02:30:00+0530", "30 02:30:00+0530"]),
        ("@daily", "UTC", "2026-03-28 12:00", ["29 00:00:00+00", "30 00:00:00+00"]),
    ],
)
def test_a_time_of_the_day_comes_once_a_day_across_changes_of_the_clock(
    text: str, zone: str, after: str, expected: list[str]
) -> None:
    assert shown(text, zone, after, 2) == [
        tick.removesuffix("00") if tick.endswith("+0000") else tick for tick in expected
    ]


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("*/30 * * * *", "Europe/Berlin", "2026-03-29 01:15", ["29 01:30:00+01", "29 03:00:00+02", "29 03:30:00+02"]),
        ("*/30 * * * *", "Europe/Berlin", "2026-10-25 02:15", ["25 02:30:00+02", "25 02:00:00+01", "25 02:30:00+01"]),
        ("0 */2 * * *", "Europe/Berlin", "2026-10-25 00:15", ["25 02:00:00+02", "25 02:00:00+01", "25 04:00:00+01"]),
        ("*/30 2 * * *", "Europe/Berlin", "2026-03-29 00:15", ["30 02:00:00+02", "30 02:30:00+02", "31 02:00:00+02"]),
        # A library that steps by whole hours of real time goes past these quarters of an hour.
        (
            "*/15 3 * * *",
            "Australia/Lord_Howe",
            "2026-10-04 01:20",
            ["04 03:00:00+11", "04 03:15:00+11", "04 03:30:00+11"],
        ),
        (
            "*/30 2 * * *",
            "Australia/Lord_Howe",
            "2026-04-05 00:20",
            ["05 02:00:00+1030", "05 02:30:00+1030", "06 02:00:00+1030"],
        ),
        (
            "*/15 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-05 01:40",
            ["05 01:45:00+11", "05 01:30:00+1030", "05 01:45:00+1030"],
        ),
        # The next time under the same offset is a year away; in between the clock shows this one again.
        ("*/30 2 25 10 *", "Europe/Berlin", "2026-10-25 02:45", ["25 02:00:00+01", "25 02:30:00+01", "25 02:00:00+02"]),
    ],
)
def test_frequent_crons_go_on_in_real_time_across_changes_of_the_clock(
    text: str, zone: str, after: str, expected: list[str]
) -> None:
    assert shown(text, zone, after, 3) == expected


def test_intervals_go_on_in_real_time_across_changes_of_the_clock() -> None:
    start = datetime(2026, 3, 28, 12, tzinfo=ZoneInfo("Europe/Berlin")).astimezone(UTC)
    six_hours = Every(6 * 3600.0, start)
    found = ticks(six_hours, start, 6)
    assert {later - earlier for earlier, later in itertools.pairwise([start, *found])} == {timedelta(hours=6)}
    assert [tick.astimezone(ZoneInfo("Europe/Berlin")).hour for tick in found] == [18, 0, 7, 13, 19, 1]


@pytest.mark.parametrize(
    ("text", "zone", "look", "expected"),
    [
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10+00:00", "2026-10-26T01:30+00:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:10+00:00", "2026-10-25T00:30+00:00"),
        ("30 1 * * *", "America/New_York", "2026-11-01T06:00+00:00", "2026-11-02T06:30+00:00"),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T15:05+00:00", "2026-04-05T15:15+00:00"),
        ("30 2 * * *", "Europe/Berlin", "2026-03-29T01:00+00:00", "2026-03-30T00:30+00:00"),
    ],
)
def test_who_looks_within_a_repeated_hour_finds_no_time_of_the_day_again(
    text: str, zone: str, look: str, expected: str
) -> None:
    assert Cron(text, zone).after(datetime.fromisoformat(look)) == datetime.fromisoformat(expected)


def test_intervals_do_not_drift() -> None:
    start = datetime(2026, 1, 1, microsecond=123_456, tzinfo=UTC)
    tenth = Every(1.1, start)
    assert ticks(tenth, start + timedelta(days=365), 1) == [start + timedelta(seconds=1.1) * 28_669_091]


fields = st.one_of(
    st.just("*"),
    st.integers(2, 45).map(lambda step: f"*/{step}"),
    st.lists(st.integers(0, 23), min_size=1, max_size=3, unique=True).map(lambda some: ",".join(map(str, some))),
)
hours_near = st.one_of(
    fields, st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True).map(lambda h: ",".join(map(str, h)))
)
places = st.sampled_from([(zone, change) for zone, changes in CHANGES.items() for change in changes])


def matching(field: str, most: int) -> Sequence[int]:
    if field.startswith("*"):
        return range(0, most, int(field[2:] or "1"))
    return [int(number) for number in field.split(",")]


def by_brute_force(minute: str, hour: str, zone: str, start: datetime, minutes: int) -> list[datetime]:
    """Every minute of real time is looked at, with what the clock shows then."""
    known = ZoneInfo(zone)
    wanted = set(itertools.product(matching(hour, 24), matching(minute, 60)))
    walls = [
        (at, at.astimezone(known).replace(tzinfo=None, fold=0)) for at in (start + MINUTE * k for k in range(minutes))
    ]
    if "*" in minute[0] + hour[0]:
        return [at for at, wall in walls if (wall.hour, wall.minute) in wanted]
    first: dict[datetime, datetime] = {}
    shown = walls[0][1]
    for at, wall in walls:
        while shown <= wall:  # what the clock jumps over comes at the jump, and what it has shown before does not come
            if (shown.hour, shown.minute) in wanted:
                first.setdefault(shown, at)
            shown += MINUTE
    return sorted(set(first.values()))


@fuzz()
@given(minute=fields, hour=hours_near, place=places, hours=st.integers(2, 40), six=st.booleans())
def test_ticks_around_a_change_of_the_clock_are_those_that_brute_force_finds(
    minute: str, hour: str, place: tuple[str, str], hours: int, six: bool
) -> None:
    zone, change = place
    start = datetime.fromisoformat(f"{change}+00:00") - timedelta(hours=hours)
    expected = by_brute_force(minute, hour, zone, start, 60 * 72)
    cron = Cron(f"{'0 ' if six else ''}{minute} {hour} * * *", zone)
    found = []
    tick = cron.after(start - timedelta(seconds=1))
    while tick is not None and tick < start + MINUTE * 60 * 72:
        found.append(tick)
        tick = cron.after(tick)
    # A day that the clock skips ends in the middle of the window: its first minute may stand for what came before it.
    expected = [tick for tick in expected if tick > start]
    assert [tick for tick in found if tick > start] == expected
    for minutes in range(
        max(0, 60 * hours - 150), min(60 * hours + 150, 60 * 71), 7
    ):  # whoever looks around the change
        look = start + MINUTE * minutes
        later = expected[bisect.bisect_right(expected, look) :]
        if later:
            assert cron.after(look) == later[0]


crons = st.builds(
    lambda minute, hour, day, weekday: f"{minute} {hour} {day} * {weekday}",
    st.integers(0, 59).map(str),
    st.one_of(st.just("*"), st.sampled_from(["*/2", "*/5", "2", "1,2,3", "0-3"])),
    st.sampled_from(["*", "*/3", "L", "13"]),
    st.sampled_from(["*", "MON-FRI", "0", "5L", "TUE#2"]),
)


@fuzz(0.5)
@given(text=crons, zone=st.sampled_from(sorted(CHANGES)), looks=st.lists(st.floats(0, 1), min_size=5, max_size=30))
def test_ticks_do_not_depend_on_when_somebody_looked(text: str, zone: str, looks: list[float]) -> None:
    start, year = datetime(2026, 1, 1, 5, 17, tzinfo=UTC), timedelta(days=365)
    cron = Cron(text, zone)
    if cron.after(start) is None:  # such as the 13th that is also a last Friday, which never is
        return
    found = [start]
    while (tick := cron.after(found[-1])) is not None and tick < start + year:
        assert tick > found[-1]
        found.append(tick)
    found = [*found[1:], *([] if tick is None else [tick])]
    for look in looks:
        at = min(start + year * look, found[-1] - timedelta(microseconds=1))
        assert Cron(text, zone).after(at) == found[bisect.bisect_right(found, at)]


def in_order(timing: Timing, after: datetime, until: datetime) -> Iterator[datetime]:
    while (tick := timing.after(after)) is not None and tick <= until:
        yield tick
        after = tick


START = datetime(2026, 10, 24, 22, 0, 30, tzinfo=UTC)
timings = st.one_of(
    st.floats(1, 5000).map(lambda seconds: Every(seconds, START)),
    st.sampled_from(["*/7 * * * *", "*/5 * * * * *", "0 */3 * * *", "30 2 * * *"]).map(
        lambda t: Cron(t, "Europe/Berlin")
    ),
)


@fuzz(2)
@given(
    timing=timings,
    passed=st.floats(0, 9000).map(lambda seconds: timedelta(seconds=seconds)),
    grace=st.one_of(st.just(0.0), st.floats(0, 4000)),
    missed=st.sampled_from(Missed),
)
def test_missed_ticks_are_counted_as_their_policy_says(
    timing: Timing, passed: timedelta, grace: float, missed: Missed
) -> None:
    now = START + passed
    due = list(in_order(timing, START, now))
    late = [tick for tick in due if tick < now - timedelta(seconds=grace)]
    kept = {
        Missed.ALL: due,
        Missed.SKIP: due[len(late) :],
        Missed.ONCE: due[-1:] if late else due,
    }[missed]
    found = plan(timing, START, now, missed=missed, grace=grace)
    if len(due) <= MOST_TICKS:
        assert (found.ticks, found.skipped) == (kept, len(due) - len(kept))
        assert found.next_at == timing.after(now)
    made, again = list(found.ticks), found
    while again.next_at is not None and again.next_at <= now:
        again = plan(timing, again.ticked_to, now, missed=missed, grace=grace)
        made += again.ticks
    assert made == kept
    assert plan(timing, again.ticked_to, now, missed=missed, grace=grace).ticks == []


@pytest.mark.parametrize("missed", Missed)
def test_a_year_without_workers_is_planned_at_once_and_in_bounded_pieces(missed: Missed) -> None:
    now = datetime(2026, 6, 1, 0, 0, 20, tzinfo=UTC)
    found = plan(Cron("*/10 * * * * *"), now - timedelta(days=365), now, missed=missed, grace=25)
    if missed is Missed.ALL:
        assert (len(found.ticks), found.skipped) == (MOST_TICKS, 0)
        assert found.next_at == found.ticked_to + timedelta(seconds=10) < now
    else:
        assert found.skipped == MOST_TICKS, "more are not counted"
        assert (
            found.ticks == [now] if missed is Missed.ONCE else [now - timedelta(seconds=20 - 10 * n) for n in range(3)]
        )
        assert found.next_at == now + timedelta(seconds=10)


def test_a_clock_that_was_set_back_makes_no_tick_twice() -> None:
    done = datetime(2026, 6, 1, 12, tzinfo=UTC)
    found = plan(Cron("*/5 * * * *"), done, done - timedelta(hours=1), missed=Missed.ALL, grace=60)
    assert (found.ticks, found.ticked_to, found.next_at) == ([], done, done + timedelta(minutes=5))


def test_the_end_of_time_is_no_error() -> None:
    assert Cron("0 0 1 1 *").after(datetime(9999, 12, 31, tzinfo=UTC)) is None
    assert Every(86400.0, START).after(datetime(9999, 12, 31, 23, tzinfo=UTC)) is None


@pytest.mark.parametrize(
    ("text", "zone", "said"),
    [
        ("* * * *", "UTC", "five fields"),
        ("* * * * * * *", "UTC", "five fields"),
        ("@reboot", "UTC", "@hourly"),
        ("61 * * * *", "UTC", "bad minute"),
        ("* * * * * MON#6", "UTC", "bad day-of-week"),
        ("* * * * 1L/2", "UTC", "'* * * * 1L/2'"),
        ("0 0 31 2 *", "UTC", "bad day-of-month"),
        ("0 0 */20 * 1L", "UTC", "names no time that ever comes"),
        ("* * * * *", "Europe/Berln", "similar: Europe/Berlin"),
        ("* * * * *", "../../etc/passwd", "no time zone"),
        ("* * * * *", "localtime", "no time zone"),
        ("* * * * *", "Europe", "no time zone"),
        ("x" * 1000, "UTC", "at most 200 characters"),
        (7, "UTC", "is a string"),
        ("* * * * *", 7, "no time zone"),
    ],
)
def test_bad_texts_and_zones_are_one_clear_sentence(text: str, zone: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        timing(text, None, zone)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("cron", "every", "zone", "said"),
    [
        (None, None, "UTC", "one of the two"),
        ("* * * * *", 5, "UTC", "one of the two"),
        (None, 0.5, "UTC", "between 1 and"),
        (None, float("nan"), "UTC", "between 1 and"),
        (None, timedelta(0), "UTC", "between 1 and"),
        (None, "5", "UTC", "number of seconds"),
        (None, 60, "Europe/Berlin", "no time zone"),
    ],
)
def test_bad_intervals_are_one_clear_sentence(cron: str | None, every: float, zone: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        timing(cron, every, zone)

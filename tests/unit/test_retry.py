"""The retry policies: pure, bounded, and readable back from whatever a row holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue import retry
from pgqueue.errors import ConfigurationError
from pgqueue.retry import DEFAULT_POLICY, Delays, Exponential, Fixed, Linear, Policy, from_json, to_json

durations = st.one_of(
    st.integers(0, 10**8),
    st.floats(0, 10**8),
    st.timedeltas(timedelta(0), timedelta(days=3000)),
)
policies: st.SearchStrategy[Policy] = st.one_of(
    st.builds(Fixed, durations),
    st.builds(Linear, durations, durations),
    st.builds(Exponential, st.floats(1, 10**8), durations, st.booleans()),
    st.lists(durations, min_size=1, max_size=100).map(lambda delays: Delays(*delays)),
)
BAD = [
    True,
    math.nan,
    math.inf,
    -math.inf,
    -1,
    -0.001,
    10**9,
    10**5000,
    "5",
    None,
    timedelta(days=-1),
    timedelta.max,
    1j,
]


@given(policies, st.integers(), st.floats())
def test_a_delay_is_never_negative_nor_infinite_nor_nan(policy: Policy, attempt: int, random: float) -> None:
    assert 0 <= policy.delay(attempt, random) <= retry.MAX_DELAY


@pytest.mark.parametrize("attempt", [10_000, 10**400])
def test_an_absurd_attempt_gives_the_longest_delay(attempt: int) -> None:
    assert Exponential(jitter=False).delay(attempt, 0.5) == 3600
    assert Exponential(base=1, jitter=False).delay(attempt, 0.5) == 1
    assert Linear(1.5).delay(attempt, 0.5) == 3600
    assert Linear(0).delay(attempt, 0.5) == 0
    assert Delays(1, 2).delay(attempt, 0.5) == 2


@given(policies)
def test_a_policy_comes_back_equal_from_its_json(policy: Policy) -> None:
    assert from_json(to_json(policy)) == policy


@given(st.text() | st.sampled_from(['{"kind":"fixed"}', "null", "[]", "1", "[" * 5000]))
def test_an_unreadable_policy_is_the_default_one(text: str) -> None:
    assert from_json(text) == DEFAULT_POLICY == Exponential(base=2, cap=3600, jitter=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"fixed","delay":-1}',
        '{"kind":"fixed","delay":"5"}',
        '{"kind":"fixed","delay":1e12}',
        '{"kind":"fixed","delay":true}',
        '{"kind":"fixed","delay":1,"more":2}',
        '{"kind":"delays","delays":[]}',
        '{"kind":"delays","delays":{}}',
        '{"kind":"delays"}',
        '{"kind":"exponential","base":0.5}',
        '{"kind":"exponential","jitter":1}',
        '{"kind":["fixed"],"delay":1}',
        '{"kind":"os.system","delay":1}',
        '{"delay":1}',
        "",
    ],
)
def test_a_policy_that_its_constructor_refuses_is_the_default_one(text: str) -> None:
    assert from_json(text) is DEFAULT_POLICY


def test_no_policy_is_the_default_one() -> None:
    assert from_json(None) is DEFAULT_POLICY


def test_fixed_always_waits_the_same() -> None:
    assert [Fixed(delay=timedelta(minutes=1)).delay(n, 0.3) for n in (1, 2, 50)] == [60, 60, 60]


def test_linear_grows_by_its_step_up_to_the_cap() -> None:
    assert [Linear(step=10, cap=25).delay(n, 0.3) for n in (1, 2, 3, 4)] == [10, 20, 25, 25]


def test_exponential_without_jitter_doubles_up_to_the_cap() -> None:
    assert [Exponential(base=2, cap=10, jitter=False).delay(n, 0.3) for n in (1, 2, 3, 4)] == [2, 4, 8, 10]


def test_full_jitter_spreads_from_zero_to_the_whole_delay() -> None:
    assert [Exponential(base=2, cap=10).delay(3, random) for random in (0, 0.25, 1)] == [0, 2, 8]


def test_delays_are_taken_one_by_one_and_the_last_one_repeats() -> None:
    assert [Delays(1, timedelta(seconds=5), 30.5).delay(n, 0.3) for n in (0, 1, 2, 3, 4)] == [1, 1, 5, 30.5, 30.5]


@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:20] if value != 10**5000 else "10**5000")
def test_a_bad_duration_is_refused_with_a_sentence_that_names_it(value: Any) -> None:
    makers: dict[str, Callable[[], Policy]] = {
        "delay": lambda: Fixed(value),
        "step": lambda: Linear(value),
        "cap": lambda: Linear(1, cap=value),
        "base": lambda: Exponential(base=value),
        "delay 2": lambda: Delays(1, value),
    }
    for name, make in makers.items():
        with pytest.raises(ConfigurationError, match=f"^{name} must"):
            make()


def test_other_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        Exponential(base=0.99)
    with pytest.raises(ConfigurationError, match="True or False"):
        Exponential(jitter=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="from 1 to 100"):
        Delays()
    with pytest.raises(ConfigurationError, match="from 1 to 100"):
        Delays(*range(101))
    with pytest.raises(ConfigurationError, match="one of Fixed"):
        to_json("fixed")  # type: ignore[arg-type]


def test_policies_are_values() -> None:
    assert Fixed(5) == Fixed(timedelta(seconds=5))
    assert len({Exponential(), Exponential(), Delays(1), Linear(1)}) == 3
    with pytest.raises(AttributeError):
        Fixed(5).seconds = 6  # type: ignore[misc, unused-ignore]


def test_ten_years_are_accepted() -> None:
    assert Fixed(timedelta(days=3653)).delay(1, 0) == timedelta(days=3653).total_seconds()

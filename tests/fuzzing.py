"""How many examples a fuzz test tries: few in an ordinary run, PGQUEUE_FUZZ_EXAMPLES where somebody searches."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PGQUEUE_FUZZ_EXAMPLES", "60"))

any_text = st.text(st.characters(), max_size=40)
"""Lone surrogates, NUL and control characters included."""
json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | any_text
    | st.sampled_from([0, -0.0, 1e16, 2**63 - 1, -(2**63), 2**63, 1e308, 5e-324, "\\u0000", "\ud83d\ude00"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(any_text, inner, max_size=5),
    max_leaves=15,
)
"""JSON values, and near misses."""
json_texts = st.one_of(
    any_text,
    st.text('[]{}",:0123456789.eE+-nulltruefas \\u\n', max_size=60),
    st.builds(lambda depth, end: "[" * depth + end, st.integers(0, 3000), any_text),
    st.builds(lambda digits: f"[{'7' * digits}]", st.integers(1, 6000)),
    st.sampled_from(['["\\ud800"]', '["\\u0000"]', "[1e999]", "[NaN]", '{"a":1,"a":2}', "\ufeff[]", "[]]", "", "null"]),
)


def fuzz(factor: float = 1.0) -> Callable[[Any], Any]:
    """Settings of a fuzz test; `factor` makes slow ones try fewer examples."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(max_examples=max(5, int(EXAMPLES * factor)), deadline=None, suppress_health_check=checks)

"""The rules of keys, on histories made by hand: good ones pass, and each broken promise is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.history.checker import Checked, Rule
from tests.history.lane_checker import check_lanes
from tests.history.lane_record import LaneEvent, Snapshot

FIRST, SECOND, THIRD = 1, 2, 3


class Line:
    """One lane's history: every step is a transaction that has seen all before it, unless it is said otherwise."""

    def __init__(self, lane: str = "oa", width: int = 1) -> None:
        self.lane = lane
        self.width = width
        self.events: list[LaneEvent] = []
        self.xid = 0

    def step(self, what: str, job_id: int | None = None, *, xid: int | None = None, **facts: Any) -> Line:
        if xid is None:
            self.xid += 1
        known = {"width": self.width, "waits": True, **facts}
        self.events.append(LaneEvent(len(self.events) + 1, xid or self.xid, self.lane, what, job_id, **known))
        return self

    def enqueued(self, *job_ids: int, **facts: Any) -> Line:
        for job_id in job_ids:
            self.step("insert", job_id, **facts)
        return self

    def admitted(self, job_id: int, unseen: tuple[int, ...] = (), **facts: Any) -> Line:
        """`unseen`: transactions that had not committed for this one."""
        seen = f"1:{self.xid + 1}:{','.join(map(str, unseen))}"
        return self.step("update", job_id, admitted=True, snapshot=seen, **facts)

    def claimed(self, job_id: int, token: int, **facts: Any) -> Line:
        return self.step("update", job_id, **{"admitted": True, "token": token, **facts})

    def back(self, job_id: int, **facts: Any) -> Line:
        return self.step("update", job_id, **{"admitted": True, **facts})

    def gone(self, job_id: int, **facts: Any) -> Line:
        return self.step("delete", job_id, admitted=True, **facts)

    def dead(self, job_id: int, *, parks: bool = True) -> Line:
        self.gone(job_id).step("dead", job_id, xid=self.xid, park=True)
        return self.step("parked", job_id, xid=self.xid) if parks else self

    def redriven(self, job_id: int) -> Line:
        self.enqueued(job_id).step("redriven", job_id, xid=self.xid, park=True)
        return self.step("resumed", xid=self.xid)

    def checked(self) -> Checked:
        return check_lanes([(self.lane, self.events)])


def run(line: Line, job_id: int, token: int) -> Line:
    return line.admitted(job_id).claimed(job_id, token).gone(job_id)


def broken(line: Line) -> list[Rule]:
    return [rule for rule in Rule if any(violation.rule is rule for violation in line.checked().violations)]


def test_a_snapshot_sees_what_had_committed() -> None:
    snapshot = Snapshot("10:20:12,15")
    assert [xid for xid in (9, 10, 12, 14, 15, 19, 20, 25) if snapshot.sees(xid)] == [9, 10, 14, 19]
    assert not Snapshot("10:10:").sees(10)


def test_jobs_that_follow_one_another_through_retries_and_losses_break_nothing() -> None:
    line = Line().enqueued(FIRST, SECOND, THIRD).admitted(FIRST).claimed(FIRST, 10)
    line.back(FIRST, waits=False).back(FIRST).claimed(FIRST, 20).back(FIRST).claimed(FIRST, 30).gone(FIRST)
    checked = run(run(line, SECOND, 40), THIRD, 50).checked()
    assert checked.violations == []
    assert checked.seen["admission in order"] == 3


def test_a_job_that_committed_late_or_is_for_later_is_not_waited_for() -> None:
    late = Line().enqueued(FIRST).enqueued(SECOND)
    assert broken(late.admitted(SECOND, unseen=(1,)).claimed(SECOND, 10).gone(SECOND)) == []
    assert broken(run(late, FIRST, 20)) == []
    later = Line().enqueued(FIRST, waits=False).enqueued(SECOND)
    assert broken(run(run(later, SECOND, 10).step("update", FIRST), FIRST, 20)) == []


def test_a_concurrency_key_may_be_full_and_a_retry_gives_its_slot_up() -> None:
    line = Line("ca", width=2).enqueued(FIRST, SECOND, THIRD).admitted(FIRST).admitted(SECOND)
    line.claimed(FIRST, 10).claimed(SECOND, 5)
    assert broken(line.back(FIRST, admitted=None, waits=False).admitted(THIRD)) == []


def test_a_lane_may_park_again_and_again_and_goes_on_by_redrive_or_by_an_operator() -> None:
    line = Line().enqueued(FIRST, SECOND).admitted(FIRST).claimed(FIRST, 10).dead(FIRST)
    line.redriven(FIRST).admitted(FIRST).claimed(FIRST, 20).dead(FIRST)
    line.step("unparking").step("resumed")
    checked = run(line, SECOND, 30).checked()
    assert checked.violations == []
    assert (checked.seen["parked"], checked.seen["resumed by redrive"], checked.seen["unparked"]) == (2, 1, 1)


def lined_up() -> Line:
    return Line().enqueued(FIRST, SECOND).admitted(FIRST)


BROKEN: list[tuple[str, Line, *tuple[Rule, ...]]] = [
    ("two admitted at once", lined_up().admitted(SECOND), Rule.ONE_AT_A_TIME, Rule.IN_ORDER),
    ("two admissions that did not see each other", lined_up().admitted(SECOND, unseen=(1, 3)), Rule.ONE_AT_A_TIME),
    (
        "admitted before the end of the one before it was committed",
        Line().enqueued(FIRST, SECOND).admitted(SECOND, unseen=(1,)).gone(SECOND).admitted(FIRST, unseen=(4,)),
        Rule.ONE_AT_A_TIME,
    ),
    ("an older one is passed over", Line().enqueued(FIRST, SECOND).admitted(SECOND), Rule.IN_ORDER),
    (
        "overtaken while it waits for a retry",
        lined_up().claimed(FIRST, 10).back(FIRST, admitted=None, waits=False).admitted(SECOND),
        Rule.IN_ORDER,
    ),
    ("a slot is lost", lined_up().back(FIRST, admitted=None), Rule.IN_ORDER),
    (
        "two owners",
        Line().enqueued(FIRST, SECOND).admitted(FIRST).claimed(FIRST, 10).claimed(SECOND, 20, admitted=None),
        Rule.ONE_AT_A_TIME,
        Rule.WITHIN_LIMIT,
    ),
    ("a smaller token", run(run(Line().enqueued(1, 2), FIRST, 20), SECOND, 10), Rule.ONE_AT_A_TIME),
    ("claimed without a slot", Line("ca").enqueued(FIRST).claimed(FIRST, 10, admitted=None), Rule.WITHIN_LIMIT),
    (
        "more than the limit",
        Line("ca", width=2).enqueued(FIRST, SECOND, THIRD).admitted(FIRST).admitted(SECOND).admitted(THIRD),
        Rule.WITHIN_LIMIT,
    ),
    (
        "more than the limit, in one statement",
        Line("ca")
        .enqueued(FIRST, SECOND)
        .admitted(FIRST)
        .step("update", SECOND, xid=3, admitted=True, snapshot="1:3:"),
        Rule.WITHIN_LIMIT,
    ),
    ("dies and does not park", lined_up().claimed(FIRST, 10).dead(FIRST, parks=False), Rule.PARKED),
    ("parked by nobody", lined_up().step("parked", FIRST), Rule.PARKED),
    ("goes on unasked", lined_up().claimed(FIRST, 10).dead(FIRST).step("resumed"), Rule.PARKED),
    ("admitted while parked", lined_up().claimed(FIRST, 10).dead(FIRST).admitted(SECOND), Rule.PARKED),
]


@pytest.mark.parametrize("case", BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_promise_of_keys_is_named_with_the_history_of_the_lane(
    case: tuple[str, Line, *tuple[Rule, ...]],
) -> None:
    _, line, *expected = case
    assert broken(line) == expected
    for violation in line.checked().violations:
        head, whose, *events = str(violation).splitlines()
        assert repr(line.lane) in head
        assert whose == f"  history of lane {line.lane!r}:"
        assert events

"""What a worker remembers of the rows of `admission`, and when it looks at all of them, without a database."""

from __future__ import annotations

import pytest

from pgqueue.ops import Step
from pgqueue.ops.admission import ROWS, AdmissionMark, admit


class Clock:
    """A clock that moves by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def look(mark: AdmissionMark, clock: Clock, last: int | None, *, cost: float = 0.0, refused: bool = False) -> int:
    """A pass that takes `cost` seconds and sees rows up to `last`; where it began."""
    began, after = clock.now, mark.after()
    clock.now += cost
    mark.took(last, full=after == 0, short=last is None, refused=refused, began=began)
    return after


def test_passes_begin_behind_what_was_taken_and_once_a_second_at_the_start() -> None:
    clock = Clock()
    mark = AdmissionMark(clock)
    assert look(mark, clock, 7) == 0
    assert look(mark, clock, 9) == 7
    clock.now += 0.9
    assert look(mark, clock, 12) == 9
    clock.now += 0.2
    assert look(mark, clock, None) == 0
    assert look(mark, clock, 15) == 12
    assert mark.owed_in() is None


def test_a_pass_behind_the_mark_that_finds_nothing_owes_a_pass_from_the_start() -> None:
    clock = Clock()
    mark = AdmissionMark(clock)
    assert look(mark, clock, 7, cost=0.01) == 0
    assert look(mark, clock, None) == 7
    assert mark.owed_in() == pytest.approx(0.2)
    assert look(mark, clock, None) == 7, "not before twenty times its duration has passed"
    clock.now += 0.21
    assert mark.owed_in() == 0
    assert look(mark, clock, None, cost=0.01) == 0
    assert mark.owed_in() is None, "from the start there is nothing either"


def test_passes_over_very_many_dead_rows_are_rare_and_yet_come() -> None:
    clock = Clock()
    mark = AdmissionMark(clock)
    assert look(mark, clock, 7, cost=0.2) == 0
    clock.now += 3.9
    assert look(mark, clock, 8) == 7
    clock.now += 0.2
    assert look(mark, clock, 9, cost=100.0) == 0
    clock.now += 5.1
    assert look(mark, clock, 10) == 0


def test_lanes_that_others_are_at_are_looked_at_again_later_and_later_up_to_a_second() -> None:
    clock = Clock()
    mark = AdmissionMark(clock)
    pauses = []
    for _ in range(12):
        look(mark, clock, 7, refused=True)
        pause = mark.owed_in()
        assert pause is not None
        pauses.append(pause)
        clock.now += pause
    assert pauses == sorted(pauses)
    assert pauses[0] < 0.05
    assert pauses[-1] == pytest.approx(1.0)


def test_an_admission_that_takes_too_long_is_halved_and_grows_back() -> None:
    mark = AdmissionMark()
    mark.failed()
    assert mark.rows == ROWS // 2
    for _ in range(20):
        mark.failed()
    assert mark.rows == 1, "never none"
    for _ in range(ROWS * 2):
        mark.worked()
    assert mark.rows == ROWS


def test_an_admission_sends_its_statements_one_by_one() -> None:
    """Of a pipeline a client that is frozen may have sent a part: that runs and keeps its locks, and no timeout ends it."""
    op = admit("q", AdmissionMark(), room=1, channel=None)
    asked = next(op)
    answers: dict[str, list[tuple[object, ...]]] = {
        "admission_begin": [],
        "admission_take": [(["oa"], 7, 1, 0, "off", "5s")],
        "lane_admit": [(1, False, None)],
        "admission_commit": [],
    }
    names = []
    with pytest.raises(StopIteration):
        while True:
            assert isinstance(asked, Step)
            names.append(asked.name)
            asked = op.send(answers[asked.name])
    assert names == list(answers)

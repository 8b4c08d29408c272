"""The checker of the soak, on made-up runs: one for everything that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.history.checker import Verdict
from tests.history.soak import Sample, grown
from tests.soak import sampling
from tests.soak.marks import Batch, Checked, check, journal

BATCHES = [
    Batch(0, 3, Verdict.COMMITTED),
    Batch(3, 2, Verdict.ROLLED_BACK),
    Batch(5, 2, Verdict.UNKNOWN),
    Batch(7, 2, Verdict.COMMITTED),
]
RAN = bytes([1, 1, 1, 0, 0, 0, 0, 1, 1, 0])


def changed(*pairs: tuple[int, int]) -> bytes:
    """The marks of a good run, but for these numbers."""
    marks = bytearray(RAN)
    for number, mark in pairs:
        marks[number] = mark
    return bytes(marks)


def complaint(marks: bytes, explained: int = 0) -> str:
    """The only complaint."""
    [found] = check(BATCHES, marks, explained=explained).complaints
    return found


def test_a_run_in_which_each_committed_job_ran_and_no_other_is_good() -> None:
    assert check(BATCHES, RAN, explained=0) == Checked(committed=5, rolled_back=2, unknown=2)


def test_a_commit_without_an_answer_may_have_happened() -> None:
    assert check(BATCHES, changed((5, 1), (6, 1)), explained=0).complaints == []


def test_half_a_commit_is_found() -> None:
    assert complaint(changed((6, 1))) == "a commit that got no answer was torn: 1 of 2 jobs ran"


def test_a_committed_job_that_never_ran_is_found() -> None:
    assert complaint(changed((1, 0), (8, 0))) == "2 jobs are lost, committed and never run: 1, 8"


def test_jobs_beyond_the_end_of_the_marks_are_lost() -> None:
    assert complaint(RAN[:8]) == "1 jobs are lost, committed and never run: 8"


def test_many_lost_jobs_are_counted_and_a_few_of_them_named() -> None:
    found = check([Batch(0, 2000, Verdict.COMMITTED)], bytes(2000), explained=0).complaints
    assert found == ["2,000 jobs are lost, committed and never run: 0, 1, 2, 3, 4 and 1,995 more"]


def test_a_job_that_was_rolled_back_and_ran_is_found() -> None:
    assert complaint(changed((4, 1))) == "1 jobs ran that were rolled back: 4"


def test_a_number_that_nobody_enqueued_is_found() -> None:
    assert complaint(changed((9, 1))) == "1 numbers ran that nobody enqueued"


def test_runs_again_are_counted_and_are_good_as_far_as_faults_explain_them() -> None:
    marks = changed((0, 2), (7, 4))
    checked = check(BATCHES, marks, explained=2)
    assert (checked.again, checked.extra, checked.complaints) == (2, 4, [])
    assert complaint(marks, explained=1) == "2 jobs ran more than once, and the faults explain at most 1"


def test_a_journal_says_what_was_written_into_it(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    file.write_text("".join(batch.line() for batch in BATCHES))
    assert list(journal(file)) == BATCHES


GROWING = {
    sampling.memory_of(0): (100e6, 150e6),
    sampling.CHILDREN: (100e6, 400e6),
    sampling.SESSIONS: (15.0, 30.0),
    sampling.DEAD: (50_000.0, 250_000.0),
}


@pytest.mark.parametrize("what", GROWING)
def test_what_is_larger_in_the_last_third_has_grown(what: str) -> None:
    bounds = sampling.margins(1, 5000.0)
    assert set(bounds) == set(GROWING)
    before, after = GROWING[what]
    warm_up = [Sample(what, 3 * after)] * 5
    [found] = grown([*warm_up, *[Sample(what, before)] * 5, *[Sample(what, after)] * 5], bounds)
    assert found.startswith(f"{what} grow")
    assert grown([*warm_up, *[Sample(what, before)] * 10], bounds) == []


def test_tables_are_as_large_as_their_rows_explain() -> None:
    usual = {sampling.LIVE: 200_000.0, sampling.DEAD: 800_000.0, sampling.BYTES: 700e6}
    assert sampling.bloated(usual) == []
    [found] = sampling.bloated({**usual, sampling.BYTES: 1700e6})
    assert found == "table bytes are 1,700,000,000, where 1,000,000 rows explain at most 1,564,000,000"

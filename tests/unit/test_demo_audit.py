"""The sums of the demo: whatever is wrong in the database or on the disk, one of them notices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PIL = pytest.importorskip("PIL.Image")
from pgqueue.demo.audit import Audit, Story  # noqa: E402
from pgqueue.demo.workers import Killed  # noqa: E402

Stories = list[Story]


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    """Three uploads: one rescued, one dead after a rolled-back one, one plain."""

    def story(upload_id: int, **changes: Any) -> Story:
        file = tmp_path / f"{upload_id}.jpg"
        plain = Story(upload_id, "cat.jpg", 100 + upload_id, "completed", 1, 0, 0, None, str(file))
        return dataclasses.replace(plain, **changes)

    for number in (1, 4):
        PIL.new("RGB", (8, 8)).save(tmp_path / f"{number}.jpg")
    return Audit(
        recorded=3,
        broken=1,
        rolled_back=2,
        killed=Killed(number=1, pid=1, held=(1,)),
        stories=(
            story(1, attempts=2, lost=1),
            story(3, state="dead", attempts=3, failed=3, reason="OSError: truncated", file=None),
            story(4),
        ),
        thumbnails=tmp_path,
    )


def test_a_run_without_fault_has_nothing_to_complain_about(audit: Audit) -> None:
    assert audit.complaint() is None
    assert (audit.enqueued, len(audit.completed), len(audit.dead), len(audit.rescued)) == (3, 2, 1, 1)


def changed(place: int, **changes: Any) -> Callable[[Stories], None]:
    def change(stories: Stories) -> None:
        stories[place] = dataclasses.replace(stories[place], **changes)

    return change


def added(*values: Any) -> Callable[[Stories], None]:
    return lambda stories: stories.append(Story(*values))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda stories: stories.pop(), "2 uploads in the table, but 3 uploads recorded."),
        (added(2, "x", None, "never enqueued", 0, 0, 0, None, None), "4 uploads in the table, but 3 uploads recorded."),
        (changed(2, upload_id=2), "Upload 2 was rolled back, and the table still has it."),
        (added(None, None, 102, "unfinished", 0, 0, 0, None, None), "Job 102 belongs to no upload."),
        (added(4, "x", 999, "completed", 1, 0, 0, None, None), "4 jobs enqueued, but 3 uploads recorded."),
        (changed(2, job_id=None, state="never enqueued"), "2 jobs enqueued, but 3 uploads recorded."),
        (changed(2, state="unfinished"), "The job of upload 4 is unfinished."),
        (changed(2, state="dead", failed=1), "2 dead letters, but 1 broken files uploaded."),
        (changed(2, attempts=2), "7 attempts, but 6 runs that completed, failed or were lost."),
        (changed(0, attempts=1, lost=0), "The killed worker held the jobs of uploads 1, and none of them was rescued."),
        (changed(2, file=None), "Thumbnails on disk and in the table differ by 4.jpg."),
        (changed(1, file="/x/4.jpg"), "Upload 3 is dead and has a thumbnail."),
    ],
)
def test_every_wrong_sum_is_named(audit: Audit, change: Callable[[Stories], None], complaint: str) -> None:
    stories = list(audit.stories)
    change(stories)
    assert dataclasses.replace(audit, stories=tuple(stories)).complaint() == complaint


def test_a_thumbnail_that_cannot_be_read_is_noticed(audit: Audit) -> None:
    (audit.thumbnails / "4.jpg").write_bytes(b"\xff\xd8\xff half of a picture")
    assert audit.complaint() == "Upload 4 is completed and has no readable thumbnail."

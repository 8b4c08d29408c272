"""The sums at the end, read back from the database and from the disk.

Every upload has a story: its job, what became of it, and how often it ran. All sums are taken over the stories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
from PIL import Image

from pgqueue.demo.stage import APP_SCHEMA, QUEUE_SCHEMA
from pgqueue.demo.workers import Killed

COLUMNS = "id, (args ->> 0)::bigint AS upload_id, attempt, lost, errors"
# FULL JOIN: an upload without a job and a job without an upload are both rows, and both are wrong.
STORIES = f"""
    WITH fate AS (
        SELECT {COLUMNS}, 'unfinished' AS state, NULL AS reason FROM {QUEUE_SCHEMA}.job
        UNION ALL SELECT {COLUMNS}, state, reason FROM {QUEUE_SCHEMA}.archive
        UNION ALL SELECT {COLUMNS}, 'dead', reason FROM {QUEUE_SCHEMA}.dead_letter
    )
    SELECT u.id, u.name, f.id, coalesce(f.state, 'never enqueued'), coalesce(f.attempt, 0), coalesce(f.lost, 0),
           (SELECT count(*) FROM jsonb_array_elements(f.errors) AS e WHERE e ->> 'type' <> 'WorkerLost'), f.reason, t.file
    FROM {APP_SCHEMA}.upload AS u
    FULL JOIN fate AS f ON f.upload_id = u.id
    LEFT JOIN {APP_SCHEMA}.thumbnail AS t ON t.upload_id = u.id
    ORDER BY u.id, f.id
"""  # noqa: S608 - the schemas are constants


@dataclass(frozen=True, slots=True)
class Story:
    """One upload with its job. `failed`: attempts that raised; `lost`: attempts that ended with their worker."""

    upload_id: int | None
    name: str | None
    job_id: int | None
    state: str
    attempts: int
    lost: int
    failed: int
    reason: str | None
    file: str | None


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the demo did (`recorded`, `broken`, `killed`) beside what the database says (`stories`)."""

    recorded: int
    broken: int
    rolled_back: int
    killed: Killed
    stories: tuple[Story, ...]
    thumbnails: Path

    @cached_property
    def completed(self) -> list[Story]:
        """Uploads whose job is done."""
        return [story for story in self.stories if story.state == "completed"]

    @cached_property
    def dead(self) -> list[Story]:
        """Uploads whose job is in the dead letters."""
        return [story for story in self.stories if story.state == "dead"]

    @cached_property
    def others(self) -> list[Story]:
        """Neither: there must be none."""
        return [story for story in self.stories if story.state not in ("completed", "dead")]

    @cached_property
    def rescued(self) -> list[Story]:
        """Uploads whose job was taken back from a worker that was gone."""
        return [story for story in self.stories if story.lost]

    @property
    def enqueued(self) -> int:
        """Jobs that exist or existed, by their ids."""
        return len({story.job_id for story in self.stories if story.job_id is not None})

    def total(self, count: str) -> int:
        """The sum of `attempts`, `lost` or `failed` over all stories."""
        return sum(getattr(story, count) for story in self.stories)

    def complaint(self) -> str | None:
        """The first sum that does not agree, as a sentence; None when all of them do."""
        return next(self._complaints(), None)

    def _complaints(self) -> Iterator[str]:
        yield from _unequal("uploads in the table", self._uploads(), "uploads recorded", self.recorded)
        if any(story.upload_id == self.rolled_back for story in self.stories):
            yield f"Upload {self.rolled_back} was rolled back, and the table still has it."
        yield from (f"Job {story.job_id} belongs to no upload." for story in self.stories if story.upload_id is None)
        yield from _unequal("jobs enqueued", self.enqueued, "uploads recorded", self.recorded)
        yield from (f"The job of upload {story.upload_id} is {story.state}." for story in self.others)
        settled = len(self.completed) + len(self.dead)
        yield from _unequal("jobs enqueued", self.enqueued, "jobs completed or dead", settled)
        yield from _unequal("dead letters", len(self.dead), "broken files uploaded", self.broken)
        explained = len(self.completed) + self.total("lost") + self.total("failed")
        yield from _unequal("attempts", self.total("attempts"), "runs that completed, failed or were lost", explained)
        # Not each of them: the word that one was done may have been on its way when its worker died.
        if not set(self.killed.held) & {story.upload_id for story in self.rescued}:
            held = ", ".join(map(str, self.killed.held))
            yield f"The killed worker held the jobs of uploads {held}, and none of them was rescued."
        yield from self._wrong_thumbnails()

    def _uploads(self) -> int:
        return len({story.upload_id for story in self.stories if story.upload_id is not None})

    def _wrong_thumbnails(self) -> Iterator[str]:
        named = {Path(story.file).name for story in self.stories if story.file}
        # A run that was killed while it wrote may leave its unfinished file, which has a dot in front.
        there = {path.name for path in self.thumbnails.glob("[!.]*")}
        if named != there:
            yield f"Thumbnails on disk and in the table differ by {', '.join(sorted(named ^ there))}."
        for story in self.completed:
            if not story.file or not is_thumbnail(Path(story.file)):
                yield f"Upload {story.upload_id} is completed and has no readable thumbnail."
        yield from (f"Upload {story.upload_id} is dead and has a thumbnail." for story in self.dead if story.file)


def read_stories(connection: psycopg.Connection[Any]) -> tuple[Story, ...]:
    """All stories, in the order of the uploads."""
    return tuple(Story(*row) for row in connection.execute(STORIES.encode()).fetchall())


def is_thumbnail(file: Path) -> bool:
    """Whether the file is a small square picture, readable to its end."""
    try:
        with Image.open(file) as image:
            image.load()
            return image.width == image.height
    except OSError:
        return False


def _unequal(left: str, found: int, right: str, expected: int) -> Sequence[str]:
    return [] if found == expected else [f"{found} {left}, but {expected} {right}."]

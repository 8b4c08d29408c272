"""What the demo prints: short lines, a progress bar on a terminal, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pgqueue.demo.audit import Audit, Story

QUARTERS = 4


class Display:
    """Prints to the terminal, or plain lines to whatever else the output is."""

    def __init__(self) -> None:
        # Not a terminal: lines as long as they are, for whoever searches them.
        self.console = Console(highlight=False, soft_wrap=True)

    def say(self, line: str) -> None:
        """One line of the story."""
        self.console.print(line, markup=False)

    def counter(self, title: str, total: int) -> Counter:
        """A progress bar, or a line each quarter where there is no terminal."""
        return Counter(self, title, total)

    def table(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """The sums."""
        self.console.print()
        if self.console.is_terminal:
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
            table.add_column(style="bold", no_wrap=True)
            table.add_column(justify="right", no_wrap=True)
            table.add_column(style="dim", overflow="fold")
            for row in rows:
                table.add_row(*map(Text, row))
            self.console.print(table)
        else:
            for name, value, made_of in rows:
                self.say(f"{name:<20}{value:>7}  {made_of}".rstrip())
        self.console.print()


class Counter:
    """How far something is; see Display.counter."""

    def __init__(self, display: Display, title: str, total: int) -> None:
        self._display = display
        self._title = title
        self._total = total
        self._said = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=display.console,
            disable=not display.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=total)

    def to(self, done: int) -> None:
        """`done` of the total are done."""
        self._bar.update(self._task, completed=done)
        quarter = done * QUARTERS // self._total
        if not self._display.console.is_terminal and quarter > self._said:
            self._said = quarter
            self._display.say(f"  {self._title}: {done} of {self._total}")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def sums(audit: Audit, *, workers: int, seconds: float) -> list[tuple[str, str, str]]:
    """The rows of the table: what, how many, and what that is made of."""
    completed, dead, others = len(audit.completed), len(audit.dead), len(audit.others)
    attempts, lost, failed = (audit.total(count) for count in ("attempts", "lost", "failed"))
    killed = audit.killed
    return [
        ("uploads recorded", str(audit.recorded), f"{audit.broken} of them a file that was cut in half"),
        ("uploads rolled back", "1", "no row and no job is left of it"),
        ("jobs enqueued", str(audit.enqueued), f"= {completed} completed + {dead} dead + {others} others"),
        ("attempts", str(attempts), f"= {completed} completed + {lost} lost with a worker + {failed} failed"),
        (
            "extra attempts",
            str(attempts - audit.enqueued),
            f"= {lost} after a rescue + {failed - dead} after a failure",
        ),
        ("jobs rescued", str(len(audit.rescued)), f"uploads {numbers(audit.rescued)}"),
        *(("dead letter", f"{story.attempts}x", f"upload {story.upload_id}: {story.reason}") for story in audit.dead),
        ("thumbnails", str(sum(story.file is not None for story in audit.stories)), "each of them read back from disk"),
        ("workers started", str(workers), f"worker {killed.number} (pid {killed.pid}) was killed"),
        ("wall time", f"{seconds:.1f} s", ""),
    ]


def numbers(stories: Iterable[Story]) -> str:
    """The uploads' numbers in a row."""
    return ", ".join(str(story.upload_id) for story in stories)

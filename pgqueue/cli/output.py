"""Tables for people, JSON for programs, both on stdout."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from io import StringIO
from typing import Any

from pgqueue.cli.errors import Unread
from pgqueue.failure import one_line

_CELL_BYTES = 300
_WIDE, _FOLDABLE = 100_000, 25


def write(text: str) -> None:
    """One or more lines on stdout."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise Unread from error  # before the parser of the command line takes it for its own affair


def note(text: str) -> None:
    """A line on stderr that is no result."""
    print(f"pgqueue: {one_line(text, 2000)}", file=sys.stderr, flush=True)


def note_hidden(rows: Sequence[Any]) -> None:
    """A line that says so where this database role may not read the payloads of these rows."""
    if any(row.hidden for row in rows):
        note(
            "arguments and errors are not shown: this database role may not read them"
            " (`pgqueue migrate --roles --with-payloads` lets the reader)"
        )


def write_json(items: Iterable[Any]) -> None:
    """An array; times in ISO 8601, everything outside of ASCII escaped, so that no terminal or locale can spoil it."""
    write(json.dumps([_plain(item) for item in items], default=_encode, indent=2))


def write_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Columns with a header. On a terminal long texts are folded to its width; elsewhere nothing is folded or cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    cells = [list(row) for row in rows]
    least = 0
    for place, header in enumerate(headers):
        numbers = all(isinstance(row[place], (int, float)) or row[place] is None for row in cells)
        needed = max([len(header), *(len(cell(row[place])) for row in cells)])
        folds = needed > _FOLDABLE and any(isinstance(row[place], str) for row in cells)
        table.add_column(header, justify="right" if numbers else "left", no_wrap=not folds, overflow="fold")
        least += (_FOLDABLE if folds else needed) + 2
    for row in cells:
        table.add_row(*(Text(cell(value)) for value in row))
    # Wider than a narrow terminal if need be: a wrapped line can be read, an id without its last digits cannot.
    width = max(least, shutil.get_terminal_size().columns) if terminal else _WIDE
    out = StringIO()
    Console(file=out, width=width, force_terminal=terminal, color_system=None, legacy_windows=False).print(table)
    write("\n".join(line.rstrip() for line in out.getvalue().splitlines()))
    if not cells:
        write("(none)")


def cell(value: Any) -> str:
    """A value as text on one line, nothing in it that a terminal would obey."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return one_line(str(value), _CELL_BYTES)


def decoded(text: str | None) -> Any:
    """A stored JSON text as a value; text that is no JSON as it is."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(item: Any) -> Any:
    return dataclasses.asdict(item) if dataclasses.is_dataclass(item) and not isinstance(item, type) else item


def _encode(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def without(item: Any, *names: str, **more: Any) -> Mapping[str, Any]:
    """A row as a mapping, some fields left out and others added."""
    return {**{name: value for name, value in _plain(item).items() if name not in names}, **more}

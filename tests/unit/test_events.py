"""Events: the documented table is the whole list, and a subscriber cannot harm the queue."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import pgqueue
from pgqueue.events import Bus, Event, EventName

ROOT = Path(__file__).parents[2]


def test_every_event_stands_in_the_documentation_and_is_emitted_somewhere() -> None:
    documented = re.findall(
        r"^\| `([\w.]+)` \|", (ROOT / "docs" / "events.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert documented == [name.value for name in EventName]
    code = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "pgqueue").rglob("*.py") if path.name != "events.py"
    )
    assert [name for name in EventName if f"EventName.{name.name}" not in code] == []


def test_a_subscriber_that_raises_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("broken subscriber")

    bus.subscribe(broken)
    unsubscribe = bus.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, "pgqueue"):
        bus.emit(EventName.JOBS_SETTLED, count=1)
    assert [dict(event.facts) for event in seen] == [{"count": 1}]
    assert "a subscriber failed" in caplog.text
    unsubscribe()
    bus.emit(EventName.JOBS_SETTLED, count=2)
    assert len(seen) == 1


def test_the_library_does_not_configure_the_hosts_logging() -> None:
    assert pgqueue.__name__ == "pgqueue"
    assert logging.getLogger("pgqueue").handlers == []

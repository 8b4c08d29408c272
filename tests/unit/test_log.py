"""The log: one event, one line, nothing forged, nothing secret."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pgqueue import log
from pgqueue.events import Bus, EventName
from pgqueue.outcome import OutcomeKind


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self.records]


@pytest.fixture
def records() -> Iterator[Records]:
    handler, level = Records(), log.logger.level
    log.logger.addHandler(handler)
    log.logger.setLevel(logging.DEBUG)
    yield handler
    log.logger.removeHandler(handler)
    log.logger.setLevel(level)


@pytest.fixture
def bus(records: Records) -> Bus:
    bus = Bus()
    log.subscribe_logging(bus)
    return bus


def test_every_event_has_its_words() -> None:
    assert set(log.EVENTS) | {EventName.JOB_FAILED} == set(EventName)


def test_every_outcome_of_a_raising_job_has_its_words() -> None:
    assert set(log.ATTEMPTS) == {kind.value for kind in OutcomeKind}


@pytest.mark.parametrize("name", EventName)
def test_one_event_is_one_line_even_without_facts(bus: Bus, records: Records, name: EventName) -> None:
    bus.emit(name)
    assert len(records.lines) == 1
    assert records.lines[0].isprintable()


@pytest.mark.parametrize("name", EventName)
def test_no_fact_can_forge_a_line(bus: Bus, records: Records, name: EventName) -> None:
    evil = "x\n2026-01-01 INFO forged\x1b[2J\u202e{0}%s" + "y" * 1_000_000
    facts = ("id", "task", "queue", "queues", "error", "detail", "loop", "worker", "during", "outcome")
    bus.emit(name, **dict.fromkeys(facts, evil), ids=[evil])
    [line] = records.lines
    assert line.isprintable()
    assert len(line) < 2000


def test_what_happens_a_thousand_times_a_second_is_logged_at_debug_only(bus: Bus, records: Records) -> None:
    for name in (EventName.JOBS_CLAIMED, EventName.JOB_STARTED, EventName.JOBS_SETTLED):
        bus.emit(name)
    assert {record.levelno for record in records.records} == {logging.DEBUG}


@pytest.mark.parametrize(
    ("outcome", "level", "words"),
    [
        ("retry", logging.WARNING, "failed with ValueError in attempt 2, again in 1.5 s"),
        ("dead", logging.ERROR, "failed with ValueError in attempt 2: dead letter"),
        ("snooze", logging.INFO, "snoozes for 1.5 s"),
        ("discard", logging.INFO, "was discarded"),
    ],
)
def test_a_failed_attempt_is_told_by_its_outcome(
    bus: Bus, records: Records, outcome: str, level: int, words: str
) -> None:
    bus.emit(EventName.JOB_FAILED, id=7, queue="q", task="t", attempt=2, outcome=outcome, error="ValueError", delay=1.5)
    [record] = records.records
    assert record.levelno == level
    assert record.getMessage().startswith("job 7 (t) on queue q ")
    assert words in record.getMessage()


def test_long_lists_are_cut(bus: Bus, records: Records) -> None:
    bus.emit(EventName.SETTLE_ABANDONED, ids=list(range(1, 101)))
    assert "1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 90 more" in records.lines[0]


def test_unsubscribing_ends_it(records: Records) -> None:
    bus = Bus()
    log.subscribe_logging(bus)()
    bus.emit(EventName.WORKER_STARTED)
    assert records.lines == []

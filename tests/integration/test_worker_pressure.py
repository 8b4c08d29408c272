"""Back-pressure: claims pause while outcomes pile up, and go on when they are written, not a poll later."""

from __future__ import annotations

import threading

import psycopg
import pytest

import pgqueue
from pgqueue.worker import claimer as claimer_module
from tests.waiting import wait_until
from tests.workers import PATIENCE, running, wait_for_count

JOBS = 12_000


def test_claims_go_on_when_the_outcomes_that_held_them_up_are_written(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer_module, "BACKLOG", 20)
    task = pq.task(name="work", queue="q")(lambda number: None)
    task.enqueue_many((number,) for number in range(JOBS))
    with psycopg.connect(database) as blocker:
        blocker.execute("LOCK TABLE pgqueue.archive IN EXCLUSIVE MODE")  # completions wait, claims do not
        with running(pq, poll=600.0, lease=60.0, concurrency=2) as watched:
            claimer, settler = watched.worker.claimer, watched.worker.settler

            def asleep() -> bool:
                return settler.backlog() > 20 and claimer._held_up and not claimer._wake.is_set()

            wait_until(asleep, PATIENCE, "claims are held up")
            assert settler.backlog() < JOBS
            blocker.rollback()
            wait_for_count(admin, JOBS, "archive", "state = 'completed'")


def test_an_item_that_comes_while_the_reader_falls_asleep_is_not_left_until_its_timeout() -> None:
    from pgqueue.worker.inbox import Inbox

    inbox: Inbox[int] = Inbox()
    taken: list[int] = []

    def read() -> None:
        while len(taken) < 4000:
            taken.extend(inbox.take(10, timeout=600.0))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    writers = [
        threading.Thread(target=lambda k=k: [inbox.put(1000 * k + n) for n in range(1000)], daemon=True)  # type: ignore[misc]
        for k in range(4)
    ]
    for writer in writers:
        writer.start()
    reader.join(PATIENCE)
    assert not reader.is_alive(), f"{4000 - len(taken)} items are not read"
    assert [sorted(taken)[0], sorted(taken)[-1], len(set(taken))] == [0, 3999, 4000]
    for k in range(4):
        own = [item for item in taken if item // 1000 == k]
        assert own == sorted(own)

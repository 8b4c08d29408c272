"""Operators who act on many jobs at once, twice, or on a job that runs: clear answers, and workers that go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from tests.acceptance.command_line import CommandLine
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

MANY = 100
BLOCKED = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
OUTCOMES: dict[str, Callable[[], None] | BaseException | None] = {
    "completes": None,
    "fails": ValueError("broken"),
    "is retried": pgqueue.Retry(delay=0),
    "snoozes": pgqueue.Snooze(0),
    "is discarded": pgqueue.Discard("no use"),
    "is dead-lettered": pgqueue.DeadLetter("hopeless"),
}


def enqueue(pq: pgqueue.PgQueue, number: int = MANY) -> list[int]:
    work = pq.tasks.get("work") or pq.task(name="work", queue="q")(lambda: None)
    return pq.run(pq.enqueue_many_op(work, work.defaults, [()] * number)[0])


def bury(pq: pgqueue.PgQueue, number: int = MANY) -> list[int]:
    ids = enqueue(pq, number)
    pq.fail(pq.claim("q", limit=number), pgqueue.DeadLetter("hopeless"))
    return ids


class Behind:
    """A call in a thread, over a connection of its own."""

    def __init__(self, database: str, act: Callable[[psycopg.Connection[Any]], Any]) -> None:
        self.connection = psycopg.connect(database)
        self.answers: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=[act])
        self.thread.start()

    def _run(self, act: Callable[[psycopg.Connection[Any]], Any]) -> None:
        with self.connection:
            try:
                self.answers.append(act(self.connection))
            except BaseException as error:
                self.answers.append(error)

    def blocked(self, admin: psycopg.Connection[Any]) -> None:
        pid = self.connection.info.backend_pid
        wait_until(lambda: admin.execute(BLOCKED, [pid]).fetchone() == (True,), PATIENCE, "it waits for the row")

    def answer(self) -> Any:
        self.thread.join(PATIENCE)
        [answer] = self.answers
        return answer


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_cancellation_of_many_waits_for_the_one_that_is_being_claimed_and_tells_what_became_of_each(
    ending: str, pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    ids = enqueue(pq)
    with psycopg.connect(database) as caller:
        [job] = pq.claim("q", using=caller)
        cancelling = Behind(database, lambda connection: pq.cancel(ids, using=connection))
        cancelling.blocked(admin)
        caller.commit() if ending == "commit" else caller.rollback()
    fate = "requested" if ending == "commit" else "cancelled"
    assert cancelling.answer() == {**dict.fromkeys(ids, "cancelled"), job.id: fate}
    assert count(admin, "archive", "state = 'cancelled'") == MANY - count(admin, "job")
    assert count(admin, "job", "cancel_requested") == count(admin, "job") == int(ending == "commit")


def test_the_second_of_two_cancellations_of_many_is_told_that_none_is_live(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    ids = enqueue(pq)
    with psycopg.connect(database) as first:
        assert pq.cancel(ids, using=first) == dict.fromkeys(ids, "cancelled")
        second = Behind(database, lambda connection: pq.cancel(ids[::-1], using=connection))
        second.blocked(admin)
        first.commit()
    assert second.answer() == {}
    assert count(admin, "archive") == MANY


def test_many_that_are_settled_but_for_one_that_was_deleted_are_settled_and_the_one_is_named(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    for settle in (
        pq.complete,
        pq.release,
        lambda jobs: pq.fail(jobs, "broken", delay=0),
        lambda jobs: pq.snooze(jobs, 9),
    ):
        enqueue(pq)
        jobs = pq.claim("q", limit=MANY)
        gone = jobs[MANY // 2]
        admin.execute("DELETE FROM pgqueue.job WHERE id = %s", [gone.id])
        with pytest.raises(pgqueue.LeaseLost) as caught:
            settle(jobs)
        assert caught.value.jobs == (gone,)
        assert count(admin, "job", f"id = {gone.id} OR lease_id IS NOT NULL") == 0
        assert count(admin, "lease") == 0
        assert count(admin, "job") + count(admin, "archive") == MANY - 1
        admin.execute("TRUNCATE pgqueue.job, pgqueue.archive")


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_redrive_of_many_passes_by_the_one_that_somebody_purges(
    ending: str, pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    ids = bury(pq)
    with psycopg.connect(database) as other:
        assert pq.purge(ids=ids[7], using=other) == 1
        assert pq.redrive(ids=ids) == [job_id for job_id in ids if job_id != ids[7]]
        other.commit() if ending == "commit" else other.rollback()
    assert count(admin, "job") == MANY - 1
    assert count(admin, "dead_letter") == int(ending == "rollback")


def test_two_redrives_of_everything_at_once_move_every_dead_letter_once(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    ids = bury(pq, 3000)
    both = [Behind(database, lambda connection: pq.redrive(using=connection)) for _ in range(2)]
    moved = [job_id for one in both for job_id in one.answer()]
    moved += pq.redrive()  # what was locked when the other looked, and came after its end
    assert sorted(moved) == ids
    assert (count(admin, "job"), count(admin, "dead_letter")) == (3000, 0)


def test_a_double_click_is_answered_with_a_sentence(
    pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    cli = CommandLine(tmp_path, database)
    [waiting] = enqueue(pq, 1)
    assert cli.json("cancel", str(waiting)) == [{"id": waiting, "result": "cancelled"}]
    status, output, errors = cli.run("cancel", str(waiting))
    assert (status, errors) == (1, "")
    assert "not live" in output
    [dead] = bury(pq, 1)
    assert "1 dead letter(s) are back in line" in cli.good("dead", "retry", str(dead))
    status, output, errors = cli.run("dead", "retry", str(dead))
    assert (status, output.strip()) == (1, "0 dead letter(s) are back in line")
    assert errors == f"pgqueue: no such dead letter: {dead}\n"
    pq.fail(pq.claim("q"), pgqueue.DeadLetter("hopeless"))
    with psycopg.connect(database) as other:
        assert pq.purge(ids=dead, using=other) == 1
        assert "somebody else is changing them" in cli.run("dead", "purge", str(dead))[2]
        status, _, errors = cli.run("dead", "retry", str(dead))
        assert (status, errors) == (1, f"pgqueue: somebody else is changing them, try again: {dead}\n")
        other.rollback()
    assert "1 dead letter(s) are deleted" in cli.good("dead", "purge", str(dead))
    assert count(admin, "job") == count(admin, "dead_letter") == 0


@pytest.mark.parametrize("outcome", list(OUTCOMES))
@pytest.mark.parametrize("colour", ["plain", "async"])
def test_a_job_that_was_deleted_while_it_ran_is_settled_nowhere_and_its_worker_goes_on(
    colour: str, outcome: str, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    def work(delete: int) -> None:
        if delete:
            admin.execute("DELETE FROM pgqueue.job WHERE id = %s", [pgqueue.current_job().id])
            error = OUTCOMES[outcome]
            if isinstance(error, BaseException):
                raise error

    task = define(pq, colour, work)
    with running(pq, poll=0.2) as watched:
        gone = task.enqueue(1)
        lost = watched.wait_for(EventName.LEASE_LOST)
        assert (lost.facts["ids"], lost.facts["during"]) == ([gone], "settle")
        after = task.enqueue(0)
        wait_for_count(admin, 1, "archive", f"id = {after}")
        wait_for_count(admin, 0, "lease")
        assert not watched.seen(EventName.JOBS_SETTLED, ids=[gone])
        assert not watched.seen(EventName.LOOP_FAILED)
    assert watched.status == 0
    assert count(admin, "job") == count(admin, "dead_letter") == 0
    assert count(admin, "archive") == 1


def test_a_lease_whose_every_job_was_deleted_is_gone_after_its_end(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    enqueue(pq, 3)
    pq.claim("q", limit=3)
    admin.execute("DELETE FROM pgqueue.job")
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    assert not any(pq.rescue("q"))
    assert count(admin, "lease") == 0

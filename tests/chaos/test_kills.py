"""Real worker processes, really killed, stopped and cut off: nothing is lost, and each extra run is accounted for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import embedded, migrate
from tests.chaos.app import TRACES
from tests.chaos.processes import Workers, workers
from tests.conftest import FAST
from tests.waiting import wait_until

LEASE = 4.0
SLACK = 20.0
"""Seconds over the lease that a busy machine may take; an idle one needs about one."""
PATIENCE = 60.0
MOST_KILLS = 30
"""What was lost runs in child processes, and a busy machine may need longer to start one than a worker lives here."""


def rows(url: str, statement: str, *params: Any) -> list[tuple[Any, ...]]:
    """One statement on a connection of its own; an empty answer while the server is away."""
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []
    except psycopg.OperationalError:
        return []


def number(url: str, table: str, where: str = "true") -> int:
    """How many rows; -1 while the server is away."""
    found = rows(url, f"SELECT count(*) FROM {table} WHERE {where}")
    return found[0][0] if found else -1


@pytest.fixture
def fleet(database: str, admin: psycopg.Connection[Any], tmp_path: Path) -> Iterator[Workers]:
    admin.execute(TRACES.encode())
    with workers(database, tmp_path) as started:
        yield started


def enqueue(pq: pgqueue.PgQueue, task: str, *args: Any, **options: Any) -> int:
    return pq.enqueue(task, args, queue="chaos", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "end"),
    [([1], "completed"), ([2], "completed"), ([3], "dead"), ([1, 2, 3], "dead")],
    ids=["the first attempt", "a middle attempt", "the last attempt", "every attempt"],
)
def test_a_job_that_kills_its_worker_is_tried_again_or_buried(
    deaths: list[int], end: str, pq: pgqueue.PgQueue, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    job_id = enqueue(pq, "deadly", deaths, max_attempts=3)
    others = [enqueue(pq, "steady", 0.01) for _ in range(5)]

    def over() -> bool:
        fleet.keep(2, lease=LEASE)
        table = "archive" if end == "completed" else "dead_letter"
        found = admin.execute(f"SELECT 1 FROM pgqueue.{table} WHERE id = %s".encode(), [job_id]).fetchone()
        return found is not None

    wait_until(over, PATIENCE, f"job {job_id} is {end}")
    wait_until(
        lambda: number(fleet.database, "pgqueue.archive", "task = 'steady'") == 5, PATIENCE, "the others have run"
    )
    assert len(others) == 5

    starts = admin.execute("SELECT attempt, at FROM trace WHERE job_id = %s AND what = 'start' ORDER BY at", [job_id])
    times = dict(starts.fetchall())
    # A death before the start of the handler cannot happen here: only the job itself kills.
    assert list(times) == list(range(1, (max(deaths) if end == "dead" else max(deaths) + 1) + 1))
    if end == "dead":
        [(attempt, lost, reason, died_at)] = admin.execute(
            "SELECT attempt, lost, reason, died_at FROM pgqueue.dead_letter"
        ).fetchall()
        # A job that was lost runs in a child process from then on: it takes a worker with it once.
        assert (attempt, lost, reason) == (3, 1, "worker lost")
        times[4] = died_at
    else:
        assert admin.execute("SELECT attempt, lost FROM pgqueue.archive WHERE id = %s", [job_id]).fetchall() == [
            (max(deaths) + 1, len(deaths))
        ]
    waits = [(times[death + 1] - times[death]).total_seconds() for death in deaths]
    print(f"\nkilled in attempt {deaths}: back after {', '.join(f'{wait:.2f}' for wait in waits)} s, lease {LEASE:g} s")
    assert max(waits) < LEASE + SLACK


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_thousand_jobs_none_is_lost_while_a_worker_is_killed_every_second(
    pq: pgqueue.PgQueue, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    task = pq.task(name="steady", queue="chaos")(lambda seconds: None)
    ids = task.enqueue_many([(0.05,)] * 1000)
    kills = 0
    began = time.monotonic()
    next_kill = began + 1.5

    def done() -> bool:
        nonlocal kills, next_kill
        if time.monotonic() >= next_kill and kills < MOST_KILLS:
            victim = fleet.alive()[0]  # the oldest: it has had the time to take jobs
            victim.kill()
            victim.wait()
            kills += 1
            next_kill = time.monotonic() + 1.0
        fleet.keep(2, lease=LEASE, concurrency=5)
        return number(fleet.database, "pgqueue.job") == 0

    wait_until(done, 240, "every job has ended")
    seconds = time.monotonic() - began
    assert sorted(job_id for (job_id,) in admin.execute("SELECT id FROM pgqueue.archive").fetchall()) == ids
    assert number(fleet.database, "pgqueue.dead_letter") == 0
    # Every attempt but the last was lost with its worker, none was lost otherwise.
    assert number(fleet.database, "pgqueue.archive", "attempt <> lost + 1 OR state <> 'completed'") == 0
    # Each attempt was started at most once and under its own token, and later ones have larger tokens.
    assert (
        admin.execute(
            "SELECT job_id, attempt FROM trace WHERE what = 'start' GROUP BY job_id, attempt HAVING count(*) > 1"
        ).fetchall()
        == []
    )
    assert (
        admin.execute(
            "SELECT a.job_id FROM trace AS a JOIN trace AS b USING (job_id, what)"
            " WHERE what = 'start' AND a.attempt < b.attempt AND a.token >= b.token"
        ).fetchall()
        == []
    )
    [(starts, ends, attempts, lost)] = admin.execute(
        "SELECT (SELECT count(*) FROM trace WHERE what = 'start'), (SELECT count(*) FROM trace WHERE what = 'end'),"
        " sum(attempt), sum(lost) FROM pgqueue.archive"
    ).fetchall()
    # The attempt that completed was started and has ended; every other start is one of the lost attempts.
    assert (
        admin.execute(
            "SELECT id FROM pgqueue.archive AS a WHERE 2 <> ("
            " SELECT count(*) FROM trace AS t WHERE t.job_id = a.id AND t.attempt = a.attempt)"
        ).fetchall()
        == []
    )
    assert 1000 <= ends <= starts <= attempts == 1000 + lost
    assert kills >= 3
    print(
        f"\n1000 jobs, {kills} workers killed in {seconds:.1f} s: {starts} starts, {ends} ends, {lost} attempts lost, "
        f"{attempts - starts} of them before their start"
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while the new owner works", "after the new owner has finished"])
def test_a_worker_that_was_stopped_for_longer_than_its_lease_changes_nothing_when_it_goes_on(
    moment: str, pq: pgqueue.PgQueue, fleet: Workers, admin: psycopg.Connection[Any]
) -> None:
    job_id = enqueue(pq, "gated", max_attempts=5)
    first = fleet.start(lease=LEASE, concurrency=1)
    wait_until(lambda: number(fleet.database, "trace", "what = 'start'") == 1, PATIENCE, "the job has started")
    first.send_signal(signal.SIGSTOP)
    [job] = wait_until(lambda: pq.claim("chaos", lease=600), PATIENCE, "another owner has the job")
    assert (job.id, job.attempt, job.lost) == (job_id, 2, 1)
    if moment == "after the new owner has finished":
        pq.complete(job)
    story = (
        "SELECT id, attempt, lost, lease_id FROM pgqueue.job UNION ALL SELECT id, attempt, lost, 0 FROM pgqueue.archive"
    )
    before = (
        admin.execute(story.encode()).fetchall(),
        admin.execute("SELECT id, expires_at FROM pgqueue.lease").fetchall(),
    )
    admin.execute("INSERT INTO gate VALUES ('open')")
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: number(fleet.database, "trace", "what = 'end' AND attempt = 1"), PATIENCE, "the late one ends")
    # It lives, it has had its say, and it works on.
    later = enqueue(pq, "steady", 0.0)
    wait_until(lambda: number(fleet.database, "pgqueue.archive", f"id = {later}") == 1, PATIENCE, "it works on")
    admin.execute("DELETE FROM pgqueue.archive WHERE id = %s", [later])
    after = (
        admin.execute(story.encode()).fetchall(),
        admin.execute("SELECT id, expires_at FROM pgqueue.lease").fetchall(),
    )
    assert after == before
    assert number(fleet.database, "pgqueue.dead_letter") == 0
    if moment == "while the new owner works":
        pq.complete(job)
    first.terminate()
    assert first.wait(PATIENCE) == 0


# The server itself goes away: on a server of the test's own.


class Own:
    """A private server that a test may stop and start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = embedded.start(folder, options=FAST)
        self.url = self.server.url
        migrate.upgrade(self.url, schema="pgqueue")
        rows(self.url, TRACES)

    def postmaster(self) -> int:
        return int((self.server.data / "postmaster.pid").read_text().split("\n", 1)[0])

    def crash_children(self) -> None:
        """Kill one of the server's processes: it takes all others with it, and recovers."""
        [(pid,)] = rows(
            self.url,
            "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() LIMIT 1",
        )
        os.kill(pid, signal.SIGKILL)

    def stop(self, how: signal.Signals) -> None:
        """SIGINT: orderly; SIGQUIT: at once, as `pg_ctl stop -m immediate`."""
        os.kill(self.postmaster(), how)
        gone = lambda: not (self.server.data / "postmaster.pid").exists() or how is signal.SIGQUIT  # noqa: E731
        wait_until(gone, PATIENCE, "the server has stopped")

    def start(self) -> None:
        """The same server again; a second use of it, which ends with the first."""
        embedded.start(self.folder, options=FAST).stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Own]:
    started = Own(tmp_path / "postgres")
    try:
        yield started
    finally:
        started.server.stop()


@pytest.mark.slow
def test_no_job_is_lost_when_the_server_crashes_and_restarts_under_busy_workers(own: Own, tmp_path: Path) -> None:
    with workers(own.url, tmp_path) as fleet, pgqueue.PgQueue(own.url) as pq:
        task = pq.task(name="steady", queue="chaos")(lambda seconds: None)
        ids = task.enqueue_many([(0.02,)] * 600)
        both = [fleet.start(lease=3.0), fleet.start(lease=3.0)]
        # One that starts while the server is away says so and leaves: that is for whoever supervises it.
        wait_until(lambda: number(own.url, "pgqueue.worker") == 2, PATIENCE, "both workers have started")

        def progress(more: int) -> None:
            before = max(0, number(own.url, "pgqueue.archive"))
            enough = min(600, before + more)
            wait_until(lambda: number(own.url, "pgqueue.archive") >= enough, PATIENCE, f"{enough} jobs are done")

        progress(50)
        own.crash_children()
        progress(50)
        own.stop(signal.SIGQUIT)
        own.start()
        progress(50)
        own.stop(signal.SIGINT)
        own.start()
        wait_until(lambda: number(own.url, "pgqueue.job") == 0, PATIENCE, "every job has ended")
        assert sorted(job_id for (job_id,) in rows(own.url, "SELECT id FROM pgqueue.archive")) == ids
        assert number(own.url, "pgqueue.dead_letter") == 0
        assert [process.poll() for process in both] == [None, None]
        [(starts, lost)] = rows(
            own.url, "SELECT (SELECT count(*) FROM trace WHERE what = 'start'), sum(lost) FROM pgqueue.archive"
        )
        print(f"\n600 jobs over three crashes and stops of the server: {starts} starts, {lost} attempts lost")
        for process in both:
            process.terminate()
            assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_completion_that_falls_into_three_seconds_without_a_server_is_stored_and_not_run_again(
    own: Own, tmp_path: Path
) -> None:
    with workers(own.url, tmp_path) as fleet, pgqueue.PgQueue(own.url) as pq:
        worker = fleet.start(lease=30.0)
        ids = [enqueue(pq, "blind", 1.0) for _ in range(5)]
        wait_until(lambda: number(own.url, "trace") == 5, PATIENCE, "all have started")
        own.stop(signal.SIGINT)
        away = time.monotonic()
        wait_until(lambda: time.monotonic() - away > 3.0, PATIENCE, "the server has been away")
        own.start()
        wait_until(lambda: number(own.url, "pgqueue.archive") == 5, PATIENCE, "all are completed")
        assert rows(own.url, "SELECT DISTINCT attempt, lost, state FROM pgqueue.archive") == [(1, 0, "completed")]
        assert sorted(job_id for (job_id,) in rows(own.url, "SELECT job_id FROM trace")) == ids
        worker.terminate()
        assert worker.wait(PATIENCE) == 0

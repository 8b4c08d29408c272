"""Progress: said as often as a handler likes, written seldom, the last word always, and gone with the job."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import result as result_ops
from pgqueue.ops.result import Report
from tests.waiting import wait_until
from tests.workers import PATIENCE, count, define, running, wait_for_count

Admin = psycopg.Connection[Any]


class Told:
    """Handlers that report what the test says, and end when it says so."""

    def __init__(self) -> None:
        self.job: pgqueue.CurrentJob | None = None
        self.end = threading.Event()

    def __call__(self) -> None:
        self.job = pgqueue.current_job()
        self.end.wait(PATIENCE)

    def started(self) -> pgqueue.CurrentJob:
        return wait_until(lambda: self.job, PATIENCE, "the handler runs")  # type: ignore[return-value]


def says(pq: pgqueue.PgQueue, job_id: int, message: str) -> pgqueue.Progress:
    return wait_until(
        lambda: (said := pq.progress(job_id)) is not None and said.message == message and said, PATIENCE, message
    )  # type: ignore[return-value]


@pytest.mark.parametrize("end", ["completes", "fails"])
def test_what_a_handler_reports_is_seen_and_gone_with_the_job(end: str, pq: pgqueue.PgQueue, admin: Admin) -> None:
    told = Told()

    def body() -> None:
        told()
        if end == "fails":
            raise ValueError

    job_id = define(pq, "plain", body, retry=pgqueue.Fixed(3600)).enqueue()
    with running(pq):
        job = told.started()
        assert pq.progress(job_id) is None
        job.progress(40, "resized")
        said = says(pq, job_id, "resized")
        assert (said.percent, said.attempt) == (40.0, 1)
        assert said.updated_at is not None
        job.progress(message="no percentage\n")
        assert says(pq, job_id, "no percentage\\n").percent is None
        told.end.set()
        if end == "completes":
            wait_for_count(admin, 1, "archive")
            assert pq.progress(job_id) is None
        else:
            wait_for_count(admin, 1, "job", "run_at IS NOT NULL")
            assert pq.progress(job_id) is not None, "the last attempt's words stay while the job lives"


def test_many_reports_are_few_writes_and_the_last_is_among_them(pq: pgqueue.PgQueue, admin: Admin) -> None:
    admin.execute("CREATE TABLE written (at timestamptz DEFAULT clock_timestamp())")
    admin.execute(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN INSERT INTO written DEFAULT VALUES; RETURN NULL; END'"
    )
    admin.execute("CREATE TRIGGER note AFTER INSERT OR UPDATE ON pgqueue.progress FOR EACH ROW EXECUTE FUNCTION note()")
    told = Told()
    job_id = define(pq, "plain", told).enqueue()
    with running(pq):
        job = told.started()
        for number in range(20_000):
            job.progress(number / 200, str(number))
        assert says(pq, job_id, "19999").percent == 19999 / 200
        row = admin.execute("SELECT count(*), extract(epoch FROM max(at) - min(at))::float8 FROM written").fetchone()
        assert row is not None
        writes, seconds = row
        assert writes <= 2 + seconds / 0.45
        told.end.set()


def test_what_is_said_just_before_the_worker_stops_is_written(pq: pgqueue.PgQueue) -> None:
    job_id = define(pq, "plain", lambda: None).enqueue()
    [job] = pq.claim("q")
    with running(pq, queues=["other"]) as watched:
        watched.worker.reporter.put(job, 1.0, "")
        wait_until(lambda: pq.progress(job_id) is not None, PATIENCE, "the first one is written")
        watched.worker.reporter.put(job, 99.0, "")  # not due yet
    said = pq.progress(job_id)
    assert said is not None
    assert said.percent == 99.0


def test_a_report_of_an_attempt_that_is_over_changes_nothing(pq: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = pq.enqueue("t", queue="q")
    [old] = pq.claim("q")
    pq.run(result_ops.write_progress("q", [Report(job_id, old.token, 10, "old")]))
    pq.release(old)
    pq.run(result_ops.write_progress("q", [Report(job_id, old.token, 20, "too late")]))
    said = pq.progress(job_id)
    assert said is not None
    assert said.message == "old"
    [new] = pq.claim("q")
    both = [Report(job_id, new.token, 5, "new"), Report(job_id, old.token, 30, "far too late")]
    pq.run(result_ops.write_progress("q", both))
    pq.run(result_ops.write_progress("q", [Report(job_id, old.token, 40, "far too late")]))
    said = pq.progress(job_id)
    assert said is not None
    assert (said.message, said.percent, said.attempt) == ("new", 5.0, 1)
    pq.complete(new)
    pq.run(result_ops.write_progress("q", [Report(job_id, new.token, 99, "gone")]))
    assert pq.progress(job_id) is None


def test_a_report_that_was_long_on_its_way_does_not_cover_that_of_the_next_attempt(
    pq: pgqueue.PgQueue, database: str, admin: Admin
) -> None:
    job_id = pq.enqueue("t", queue="q")
    [old] = pq.claim("q")
    pq.run(result_ops.write_progress("q", [Report(job_id, old.token, 10, "first")]))
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgqueue.progress FOR UPDATE")
        late = threading.Thread(
            target=lambda: pq.run(result_ops.write_progress("q", [Report(job_id, old.token, 20, "late")]))
        )
        late.start()
        waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(lambda: admin.execute(waits).fetchone(), PATIENCE, "the late report waits, its token seen as good")
        pq.release(old)
        [new] = pq.claim("q")
        pq.run(result_ops.write_progress("q", [Report(job_id, new.token, 5, "new")]), other)
        other.commit()
        late.join(PATIENCE)
    said = pq.progress(job_id)
    assert said is not None
    assert said.message == "new"


def test_reports_do_not_touch_the_row_of_the_job(pq: pgqueue.PgQueue, admin: Admin) -> None:
    job_id = pq.enqueue("t", queue="q")
    [job] = pq.claim("q")
    before = admin.execute("SELECT ctid, xmin FROM pgqueue.job").fetchall()
    for number in range(50):
        pq.run(result_ops.write_progress("q", [Report(job_id, job.token, number, "")]))
    assert admin.execute("SELECT ctid, xmin FROM pgqueue.job").fetchall() == before
    assert count(admin, "progress") == 1


def test_a_worker_writes_progress_of_many_jobs_though_its_connection_breaks(pq: pgqueue.PgQueue, admin: Admin) -> None:
    go = threading.Event()
    jobs: list[pgqueue.CurrentJob] = []

    def body() -> None:
        jobs.append(pgqueue.current_job())
        go.wait(PATIENCE)

    ids = define(pq, "plain", body).enqueue_many([() for _ in range(10)])
    with running(pq) as watched:
        wait_until(lambda: len(jobs) == 10, PATIENCE, "all run")
        assert watched.worker.reporter.link._connection is None, "nobody reports: no connection"
        for job in jobs:
            job.progress(1, "first")
        for job_id in ids:
            says(pq, job_id, "first")
        connection = watched.worker.reporter.link._connection
        assert connection is not None
        admin.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
        for job in jobs:
            job.progress(2, "second")
        for job_id in ids:
            says(pq, job_id, "second")
        go.set()


@pytest.mark.parametrize("percent", [-1, 101, float("nan"), "5", True])
def test_a_percentage_that_is_none_is_refused(percent: Any, pq: pgqueue.PgQueue) -> None:
    told = Told()
    define(pq, "plain", told).enqueue()
    with running(pq):
        job = told.started()
        with pytest.raises(pgqueue.ConfigurationError, match="percent"):
            job.progress(percent)
        told.end.set()

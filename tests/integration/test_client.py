"""The clients on their own connections: bulk, order, refusals, notifications, forks and lost servers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import psycopg
import pytest

import pgqueue
from tests.callers import sqlalchemy_url


@pytest.fixture
def work(pq: pgqueue.PgQueue) -> pgqueue.Task[[int], None]:
    @pq.task(name="work", queue="q", max_attempts=3)
    def work(number: int) -> None: ...

    return work


def count(admin: psycopg.Connection[Any], what: str) -> int:
    row = admin.execute(f"SELECT count(*) FROM pgqueue.{what}".encode()).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.parametrize("size", [0, 1, 20_000])
def test_bulk_ids_follow_the_order_of_the_input(
    size: int, work: pgqueue.Task[[int], None], admin: psycopg.Connection[Any]
) -> None:
    ids = work.enqueue_many((number,) for number in range(size))
    assert len(ids) == size
    rows = admin.execute("SELECT id, (args->>0)::int, position FROM pgqueue.job ORDER BY id").fetchall()
    assert [row[0] for row in rows] == ids
    assert [row[1] for row in rows] == list(range(size))
    assert [row[2] for row in rows] == ids


def test_a_bulk_with_one_bad_call_leaves_nothing(
    work: pgqueue.Task[[int], None], admin: psycopg.Connection[Any]
) -> None:
    with pytest.raises(pgqueue.PayloadError, match=r"args\[0\]"):
        work.enqueue_many((float("nan") if number == 11_000 else number,) for number in range(12_000))
    with pytest.raises(pgqueue.ArgumentsDoNotBind):
        work.enqueue_many([(1,), (1, 2)])
    with pytest.raises(pgqueue.ConfigurationError, match="tuples"):
        work.enqueue_many([(1,), "text"])  # type: ignore[list-item]
    assert count(admin, "job") == 0


def test_a_bulk_takes_keywords_too(work: pgqueue.Task[[int], None], pq: pgqueue.PgQueue) -> None:
    work.enqueue_many([{"number": 5}, [6]])
    assert [(job.args, job.kwargs) for job in pq.claim("q", limit=2)] == [([], {"number": 5}), ([6], {})]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_jobs_from_a_generator_need_little_memory(database: str, admin: psycopg.Connection[Any]) -> None:
    script = """
        import resource, sys, pgqueue
        pq = pgqueue.PgQueue(sys.argv[1])
        task = pq.task(name="work", queue="q")(lambda number, text: None)
        task.enqueue_many([(0, "")] * 10_000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ids = task.enqueue_many((number, "x" * 40) for number in range(1_000_000))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert len(ids) == 1_000_000 and ids == sorted(ids)
        print(grown // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), database],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    # The list of a million ids alone takes about 40 MB; the jobs themselves would take 300 MB and more.
    assert int(done.stdout) < 120
    assert count(admin, "job") == 1_010_000


def test_jobs_run_in_the_order_of_priority_and_then_of_arrival(
    work: pgqueue.Task[[int], None], pq: pgqueue.PgQueue
) -> None:
    for number, priority in enumerate((0, -100, 100, 0, 5, 100)):
        work.options(priority=priority).enqueue(number)
    assert [job.args[0] for job in pq.claim("q", limit=4)] == [2, 5, 4, 0]
    work.options(priority=7).enqueue(6)
    assert [job.args[0] for job in pq.claim("q", limit=4)] == [6, 3, 1]


def test_a_late_commit_with_an_earlier_place_is_found_at_once(
    work: pgqueue.Task[[int], None], pq: pgqueue.PgQueue, database: str
) -> None:
    with psycopg.connect(database) as slow:
        early = work.enqueue(1, using=slow)
        later = work.enqueue_many([(2,), (3,)])
        assert [job.id for job in pq.claim("q", limit=2)] == later
        slow.commit()
    assert [job.id for job in pq.claim("q", limit=1)] == [early]


def test_a_bulk_notifies_once_and_only_at_commit(work: pgqueue.Task[[int], None], database: str) -> None:
    with psycopg.connect(database, autocommit=True) as listener, psycopg.connect(database) as caller:
        listener.execute("LISTEN pgqueue")
        work.enqueue_many([(number,) for number in range(12_000)], using=caller)
        work.enqueue(1, using=caller)
        assert list(listener.notifies(timeout=0.2)) == []
        caller.commit()
        got = list(listener.notifies(timeout=30, stop_after=1)) + list(listener.notifies(timeout=0.1))
        assert [(note.channel, note.payload) for note in got] == [("pgqueue", "q")]
        work.options(delay=3600).enqueue(2)
        assert list(listener.notifies(timeout=0.2)) == []


def test_notifications_can_be_switched_off(database: str) -> None:
    with (
        pgqueue.PgQueue(database, notify=False) as quiet,
        psycopg.connect(database, autocommit=True) as listener,
    ):
        listener.execute("LISTEN pgqueue")
        quiet.enqueue("anything", [1], queue="q")
        assert list(listener.notifies(timeout=0.2)) == []


def test_empty_calls_do_nothing(pq: pgqueue.PgQueue) -> None:
    pq.complete([])
    pq.fail([], "x")
    pq.release([])
    pq.extend([], 10)
    assert pq.cancel([]) == {}
    assert pq.claim([], limit=5) == []
    assert pq.redrive(ids=[]) == []
    assert pq.purge(ids=[]) == 0


def test_one_call_settles_jobs_of_several_queues(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    for queue in ("a", "b", "a"):
        pq.enqueue("anything", [queue], queue=queue)
    jobs = pq.claim(["b", "a"], limit=10)
    assert [job.queue for job in jobs] == ["b", "a", "a"]
    pq.complete(jobs)
    assert count(admin, "archive") == 3
    assert count(admin, "lease") == 0


def test_the_archive_can_be_switched_off(database: str, admin: psycopg.Connection[Any]) -> None:
    with pgqueue.PgQueue(database, archive=False) as pq:
        pq.enqueue("anything", queue="q")
        pq.complete(pq.claim("q"))
    assert count(admin, "job") == count(admin, "archive") == 0


def test_a_pause_stops_claims_and_a_resume_wakes_workers(pq: pgqueue.PgQueue, database: str) -> None:
    pq.enqueue("anything", queue="q")
    pq.pause("q")
    assert pq.claim("q") == []
    assert pq.status(["q"])[0].paused_at is not None
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("LISTEN pgqueue")
        assert pq.resume("q")
        assert [note.payload for note in listener.notifies(timeout=30, stop_after=1)] == ["q"]
    assert len(pq.claim("q")) == 1


def test_dead_letters_are_selected_counted_redriven_and_purged(pq: pgqueue.PgQueue) -> None:
    for number in range(6):
        pq.enqueue(f"task{number % 2}", [number], queue="q", max_attempts=1)
    jobs = pq.claim("q", limit=6)
    pq.fail(jobs, "broken")
    assert pq.count_dead_letters(task="task1") == 3
    assert len(pq.redrive(task="task1", limit=2)) == 2
    assert pq.purge(task="task0", older_than=3600) == 0
    assert pq.purge(task="task0") == 3
    [left] = pq.dead_letters()
    assert (left.task, left.attempt, left.reason) == ("task1", 1, "pgqueue.outcome.Failed: broken")


def test_an_expired_claim_is_taken_back_by_the_next_claim(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    pq.enqueue("anything", queue="q", max_attempts=2)
    [first] = pq.claim("q", lease=30)
    admin.execute("UPDATE pgqueue.lease SET expires_at = now() - interval '1 second'")
    with pgqueue.PgQueue(pq.settings.database_url) as other:
        [second] = other.claim("q", lease=30)
    assert (second.attempt, second.lost) == (2, 1)
    assert second.token > first.token
    with pytest.raises(pgqueue.LeaseLost):
        pq.complete(first)


def test_an_orphan_whose_lease_row_is_gone_is_adopted_and_rescued(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    from pgqueue.ops import rescue

    pq.enqueue("anything", queue="q")
    [job] = pq.claim("q", lease=3600)
    admin.execute("DELETE FROM pgqueue.lease")
    assert pq.rescue("q").returned == []
    assert pq.run(rescue.adopt("q")) == [job.id]
    assert pq.rescue("q").returned == [job.id]
    assert pq.run(rescue.adopt("q")) == []


def test_ids_beyond_two_billion_and_beyond_fifty_three_bits_work(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    for start in (2**31 - 2, 2**53):
        for sequence in ("job_id_seq", "lease_tie_seq", "worker_id_seq"):
            admin.execute(f"SELECT setval('pgqueue.{sequence}', {start})".encode())
        ids = [pq.enqueue("anything", [n], queue="q", max_attempts=1) for n in range(5)]
        assert ids[0] == start + 1
        jobs = pq.claim("q", limit=5)
        pq.extend(jobs, 60)
        pq.complete(jobs[:2])
        pq.fail(jobs[2:], "x")
        assert pq.redrive(ids=[ids[2]]) == [ids[2]]
        assert pq.cancel(ids[2]) == {ids[2]: "cancelled"}
        assert pq.purge() == 2


class Impostor:
    """Something that only looks like a connection."""

    def execute(self, *_: object) -> None: ...


async def test_connections_of_the_wrong_kind_are_refused_in_one_sentence(database: str, pq: pgqueue.PgQueue) -> None:
    import asyncpg
    import sqlalchemy
    from sqlalchemy.ext.asyncio import create_async_engine

    asynchronous = pgqueue.AsyncPgQueue(database)
    with pytest.raises(pgqueue.UnsupportedConnection, match="Impostor"):
        pq.enqueue("anything", using=Impostor())
    with pytest.raises(pgqueue.UnsupportedConnection, match="str"):
        await asynchronous.enqueue("anything", using="postgresql:///x")
    async with await psycopg.AsyncConnection.connect(database) as connection:
        with pytest.raises(pgqueue.UnsupportedConnection, match="AsyncPgQueue"):
            pq.enqueue("anything", using=connection)
    with psycopg.connect(database) as sync, pytest.raises(pgqueue.UnsupportedConnection, match="synchronous"):
        await asynchronous.enqueue("anything", using=sync)
    engine = create_async_engine(sqlalchemy_url(database, "asyncpg"))
    async with engine.connect() as on_asyncpg:
        with pytest.raises(pgqueue.UnsupportedConnection, match="asyncpg"):
            await asynchronous.enqueue("anything", using=(await on_asyncpg.get_raw_connection()).driver_connection)
        with pytest.raises(pgqueue.UnsupportedConnection, match="AsyncPgQueue"):
            pq.enqueue("anything", using=on_asyncpg)
    await engine.dispose()
    assert asyncpg.__version__
    assert sqlalchemy.__version__
    await asynchronous.close()


def test_a_terminated_connection_of_the_pool_does_not_fail_the_next_call(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    pq.enqueue("anything", queue="q")
    for _ in range(3):
        admin.execute(
            "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue'"
        )
        pq.enqueue("anything", queue="q")
    assert count(admin, "job") == 4


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_forked_child_has_connections_of_its_own(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    pq.enqueue("parent", queue="q")
    children = []
    for number in range(3):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for _ in range(20):
                    pq.enqueue(f"child{number}", queue="q")
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    for _ in range(20):
        pq.enqueue("parent", queue="q")
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    pq.enqueue("parent", queue="q")
    assert count(admin, "job") == 82


@pytest.mark.parametrize(
    ("url", "error", "sentence"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/x", pgqueue.DatabaseUnavailable, "127.0.0.1"),
        ("nonsense hunter2", pgqueue.ConfigurationError, "cannot be read"),
        ("postgresql://u:hunter2@[bad", pgqueue.ConfigurationError, "cannot be read"),
    ],
)
def test_a_wrong_database_url_is_one_sentence_without_the_password(
    url: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence) as caught:
        pgqueue.PgQueue(url).status()
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_schema_says_what_to_run(empty_database: str) -> None:
    with pgqueue.PgQueue(empty_database) as pq, pytest.raises(pgqueue.SchemaError, match="pgqueue migrate"):
        pq.enqueue("anything")


def test_a_read_only_server_is_one_sentence(pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    row = admin.execute("SELECT current_database()").fetchone()
    assert row is not None
    admin.execute(f'ALTER DATABASE "{row[0]}" SET default_transaction_read_only = on'.encode())
    with pytest.raises(pgqueue.DatabaseUnavailable, match="accepts no writes"):
        pq.enqueue("anything")


def test_two_installs_in_one_database_do_not_see_each_other(database: str) -> None:
    from pgqueue import migrate

    migrate.upgrade(database, schema="other")
    with pgqueue.PgQueue(database) as one, pgqueue.PgQueue(database, schema="other") as two:
        one.enqueue("anything", queue="q")
        assert two.claim("q") == []
        assert two.status() == []
        two.enqueue("anything", queue="q")
        assert len(one.claim("q", limit=9)) == 1


async def test_the_async_client_shares_a_pool_between_tasks(database: str) -> None:
    import asyncio

    async with pgqueue.AsyncPgQueue(database, pool_size=2) as pq:
        work = pq.task(name="work", queue="q")(lambda number: None)
        ids = await asyncio.gather(*(work.enqueue(number) for number in range(50)))
        assert len(set(ids)) == 50
        jobs = await pq.claim("q", limit=50)
        assert len(jobs) == 50
        await pq.complete(jobs)
        assert await pq.status() == []


def test_rows_with_infinite_times_neither_break_claims_nor_lists(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    for created, run in (("infinity", None), ("-infinity", "-infinity"), ("20000-01-01", "infinity"), ("now", None)):
        admin.execute(
            "INSERT INTO pgqueue.job (queue, task, created_at, run_at, position, max_attempts) "
            "VALUES ('q', 't', %s, %s, CASE WHEN %s::text IS NULL THEN nextval('pgqueue.job_id_seq') END, 1)",
            [created, run, run],
        )
    assert len(pq.jobs()) == 4
    assert len(pq.status()) == 1
    jobs = pq.claim("q", limit=10)
    assert [job.created_at is None for job in jobs] == [True, False, True]
    pq.fail(jobs, "x")
    assert len(pq.dead_letters()) == 3
    assert [job.state for job in pq.jobs()] == ["scheduled"]
    assert pq.promote("q") == []

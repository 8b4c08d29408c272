"""Everything through a real PgBouncer in transaction mode: two sessions, which all clients of a test share."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import migrate
from tests.acceptance.command_line import CommandLine
from tests.chaos.cluster import Node, single
from tests.chaos.pgbouncer import Pooler, pooler
from tests.releases import Release
from tests.waiting import wait_until
from tests.workers import running

PATIENCE = 60.0
SIZE = 2
SETTINGS = ("search_path", "statement_timeout", "lock_timeout", "synchronous_commit", "TimeZone", "role")
STATE = (
    f"SELECT {', '.join(f'current_setting({name!r})' for name in SETTINGS)}, session_user, current_user,"
    " (SELECT array_agg(name) FROM pg_prepared_statements), (SELECT array_agg(c) FROM pg_listening_channels() AS c),"
    " (SELECT count(*) FROM pg_cursors WHERE is_holdable)"
)
LEFT = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with single() as server:
        yield server


@pytest.fixture(scope="module")
def bouncer(node: Node) -> Iterator[Pooler]:
    with pooler(node, size=SIZE) as started:
        yield started


@pytest.fixture
def name(node: Node) -> Iterator[str]:
    """An empty database on the server behind the pooler."""
    made = f"pooled_{uuid.uuid4().hex[:12]}"
    node.execute(f'CREATE DATABASE "{made}"')
    yield made
    node.execute(f'DROP DATABASE "{made}" WITH (FORCE)')


@pytest.fixture
def pooled(bouncer: Pooler, name: str) -> Iterator[str]:
    """The URL, through the pooler, of a database that was migrated through it; at the end its sessions are as they began."""
    url = bouncer.url(name)
    untouched = bouncer.sessions(name, STATE, SIZE)
    migrate.upgrade(url, schema="pgqueue")
    yield url
    assert bouncer.sessions(name, STATE, SIZE) == untouched
    assert bouncer.node.execute(LEFT) == [(0,)]


def stored(node: Node, name: str, table: str, where: str = "true") -> int:
    [(found,)] = node.execute(f"SELECT count(*) FROM pgqueue.{table} WHERE {where}", database=name)
    return int(found)


def test_migrations_run_through_the_pooler_from_the_command_line(
    bouncer: Pooler, node: Node, name: str, tmp_path: Path
) -> None:
    shop = CommandLine(tmp_path, bouncer.url(name))
    shop.good("migrate")
    assert "up to date" in shop.good("migrate", "--check")
    assert node.execute(LEFT) == [(0,)]
    migrate.to(bouncer.url(name), "base", schema="pgqueue")
    assert node.execute(LEFT) == [(0,)]


@pytest.mark.slow
@pytest.mark.parametrize("prepare", ["off", None], ids=["unprepared", "as it comes"])
def test_four_workers_behind_two_sessions_run_each_of_two_thousand_jobs_once(
    prepare: str | None, node: Node, name: str, pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGQUEUE_PREPARE", raising=False)
    if prepare:
        monkeypatch.setenv("PGQUEUE_PREPARE", prepare)
    runs: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        with lock:
            runs[number] += 1

    with pgqueue.PgQueue(pooled) as pq, ExitStack() as stack:
        pq.task(name="work", queue="q")(work)
        fleet = [stack.enter_context(running(pq, queues=("q",), concurrency=4, poll=0.2)) for _ in range(4)]
        for number in range(2000):
            pq.enqueue("work", [number], queue="q")
        wait_until(lambda: stored(node, name, "archive") == 2000, PATIENCE, "all are done")
        assert runs == Counter(range(2000))
        assert stored(node, name, "job") == stored(node, name, "dead_letter") == 0
        assert stored(node, name, "archive", "attempt = 1 AND lost = 0 AND state = 'completed'") == 2000
        assert [watched.seen(pgqueue.EventName.LOOP_FAILED) for watched in fleet] == [[], [], [], []]


@pytest.mark.slow
def test_twenty_thousand_jobs_in_one_bulk_are_stored_whole_or_not_at_all(node: Node, name: str, pooled: str) -> None:
    with pgqueue.PgQueue(pooled) as pq:
        task = pq.task(name="work", queue="q")(lambda number: None)
        ids = task.enqueue_many((number,) for number in range(20_000))
        assert node.execute("SELECT id FROM pgqueue.job ORDER BY id", database=name) == [(job_id,) for job_id in ids]
        with pytest.raises(pgqueue.PayloadError):
            task.enqueue_many((number if number < 15_000 else object(),) for number in range(20_000))
        assert stored(node, name, "job") == 20_000
        # Every shape of a claim, often enough to be prepared where anything is.
        while jobs := pq.claim("q", limit=1000):
            pq.complete(jobs)
        assert stored(node, name, "archive") == 20_000


@pytest.mark.slow
def test_jobs_with_keys_keep_their_order_and_limit_through_the_pooler(node: Node, name: str, pooled: str) -> None:
    lock = threading.Lock()
    inside: Counter[str] = Counter()
    most: Counter[str] = Counter()
    order: dict[str, list[int]] = {}

    def work(key: str, number: int) -> None:
        with lock:
            inside[key] += 1
            most[key] = max(most[key], inside[key])
            order.setdefault(key, []).append(number)
        threading.Event().wait(0.002)
        with lock:
            inside[key] -= 1

    with pgqueue.PgQueue(pooled) as pq, ExitStack() as stack:
        pq.task(name="work", queue="q")(work)
        fleet = [stack.enter_context(running(pq, queues=("q",), concurrency=4, poll=0.2)) for _ in range(3)]
        for number in range(100):
            pq.enqueue("work", [f"line {number % 5}", number], queue="q", ordering_key=f"line {number % 5}")
            pq.enqueue("work", ["limit", number], queue="q", concurrency_key="limit", concurrency_limit=2)
        wait_until(lambda: stored(node, name, "archive") == 200, PATIENCE, "all are done")
        assert [watched.seen(pgqueue.EventName.LOOP_FAILED) for watched in fleet] == [[], [], []]
    assert most.pop("limit") <= 2
    assert set(most.values()) == {1}
    del order["limit"]
    assert all(numbers == sorted(numbers) for numbers in order.values())


@pytest.mark.slow
def test_limits_of_queues_and_rates_of_keys_hold_through_the_pooler(node: Node, name: str, pooled: str) -> None:
    lock = threading.Lock()
    inside = most = 0

    def work() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.002)
        with lock:
            inside -= 1

    with pgqueue.PgQueue(pooled) as pq, ExitStack() as stack:
        task = pq.task(name="work", queue="q")(work)
        pq.limit_queue("q", running=2, rate=200, burst=20)
        pq.limit_key("q", "key", rate=100, burst=5)
        fleet = [stack.enter_context(running(pq, queues=("q",), concurrency=4, poll=0.2)) for _ in range(3)]
        task.enqueue_many(() for _ in range(100))
        for _ in range(20):
            pq.enqueue("work", queue="q", concurrency_key="key", concurrency_limit=5)
        wait_until(lambda: stored(node, name, "archive") == 120, PATIENCE, "all are done")
        assert [watched.seen(pgqueue.EventName.LOOP_FAILED) for watched in fleet] == [[], [], []]
        pq.enqueue("work", queue="q")
    assert most <= 2


async def test_an_async_client_uses_one_pool_with_the_others(node: Node, name: str, pooled: str) -> None:
    async with pgqueue.AsyncPgQueue(pooled) as pq:
        for number in range(30):
            await pq.enqueue("work", [number], queue="q")
        for _ in range(30):
            await pq.complete(await pq.claim("q"))
    assert stored(node, name, "archive") == 30


def test_through_the_pooler_a_worker_does_not_listen_and_polls(node: Node, name: str, pooled: str) -> None:
    with pgqueue.PgQueue(pooled) as pq:
        ran = threading.Event()
        pq.task(name="work", queue="q")(ran.set)
        with running(pq, queues=("q",), poll=0.2) as watched:
            watched.wait_for(pgqueue.EventName.WORKER_POOLED, listens=False)
            watched.loops()["claim"].started.wait(PATIENCE)
            pq.enqueue("work", queue="q")
            assert ran.wait(PATIENCE)
            assert not watched.worker._hearing()


def test_schedules_tick_through_the_pooler(node: Node, name: str, pooled: str) -> None:
    with pgqueue.PgQueue(pooled) as pq:
        ran = threading.Event()
        pq.schedule("* * * * * *")(pq.task(name="work", queue="q")(ran.set))
        with running(pq, poll=0.2) as watched:
            watched.wait_for(pgqueue.EventName.WORKER_POOLED, listens=False)
            assert ran.wait(PATIENCE)
            pq.change_schedule("work", every=1)
            before = len(watched.seen(pgqueue.EventName.SCHEDULE_TICKED))
            wait_until(
                lambda: len(watched.seen(pgqueue.EventName.SCHEDULE_TICKED)) > before + 2, PATIENCE, "it ticks on"
            )
            assert not watched.seen(pgqueue.EventName.LOOP_FAILED)


def test_with_a_direct_address_to_listen_at_it_hears(node: Node, name: str, pooled: str) -> None:
    with pgqueue.PgQueue(pooled, listen_url=node.url(name)) as pq:
        ran = threading.Event()
        pq.task(name="work", queue="q")(ran.set)
        with running(pq, queues=("q",), poll=600) as watched:
            watched.wait_for(pgqueue.EventName.WORKER_POOLED, listens=True)
            wait_until(watched.worker._hearing, PATIENCE, "its own greeting comes back")
            pq.enqueue("work", queue="q")  # the next poll is minutes away
            assert ran.wait(PATIENCE)


@pytest.mark.slow
def test_preparing_by_force_is_refused_in_one_sentence_that_says_what_to_set(bouncer: Pooler, name: str) -> None:
    url = bouncer.url(name)
    migrate.upgrade(url, schema="pgqueue")
    refusals: list[Exception] = []
    with pgqueue.PgQueue(url, prepare=True) as one, pgqueue.PgQueue(url, prepare=True) as two:
        for _ in range(20):
            for pq in (one, two):
                try:
                    pq.enqueue("work", queue="q")
                except pgqueue.ConfigurationError as error:
                    refusals.append(error)
    assert refusals
    assert "PGQUEUE_PREPARE=off" in str(refusals[0])
    assert "\n" not in str(refusals[0])


def test_the_doctor_says_what_a_pooler_needs(
    bouncer: Pooler, node: Node, name: str, pooled: str, tmp_path: Path
) -> None:
    shop = CommandLine(tmp_path, pooled)
    found = {row["check"]: row for row in shop.json("doctor")}
    assert (found["pooler"]["level"], found["notifications"]["level"]) == ("OK", "WARN")
    assert "PGQUEUE_LISTEN_URL" in found["notifications"]["advice"]

    status, output, errors = shop.run("doctor", PGQUEUE_LISTEN_URL=node.url(name), PGQUEUE_PREPARE="on")
    assert (status, errors) == (0, "")
    [line] = [line for line in output.splitlines() if "PGQUEUE_PREPARE" in line]
    assert "1.21" in line
    assert "a NOTIFY arrived" in output

    direct = {row["check"]: row for row in CommandLine(tmp_path, node.url(name)).json("doctor")}
    assert (direct["pooler"]["level"], direct["notifications"]["level"]) == ("OK", "OK")


def test_a_callers_transaction_through_the_pooler_takes_the_job_with_it(node: Node, name: str, pooled: str) -> None:
    with pgqueue.PgQueue(pooled) as pq, psycopg.connect(pooled, prepare_threshold=None) as connection:
        pq.enqueue("work", queue="q", using=connection)
        connection.rollback()
        kept: Any = pq.enqueue("work", queue="q", using=connection)
        connection.commit()
    assert node.execute("SELECT id FROM pgqueue.job", database=name) == [(kept,)]


def test_an_index_is_built_beside_the_work_through_the_pooler(
    pooled: str, name: str, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Release(tmp_path, monkeypatch).add_index()
    assert migrate.upgrade(pooled).after == new
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'pgqueue.job_lane'::regclass"
    assert node.execute(valid, database=name) == [(True,)]


@pytest.mark.parametrize("direct", [False, True], ids=["by looking", "by a URL that may listen"])
def test_results_blocks_and_waits_work_through_the_pooler(node: Node, name: str, pooled: str, direct: bool) -> None:
    """A wait listens on no session of the pooler: the fixture looks at what is left there."""
    listen_url = node.url(name) if direct else None
    with pgqueue.PgQueue(pooled, listen_url=listen_url) as pq:

        @pq.task(name="work", queue="q", keep_result=60)
        def work(number: int) -> int:
            job = pgqueue.current_job()
            job.progress(50, "half")
            if number % 2:
                job.set_result(number)
                with job.transaction() as connection:
                    connection.execute("SELECT 1")
            return number

        with running(pq, queues=("q",), concurrency=1, poll=0.2) as watched:
            ids = work.enqueue_many([(number,) for number in range(20)])
            ended = pq.wait(ids, PATIENCE)
            assert not watched.seen(pgqueue.EventName.LEASE_LOST)
        assert [ended[job_id].value for job_id in ids] == list(range(20))


def test_topics_are_published_kept_and_replayed_through_the_pooler(node: Node, name: str, pooled: str) -> None:
    with pgqueue.PgQueue(pooled) as pq:
        got: dict[str, list[int]] = {"first": [], "late": []}
        for group in got:
            pq.task(name=group, queue=group)(got[group].append)
        pq.keep_topic("orders", count=1000)
        pq.subscribe("orders", "first")
        pq.publish_many("orders", [(number,) for number in range(50)])
        with running(pq, queues=("first", "late"), poll=0.2) as watched:
            pq.subscribe("orders", "late", start="beginning")
            pq.publish("orders", [50])
            wait_until(lambda: stored(node, name, "archive") == 102, PATIENCE, "both groups have everything")
            assert not watched.seen(pgqueue.EventName.LOOP_FAILED)
    assert {group: sorted(numbers) for group, numbers in got.items()} == {group: list(range(51)) for group in got}

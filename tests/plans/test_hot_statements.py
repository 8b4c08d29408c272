"""The plans of the hot statements: the index that is meant, whatever the planner knows, and rows visited bounded.

A queue table is empty at one moment and full at the next, so its statistics are always wrong. Each plan must be the same
with no statistics, with fresh ones, with those of an empty table, and when it was cached before the table grew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.ops import Texts
from pgqueue.ops import limit as limit_ops
from pgqueue.ops.claim import LowWater
from pgqueue.sql import TEXTS, statements

ROWS = 20_000
SQL = statements("pgqueue")
CLAIM = {"queue": "q", "limit": 100, "lease": 30, "worker_id": None, "relaxed": False, "left_out": []}
FULL = {"floors": [-(2**15)], "ceilings": [2**15 - 1], "after": [-(2**63)]}
HINTED = {"floors": [1, 0, -(2**15)], "ceilings": [2**15 - 1, 0, -1], "after": [-(2**63), 500, -(2**63)]}
PAIRS = {"queue": "q", "ids": [1, 2, 3], "tokens": [1, 2, 3], "lanes_channel": None}
OF_RETRY = {"delays": [0.0, 1.0, 2.0], "spent": [True] * 3, "lost": [False] * 3, "errors": [None] * 3}
RETRY = {**OF_RETRY, "archive": True, "channel": None}
BURY = {"reasons": ["x"] * 3, "errors": [None] * 3, "channel": None}
KEPT = {"values": [None] * 3, "errors": [None] * 3, "seconds": [1.0, -1.0, 2.0], "channel": "pgqueue"}
REPORT = {"percents": [1.0, -1.0, 2.0], "messages": [""] * 3}
UNIQUE: dict[str, Any] = {
    "queue": "q",
    "task": "t",
    "priority": 0,
    "max_attempts": 1,
    "delay": 0.0,
    "run_at": None,
    "timeout": None,
    "retry": None,
    "headers": None,
    "channel": None,
    "prefix": "",
    "lane_rank": None,
    "lane_width": None,
    "park": None,
    "expires_in": None,
    "args": Texts(["[1]"] * 3),
    "kwargs": Texts([None] * 3),
    "unique_keys": Texts(["a", "b", "c"]),
    "lanes": Texts([None] * 3),
    "unique_for": 60.0,
}
FROM_START = {"after": "-infinity", "seen": []}
HOT: dict[str, tuple[str, dict[str, Any]]] = {
    "job_claim (full pass)": ("job_claim", {**CLAIM, **FULL}),
    "job_claim (hinted pass)": ("job_claim", {**CLAIM, **HINTED}),
    "job_claim_limited (full pass)": ("job_claim_limited", {**CLAIM, **FULL, "free": 10}),
    "job_claim_limited (hinted pass)": ("job_claim_limited", {**CLAIM, **HINTED, "free": 10}),
    "job_claimed": ("job_claimed", {"queue": "q", "token": 1}),
    "limit_waits": ("limit_waits", {"queue": "q"}),
    "job_complete": (
        "job_complete",
        {**PAIRS, "archive": True, "state": "completed", "reasons": [None] * 3, "leases": [1]},
    ),
    "job_complete_kept": (
        "job_complete_kept",
        {**PAIRS, **KEPT, "archive": True, "state": "completed", "reasons": [None] * 3, "leases": [1]},
    ),
    "job_doubt": ("job_doubt", PAIRS),
    "progress_write": ("progress_write", {**PAIRS, **REPORT}),
    "lease_free": ("lease_free", {"queue": "q", "leases": [1]}),
    "job_retry": ("job_retry", {**PAIRS, **RETRY}),
    "job_bury": ("job_bury", {**PAIRS, **BURY, "archive": True}),
    "job_release": ("job_release", {**PAIRS, "archive": True, "channel": None}),
    "lease_extend": ("lease_extend", {**PAIRS, "lease": 30, "leases": [1]}),
    "lease_beat": ("lease_beat", {"queue": "q", "worker_id": 1, "lease": 30, "leases": [1, 2]}),
    "job_rescue": ("job_rescue", {"queue": "q", "limit": 20, "archive": True, **FROM_START, "channel": None}),
    "job_promote": ("job_promote", {"queue": "q", "limit": 500, "channel": None}),
    "admission_take": ("admission_take", {"queue": "q", "after": 0, "limit": 64}),
    "lane_admit": ("lane_admit", {"queue": "q", "lanes": ["oa", "ob"], "most": 500, "room": 1, "channel": None}),
    "lane_repair": ("lane_repair", {"queue": "q", "begin": "", "limit": 1000}),
    "lane_list": ("lane_list", {"queue": "q", "limit": 50, "most": 10_000}),
    "job_adopt": ("job_adopt", {"queue": "q", "limit": 100}),
    "queue_agenda": ("queue_agenda", {"queue": "q"}),
    "job_expire": ("job_expire", {"queue": "q", "limit": 500, "archive": True, "channel": None}),
    "ageing_tick": ("ageing_tick", {"queue": "q"}),
    "job_age": ("job_age", {"queue": "q", "limit": 500}),
    "job_enqueue_unique": ("job_enqueue_unique", {**UNIQUE, "all_or_none": False}),
    "job_enqueue_over": (
        "job_enqueue_over",
        {**UNIQUE, "mode": 3, "distinct": False, "delay_limit": None, "alert": None},
    ),
}


@pytest.fixture
def session(database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database, autocommit=True) as connection:
        # Autovacuum would give statistics behind the back of the tests about having none.
        connection.execute("ALTER TABLE pgqueue.job SET (autovacuum_enabled = false)")
        yield connection


def fill(session: psycopg.Connection[Any]) -> None:
    session.execute(
        "INSERT INTO pgqueue.job (queue, task, priority, position, run_at) "
        "SELECT 'q' || CASE WHEN n %% 7 = 0 THEN '2' ELSE '' END, 't', n %% 3, "
        "CASE WHEN n %% 4 > 0 THEN n END, CASE WHEN n %% 4 = 0 THEN now() + interval '1 hour' END "
        "FROM generate_series(1, %s) AS n",
        [ROWS],
    )


def fill_lanes(session: psycopg.Connection[Any]) -> None:
    """One key with very many blocked jobs and many with a few, and those of another queue, which nobody looks at."""
    session.execute(
        "INSERT INTO pgqueue.job (queue, task, position, lane, lane_width, run_at, admitted) "
        "SELECT 'q' || CASE WHEN n %% 3 = 0 THEN '2' ELSE '' END, 't', CASE WHEN n %% 10 = 1 THEN n END, "
        "CASE WHEN n < 10000 THEN 'oa' ELSE 'c' || n / 4 END, 1, CASE WHEN n %% 10 = 2 THEN now() END, "
        "CASE WHEN n %% 10 = 1 AND n >= 10000 THEN true END FROM generate_series(1, %s) AS n",
        [ROWS],
    )
    session.execute(
        "INSERT INTO pgqueue.admission (queue, lane) SELECT CASE WHEN n %% 50 = 0 THEN 'q' ELSE 'q2' END, 'oa' "
        "FROM generate_series(1, %s) AS n",
        [ROWS],
    )


def plan(
    session: psycopg.Connection[Any], name: str, params: dict[str, Any], *, analyze: bool = False
) -> dict[str, Any]:
    words = "ANALYZE, FORMAT JSON" if analyze else "FORMAT JSON"
    with session.transaction(force_rollback=True):
        cursor = session.cursor()
        cursor.execute(f"EXPLAIN ({words}) ".encode() + SQL[name], params, prepare=False)
        row = cursor.fetchone()
    assert row is not None
    return dict(row[0][0]["Plan"])


def nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree.get("Plans", ()):
        yield from nodes(child)


PKEYS = ("queue_pkey", "job_pkey", "kept_task_pkey", "lease_pkey")


def assert_only_index_access(tree: dict[str, Any]) -> None:
    """No hot table is read as a whole, and the line is read in its order: a bitmap would have to be sorted."""
    scans = [node for node in nodes(tree) if "Scan" in node["Node Type"]]
    read = [node for node in scans if node.get("Relation Name") in ("job", "lease", "dead_letter", "admission")]
    assert read
    assert "Seq Scan" not in {node["Node Type"] for node in read}
    for node in scans:
        if node.get("Index Name"):
            assert "queue = " in node["Index Cond"] or node["Index Name"] in PKEYS, node
        if node.get("Index Name") in ("job_claim", "job_due"):
            assert node["Node Type"] in ("Index Scan", "Index Only Scan"), node


@pytest.mark.parametrize("statistics", ["none", "fresh", "of an empty table"])
@pytest.mark.parametrize("case", list(HOT))
def test_a_hot_statement_reads_by_index_whatever_the_statistics(
    case: str, statistics: str, session: psycopg.Connection[Any]
) -> None:
    if statistics == "of an empty table":
        session.execute("ANALYZE pgqueue.job")
    fill(session)
    fill_lanes(session)
    if statistics == "fresh":
        session.execute("ANALYZE pgqueue.job, pgqueue.admission")
    assert_only_index_access(plan(session, *HOT[case]))


@pytest.mark.parametrize("case", list(HOT))
def test_a_plan_cached_while_the_table_was_empty_is_the_right_one(case: str, session: psycopg.Connection[Any]) -> None:
    # What a prepared statement keeps: the plan for any parameters, made before the table grew.
    session.execute("SET plan_cache_mode = force_generic_plan")
    name, params = HOT[case]
    assert_only_index_access(plan(session, name, params))


def test_a_claim_reads_in_index_order_and_no_more_rows_than_it_takes(session: psycopg.Connection[Any]) -> None:
    fill(session)
    tree = plan(session, "job_claim", {**CLAIM, **FULL}, analyze=True)
    assert not [node for node in nodes(tree) if node["Node Type"] in ("Sort", "Incremental Sort")]
    [scan] = [node for node in nodes(tree) if node.get("Index Name") == "job_claim"]
    assert scan["Node Type"] == "Index Scan"
    assert scan["Actual Rows"] * scan["Actual Loops"] <= 101


@pytest.mark.parametrize("binds", [False, True], ids=["far from its limit", "at its limit"])
def test_a_claim_within_limits_reads_what_it_takes_and_what_runs(binds: bool, session: psycopg.Connection[Any]) -> None:
    fill(session)
    limit = 60 if binds else 100_000
    session.execute("INSERT INTO pgqueue.queue (name, most_running, rate, burst) VALUES ('q', %s, 1e6, 1000)", [limit])
    session.execute(
        "INSERT INTO pgqueue.lease (queue, job_ids, claimed_at, expires_at) "
        "SELECT CASE WHEN n % 10 = 0 THEN 'q' ELSE 'q2' END, ARRAY[n, n + 1], now(), now() + interval '1 minute' "
        "FROM generate_series(10, 200) AS n"
    )
    session.execute("UPDATE pgqueue.job AS j SET lease_id = l.id FROM pgqueue.lease AS l WHERE j.id = l.job_ids[1]")
    tree = plan(session, "job_claim_limited", {**CLAIM, **FULL, "free": 100}, analyze=True)
    assert not [node for node in nodes(tree) if node["Node Type"] in ("Sort", "Incremental Sort")]
    read = [node for node in nodes(tree) if node.get("Index Name") == "job_claim"]
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in read) <= 101
    assert rows_read(tree, "lease") <= 20, "those of this queue"
    # Forty jobs are listed, of which twenty run: only where that leaves too little room they are counted.
    [counted] = [node for node in nodes(tree) if node.get("Alias") == "one"]
    assert (counted["Actual Loops"] > 0) == binds
    assert rows_read(tree, "job") <= 300


def test_a_hinted_claim_does_not_visit_what_lies_before_its_marks(session: psycopg.Connection[Any]) -> None:
    fill(session)
    session.execute("UPDATE pgqueue.job SET lease_id = 1 WHERE queue = 'q' AND priority = 2 AND position < 15000")
    full = plan(session, "job_claim", {**CLAIM, **FULL}, analyze=True)
    spans = {"floors": [3, 2, -(2**15)], "ceilings": [2**15 - 1, 2, 1], "after": [-(2**63), 14999, -(2**63)]}
    hinted = plan(session, "job_claim", {**CLAIM, **spans}, analyze=True)

    def skipped(tree: dict[str, Any]) -> float:
        return float(sum(n.get("Rows Removed by Filter", 0) for n in nodes(tree) if n.get("Index Name") == "job_claim"))

    assert skipped(full) > 1000
    assert skipped(hinted) == 0


def rows_read(tree: dict[str, Any], relation: str) -> float:
    """Rows of this table that a plan has visited, filtered out or not."""
    return float(
        sum(
            node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
            for node in nodes(tree)
            if node.get("Relation Name") == relation and "Scan" in node["Node Type"]
        )
    )


def test_an_admission_reads_what_it_admits_however_many_jobs_and_lanes_wait(session: psycopg.Connection[Any]) -> None:
    fill_lanes(session)
    for name, relation in (("admission_take", "admission"), ("lane_admit", "job"), ("job_promote", "job")):
        params = {**HOT[name][1], "limit": 20}
        assert 0 < rows_read(plan(session, name, params, analyze=True), relation) <= 100, name


def test_a_look_at_a_queue_does_not_read_the_blocked_jobs_of_one_key_or_of_other_queues(
    session: psycopg.Connection[Any],
) -> None:
    session.execute("INSERT INTO pgqueue.lane (queue, lane, parked_at) VALUES ('q', 'oa', now()), ('q', 'ob', now())")
    for queue, lane in (("q", "oa"), ("q", "ob"), ("q2", "oc")):
        session.execute(
            "INSERT INTO pgqueue.job (queue, task, position, lane) SELECT %s, 't', NULL, %s FROM generate_series(1, 5000)",
            [queue, lane],
        )
    looks: dict[str, dict[str, Any]] = {
        "queue_drained": {"queue": "q"},
        "queue_agenda": {"queue": "q"},
        "queue_names": {},
        "lane_repair": HOT["lane_repair"][1],
    }
    for name, params in looks.items():
        assert rows_read(plan(session, name, params, analyze=True), "job") <= 20, name
    drained = session.execute(SQL["queue_drained"], {"queue": "q"}).fetchone()
    assert drained == (True,)


HOSTILE = (
    "enable_nestloop",
    "enable_hashjoin",
    "enable_mergejoin",
    "enable_indexscan",
    "enable_sort",
    "enable_material",
)


@pytest.mark.parametrize("option", [*HOSTILE, "all joins"])
def test_a_claim_never_takes_more_than_its_limit_under_a_hostile_planner(
    option: str, pq: pgqueue.PgQueue, database: str, admin: psycopg.Connection[Any]
) -> None:
    @pq.task(name="work", queue="q")
    def work(number: int) -> None: ...

    work.enqueue_many([(number,) for number in range(300)])
    options = HOSTILE[:3] if option == "all joins" else (option,)
    with psycopg.connect(database, autocommit=True) as hostile:
        for name in options:
            hostile.execute(f"SET {name} = off".encode())
        taken: list[int] = []
        for limit in (1, 1, 1, 7, 50, 100):
            jobs = pq.claim("q", limit=limit, using=hostile)
            assert len(jobs) == limit
            held = admin.execute("SELECT count(*) FROM pgqueue.job WHERE lease_id IS NOT NULL").fetchone()
            taken += [job.id for job in jobs]
            assert held == (len(taken),)
        pq.limit_queue("q", running=len(taken) + 20, rate=1000)
        for limit, allowed in ((7, 7), (50, 13), (50, 0)):
            op = limit_ops.claim("q", limit, free=limit, lease=30, low_water=LowWater())
            jobs = pq.run(op, hostile).jobs
            assert len(jobs) == allowed
            held = admin.execute("SELECT count(*) FROM pgqueue.job WHERE lease_id IS NOT NULL").fetchone()
            taken += [job.id for job in jobs]
            assert held == (len(taken),)
        assert len(set(taken)) == len(taken)
        assert taken == sorted(taken)


@pytest.mark.parametrize("limited", [False, True], ids=["without limits", "within limits"])
def test_claims_are_heap_only_updates(limited: bool, pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]) -> None:
    @pq.task(name="work", queue="q")
    def work(number: int) -> None: ...

    if limited:
        pq.limit_queue("q", running=100_000, rate=1e7)
    work.enqueue_many([(number,) for number in range(5000)])
    while jobs := pq.claim("q", limit=100):
        pq.complete(jobs)
    pq.close()  # a backend reports its counters at the latest when it leaves
    updated, hot = 0, 0
    for _ in range(600):
        admin.execute("SELECT pg_stat_clear_snapshot()")
        row = admin.execute(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE schemaname = 'pgqueue' AND relname = 'job'"
        ).fetchone()
        assert row is not None
        updated, hot = row
        if updated >= 5000:
            break
        admin.execute("SELECT pg_sleep(0.05)")
    assert updated >= 5000
    assert hot >= 0.95 * updated


def test_no_index_of_the_job_table_mentions_a_column_that_a_claim_changes(admin: psycopg.Connection[Any]) -> None:
    rows = admin.execute(
        "SELECT indexdef FROM pg_indexes WHERE schemaname = 'pgqueue' AND tablename = 'job'"
    ).fetchall()
    assert rows
    for (definition,) in rows:
        assert "lease_id" not in definition
        assert "attempt" not in definition


def test_every_unique_index_of_the_hot_tables_contains_the_queue(admin: psycopg.Connection[Any]) -> None:
    rows = admin.execute(
        "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'pgqueue' AND indexdef LIKE 'CREATE UNIQUE%' "
        "AND tablename IN ('job', 'lease', 'dead_letter', 'archive')"
    ).fetchall()
    assert len(rows) >= 4
    assert all("queue" in definition.split(" USING ")[1] for _, definition in rows)


def test_every_hot_statement_names_one_queue() -> None:
    for name, _ in HOT.values():
        assert "queue = %(queue)s::text" in TEXTS[name], name

"""The primary dies, its standby takes over: what was acknowledged is there, and the workers go on by themselves."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

import pgqueue
from pgqueue import migrate
from tests.acceptance.command_line import CommandLine
from tests.chaos.app import TRACES
from tests.chaos.cluster import Node, Pair, pair
from tests.chaos.processes import workers
from tests.waiting import wait_until

LEASE = 10.0
PATIENCE = 60.0
SOON = 20.0
"""Seconds after the promotion that a busy machine may take until the next job is done; an idle one needs two."""
UNSAVED = 2_000_000
"""Microseconds before the crash within which a claim, which does not wait for the disk, may be forgotten."""


@dataclass
class Producer:
    """Enqueues without a pause worth speaking of, and remembers what was acknowledged, and when it was refused."""

    pq: pgqueue.PgQueue
    acknowledged: list[int] = field(default_factory=list)
    refused: list[tuple[float, Exception]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stopping.wait(0.005):
            try:
                self.acknowledged.append(self.pq.enqueue("steady", [0.005], queue="chaos"))
            except (pgqueue.PgQueueError, psycopg.Error) as error:
                self.refused.append((time.monotonic(), error))

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def number(node: Node, table: str, where: str = "true") -> int:
    [(found,)] = node.execute(f"SELECT count(*) FROM {table} WHERE {where}")
    return int(found)


def known(node: Node) -> set[int]:
    """Every job that this server knows of, in whatever state."""
    tables = ("job", "archive", "dead_letter")
    return {row[0] for row in node.execute(" UNION ALL ".join(f"SELECT id FROM pgqueue.{table}" for table in tables))}


@pytest.fixture
def both() -> Iterator[Pair]:
    """A primary with the queue on it, and an asynchronous standby that has it too."""
    with pair() as servers:
        migrate.upgrade(servers.primary.url(), schema="pgqueue")
        servers.primary.execute(TRACES)
        servers.caught_up()
        yield servers


@pytest.mark.slow
def test_no_acknowledged_job_is_lost_when_a_synchronous_standby_takes_over_under_load(
    both: Pair, tmp_path: Path
) -> None:
    both.synchronise()
    url = both.url(target_session_attrs="read-write")
    with workers(url, tmp_path) as fleet, pgqueue.PgQueue(url) as pq:
        processes = [fleet.start(lease=LEASE), fleet.start(lease=LEASE)]
        # One that starts while nobody accepts writes says so and leaves: that is for whoever supervises it.
        wait_until(lambda: number(both.primary, "pgqueue.worker") == 2, PATIENCE, "both workers have started")
        producers = [Producer(pq) for _ in range(4)]
        wait_until(lambda: number(both.primary, "pgqueue.archive") >= 100, PATIENCE, "a hundred jobs are done")

        [(killed_at,)] = both.primary.execute("SELECT extract(epoch FROM clock_timestamp()) * 1e6")
        both.primary.kill()
        away = time.monotonic()
        wait_until(lambda: all(p.refused for p in producers) or time.monotonic() - away > 3, PATIENCE, "they notice")
        both.standby.execute("SELECT pg_promote(true, 60)")
        promoted = time.monotonic()

        already = known(both.standby)
        first = wait_until(lambda: [p.acknowledged[-1] for p in producers if p.acknowledged[-1] not in already],
                           PATIENCE, "the first acknowledged job after the promotion")[0]  # fmt: skip
        accepted = time.monotonic() - promoted
        wait_until(lambda: number(both.standby, "pgqueue.archive", f"id = {first}"), PATIENCE, "it is done")
        took = time.monotonic() - promoted
        enough = [len(p.acknowledged) + 50 for p in producers]
        wait_until(lambda: all(len(p.acknowledged) >= least for p, least in zip(producers, enough, strict=True)),
                   PATIENCE, "more jobs come")  # fmt: skip
        for producer in producers:
            producer.stop()
        wait_until(lambda: number(both.standby, "pgqueue.job") == 0, PATIENCE, "every job has ended")

        assert [process.poll() for process in processes] == [None, None]
        for process in processes:
            process.terminate()
            assert process.wait(PATIENCE) == 0
    acknowledged = [job_id for producer in producers for job_id in producer.acknowledged]
    refused = [error for producer in producers for _, error in producer.refused]
    done = [job_id for (job_id,) in both.standby.execute("SELECT id FROM pgqueue.archive WHERE state = 'completed'")]
    assert len(set(done)) == len(done) == number(both.standby, "pgqueue.archive")
    assert number(both.standby, "pgqueue.dead_letter") == 0
    assert set(acknowledged) - set(done) == set()
    # Whoever was refused does not know whether the job was stored: at most so many more.
    assert len(set(done) - set(acknowledged)) <= len(refused)
    late = [[error for at, error in producer.refused if at > promoted] for producer in producers]
    assert max(map(len, late)) <= 1, late
    overlaps = overlapping(both.standby)
    assert [pair for pair in overlaps if pair[1] < int(killed_at) - UNSAVED] == []
    assert took < SOON
    [(runs, lost)] = both.standby.execute("SELECT sum(attempt), sum(lost) FROM pgqueue.archive")
    print(
        f"\n{len(acknowledged)} acknowledged, {len(refused)} refused, {len(done)} completed in {runs} attempts, "
        f"{lost} of them lost; {len(overlaps)} overlaps; after the promotion the first was accepted after "
        f"{accepted:.1f} s and done after {took:.1f} s; refused with { ({str(error) for error in refused}) }"
    )


def overlapping(node: Node) -> list[tuple[int, int, int]]:
    """Attempts of one job that ran at the same time: the job, and both tokens. A token is the moment of its claim."""
    return node.execute(
        "WITH run AS (SELECT job_id, token, min(at) AS began, max(at) AS ended FROM trace GROUP BY job_id, token)"
        " SELECT a.job_id, a.token, b.token FROM run AS a JOIN run AS b ON b.job_id = a.job_id AND b.token > a.token"
        " WHERE b.began < a.ended ORDER BY 1, 2"
    )  # type: ignore[return-value]


@pytest.mark.slow
def test_an_asynchronous_standby_loses_what_it_was_not_sent_and_this_audit_sees_it(both: Pair) -> None:
    with pgqueue.PgQueue(both.url()) as pq:
        kept = [pq.enqueue("steady", [0.0], queue="chaos") for _ in range(5)]
        both.caught_up()
        [(sender,)] = both.primary.execute("SELECT pid FROM pg_stat_replication")
        os.kill(sender, signal.SIGSTOP)
        lost = [pq.enqueue("steady", [0.0], queue="chaos") for _ in range(5)]
        assert known(both.primary) == {*kept, *lost}
        both.primary.kill()
        both.standby.execute("SELECT pg_promote(true, 60)")
        later = pq.enqueue("steady", [0.0], queue="chaos")  # over the same pool, whose connections are dead
        assert known(both.standby) - {later} == set(kept)


@pytest.mark.slow
def test_a_standby_is_refused_in_one_sentence_and_among_several_hosts_passed_over(both: Pair, tmp_path: Path) -> None:
    shop = CommandLine(tmp_path, both.standby.url())
    assert "connect to the primary" in shop.sentence(1, "worker", "--app", "shop", "--drain")
    assert "connect to the primary" in shop.sentence(1, "enqueue", "shop.note", "--unchecked")
    only = CommandLine(tmp_path, both.standby.url() + "?target_session_attrs=read-write")
    assert "read-only" in only.sentence(1, "worker", "--app", "shop", "--drain")
    assert number(both.primary, "pgqueue.worker") == 0

    # The URL says nothing of what is wanted: a queue writes.
    url = both.url(standby_first=True)
    with pgqueue.PgQueue(url) as pq:
        job_id = pq.enqueue("shop.note", ["a"], queue="images")
    either = CommandLine(tmp_path, url)
    either.good("migrate")
    status, _, errors = either.run("worker", "--app", "shop", "--drain")
    assert status == 0, errors
    assert either.marks() == ["a"]
    assert number(both.primary, "pgqueue.archive", f"id = {job_id}") == 1


def test_a_first_host_that_never_answers_costs_one_connect_timeout_per_connection(both: Pair) -> None:
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()  # the kernel accepts, and nobody answers
        where = f"127.0.0.1:{frozen.getsockname()[1]},127.0.0.1:{both.primary.port}"
        password = both.primary.place.password
        url = f"postgresql://postgres:{password}@{where}/postgres?connect_timeout=2"
        with pgqueue.PgQueue(url, connect_timeout=2) as pq:
            began = time.monotonic()
            pq.enqueue("steady", [0.0], queue="chaos")
            assert time.monotonic() - began > 2

"""Connections where names of Unix are missing."""

from __future__ import annotations

import asyncio
import os
import select
import time
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.config import Settings
from pgqueue.worker.link import Link, Watchdog
from tests.waiting import wait_until
from tests.workers import PATIENCE, count

OURS = "FROM pg_stat_activity WHERE application_name = 'pgqueue' AND datname = current_database()"


def test_a_dead_connection_is_seen_before_it_is_used_although_there_is_no_poll(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(select, "poll")
    pq.enqueue("before", queue="q")
    admin.execute(f"SELECT pg_terminate_backend(pid) {OURS}".encode())
    wait_until(lambda: not admin.execute(f"SELECT 1 {OURS}".encode()).fetchall(), PATIENCE, "the sessions are gone")
    pq.enqueue("after", queue="q")
    assert count(admin, "job") == 2


def test_a_round_trip_past_its_deadline_is_cut_where_descriptors_of_sockets_are_no_files(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "dup", refuse)
    watchdog = Watchdog()
    watchdog.start()
    link = Link(Settings(database_url=database), watchdog, 10.0)
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError), watchdog.watching(link.connection(), 0.2):
        link.connection().execute("SELECT pg_sleep(120)")
    assert time.monotonic() - began < 60
    link.close()
    watchdog.stop()


def test_an_event_loop_that_psycopg_cannot_use_is_refused_in_words(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ProactorEventLoop(asyncio.SelectorEventLoop):
        """What asyncio takes on Windows by itself has a class of this name."""

    monkeypatch.setattr(asyncio, "ProactorEventLoop", ProactorEventLoop, raising=False)

    async def enqueue() -> None:
        queue = pgqueue.AsyncPgQueue(database)
        await queue.enqueue("t", queue="q")
        await queue.close()

    with (
        asyncio.Runner(loop_factory=ProactorEventLoop) as runner,
        pytest.raises(pgqueue.ConfigurationError, match=r"asyncio\.Runner\(loop_factory=asyncio\.SelectorEventLoop\)"),
    ):
        runner.run(enqueue())
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(enqueue())

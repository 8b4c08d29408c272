"""Connections whose other end has gone without a word: what the kernel is told to watch, and what pgqueue watches itself."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue import EventName
from pgqueue.migrate_connection import connect
from pgqueue.worker import WorkerOptions, listener
from tests.chaos.proxy import Proxy, target_of
from tests.waiting import wait_until
from tests.workers import PATIENCE, running, wait_for_count

linux = pytest.mark.skipif(sys.platform != "linux", reason="these options of sockets are Linux's")
OURS = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    with Proxy(target_of(database)) as between:
        yield between


def watched_for(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """What the kernel does to find out whether the other end of this connection is there."""
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as twin:
        return {
            name: int(twin.getsockopt(socket.SOL_SOCKET, getattr(socket, name)) != 0)
            if name.startswith("SO_")
            else twin.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in OURS
        }


@linux
def test_every_connection_of_ours_finds_out_in_half_a_minute_that_its_server_is_gone(
    proxy: Proxy, database: str, admin: psycopg.Connection[Any]
) -> None:
    url = proxy.url(database)
    found = {}
    with pgqueue.PgQueue(url) as pq:
        work = pq.task(name="work", queue="q")(lambda: None)
        work.enqueue()
        with pq._pool.connection() as lent:
            found["pool"] = watched_for(lent)
        with running(pq) as watched:
            wait_for_count(admin, 1, "archive")
            for name, part in watched.loops().items():
                watched.backend(name)
                found[name] = watched_for(part.link.connection())
            found["control"] = watched_for(watched.worker._control.connection())
    with closing(connect(url)) as migration:
        found["migrate"] = watched_for(migration)
    assert found == dict.fromkeys(found, OURS)
    assert {"claim", "settle", "heartbeat", "maintenance", "listen"} <= set(found)


@linux
async def test_an_asynchronous_connection_does_too(proxy: Proxy, database: str) -> None:
    async with pgqueue.AsyncPgQueue(proxy.url(database)) as pq, pq._pool.connection() as lent:
        with socket.fromfd(lent.fileno(), socket.AF_INET, socket.SOCK_STREAM) as twin:
            assert twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15


@linux
@pytest.mark.parametrize(
    ("said", "changed"),
    [
        ({"keepalives_idle": 60}, {"TCP_KEEPIDLE": 60}),
        ({"tcp_user_timeout": 5000}, {"TCP_USER_TIMEOUT": 5000}),
        ({"tcp_user_timeout": 0, "keepalives_count": 9}, {"TCP_USER_TIMEOUT": 0, "TCP_KEEPCNT": 9}),
        ({"keepalives": 0}, {"SO_KEEPALIVE": 0}),
    ],
)
def test_what_the_url_says_of_its_connection_counts(
    said: dict[str, Any], changed: dict[str, int], proxy: Proxy, database: str
) -> None:
    url = psycopg.conninfo.make_conninfo(proxy.url(database), **said)
    looked_at = set(OURS) if "keepalives" not in said else {"SO_KEEPALIVE"}
    expected = {name: value for name, value in {**OURS, **changed}.items() if name in looked_at}
    with pgqueue.PgQueue(url) as pq, pq._pool.connection() as lent, closing(connect(url)) as migration:
        for connection in (lent, migration):
            assert {name: value for name, value in watched_for(connection).items() if name in looked_at} == expected


def test_the_documented_bounds_are_the_real_ones() -> None:
    assert listener.PROBE_EVERY == 30.0
    assert WorkerOptions().deadline == 10.0


@pytest.mark.parametrize("fault", ["stall", "to_server", "to_client"])
def test_a_listener_whose_server_is_silent_notices_it_and_hears_again(
    fault: str, proxy: Proxy, database: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the listener is cut off, and the polls are too rare to find anything."""
    monkeypatch.setattr(listener, "PROBE_EVERY", 1.0)
    ran = threading.Event()
    with pgqueue.PgQueue(database, listen_url=proxy.url(database)) as pq:
        work = pq.task(name="work", queue="q")(ran.set)
        with running(pq, poll=3600.0, lease=3.0) as watched:
            wait_until(watched.worker._hearing, PATIENCE, "the greeting")
            proxy.stall() if fault == "stall" else proxy.cut("to_server" if fault == "to_server" else "to_client")
            since = time.monotonic()
            work.enqueue()
            watched.wait_for(EventName.LOOP_FAILED, loop="listen")
            noticed = time.monotonic() - since
            print(f"\nnoticed after {noticed:.2f} s; probe every 1 s, deadline {watched.worker.options.deadline:g} s")
            assert noticed < 1.0 + watched.worker.options.deadline + 5.0
            assert not watched.seen(EventName.LOOP_FAILED, loop="claim")
            proxy.resume()
            proxy.drop_all()
            watched.wait_for(EventName.LOOP_RECOVERED, loop="listen")
            assert ran.wait(PATIENCE)
            wait_until(watched.worker._hearing, PATIENCE, "the greeting")
            ran.clear()
            work.enqueue()
            assert ran.wait(PATIENCE)
            wait_for_count(admin, 2, "archive")

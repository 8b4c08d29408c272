"""The pool of a client after its server was away: thrown out at once, opened again at once, prepared where that is safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import pgqueue
from pgqueue.config import Settings, load_settings
from pgqueue.drivers.pool import choose_preparing, connect_options, hosts
from tests.conftest import execute
from tests.waiting import wait_until

IDLE = 8
OURS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgqueue' AND datname = current_database()"


def fill(pq: pgqueue.PgQueue) -> None:
    """Have the pool hold connections that do nothing."""
    barrier = threading.Barrier(IDLE)

    def hold() -> None:
        with pq._pool.connection():
            barrier.wait(30)

    threads = [threading.Thread(target=hold) for _ in range(IDLE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def end_all(admin: psycopg.Connection[Any]) -> None:
    """End every connection of the pool, as a restart of the server does."""
    admin.execute("SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE application_name = 'pgqueue'"
                  " AND datname = current_database()")  # fmt: skip
    wait_until(lambda: admin.execute(OURS).fetchone() == (0,), 30, "the end of the connections")


def test_a_pool_full_of_dead_connections_costs_no_error_and_no_wait(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any]
) -> None:
    fill(pq)
    # Another one was opened and closed before the pool: to find out whether the server can be reached at all.
    wait_until(lambda: admin.execute(OURS).fetchone() == (IDLE,), 30, "a full pool")
    end_all(admin)
    began = time.monotonic()
    for _ in range(IDLE):
        pq.enqueue("work", queue="q")
    # One after the other with a pause that doubles would not have ended within the ten seconds of a caller's patience.
    assert time.monotonic() - began < 10


async def test_an_async_pool_full_of_dead_connections_costs_no_error_and_no_wait(
    database: str, admin: psycopg.Connection[Any]
) -> None:
    async with pgqueue.AsyncPgQueue(database) as pq:
        lent = [pq._pool.connection() for _ in range(IDLE)]
        for each in lent:
            await each.__aenter__()
        for each in lent:
            await each.__aexit__(None, None, None)
        end_all(admin)
        began = time.monotonic()
        for _ in range(IDLE):
            await pq.enqueue("work", queue="q")
        assert time.monotonic() - began < 10


@pytest.fixture
def away(database: str, server_url: str, admin: psycopg.Connection[Any]) -> Callable[[bool], None]:
    """Close the database to everybody, or open it again."""
    name = psycopg.conninfo.conninfo_to_dict(database)["dbname"]

    def switch(closed: bool) -> None:
        execute(server_url, f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS {not closed}')
        if closed:
            end_all(admin)

    return switch


@pytest.mark.slow
def test_the_first_call_after_a_long_absence_succeeds(database: str, away: Callable[[bool], None]) -> None:
    with pgqueue.PgQueue(database, connect_timeout=4) as pq:
        pq.enqueue("work", queue="q")
        away(True)
        gone = time.monotonic()
        refusals = 0
        while time.monotonic() - gone < 10 or refusals < 2:
            with pytest.raises(pgqueue.DatabaseUnavailable):
                pq.enqueue("work", queue="q")
            refusals += 1
        away(False)
        pq.enqueue("work", queue="q")


def test_statements_are_prepared_on_a_direct_connection_unless_switched_off(database: str) -> None:
    for wish, threshold in ((None, 5), (True, 5), (False, None)):
        settings = Settings(database_url=database, prepare=wish)
        with psycopg.connect(database, **connect_options(settings)) as connection:
            assert choose_preparing(connection, settings) is False
            assert connection.prepare_threshold == threshold
        with pgqueue.PgQueue(database, prepare=wish) as pq, pq._pool.connection() as lent:
            assert lent.prepare_threshold == threshold


def test_whether_to_prepare_is_found_out_unless_it_is_said() -> None:
    assert load_settings({}, {}).prepare is None
    for word, wish in (("on", True), ("off", False)):
        assert load_settings({}, {"PGQUEUE_PREPARE": word}).prepare is wish
    with pytest.raises(pgqueue.ConfigurationError, match="prepare must be True or False"):
        load_settings({"prepare": "yes"}, {})


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://a,b/app", {"target_session_attrs": "read-write", "connect_timeout": 10}),
        ("host=a,b dbname=app target_session_attrs=any", {"target_session_attrs": None, "connect_timeout": 10}),
        ("postgresql://a/app", {"target_session_attrs": None, "connect_timeout": 10}),
        ("postgresql://a/app?connect_timeout=3&keepalives_idle=60", {"keepalives_idle": None, "connect_timeout": 3}),
        ("postgresql://a/app?connect_timeout=0", {"connect_timeout": 10}),
        ("not a url", {"connect_timeout": 10}),
    ],
)
def test_what_a_url_says_itself_is_left_to_it(
    url: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGTARGETSESSIONATTRS"):
        monkeypatch.delenv(name, raising=False)
    options = connect_options(Settings(database_url=url))
    assert {name: options.get(name) for name in expected} == expected
    assert hosts(url) == (2 if "a,b" in url else 1)

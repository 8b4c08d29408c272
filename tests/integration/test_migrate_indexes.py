"""Indexes on tables in use: built while others work, and begun anew after an interruption."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import pgqueue
from pgqueue import migrate, roles
from pgqueue.errors import DatabaseUnavailable, SchemaError
from tests.conftest import execute
from tests.releases import Release, Upgrade
from tests.waiting import wait_until
from tests.workers import PATIENCE, running, wait_for_count

BUILDS = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND state = 'active' AND query LIKE 'CREATE INDEX CONCURRENTLY%%'
      AND wait_event_type = 'Lock' AND clock_timestamp() - query_start > %s * interval '1 second'
"""
WAITS_FOR_ITS_TURN = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND query LIKE 'SELECT pg_try_advisory_xact_lock%%pgqueue migrate%%'
"""
VALID = """
    SELECT i.indexrelid, i.indisvalid FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
    WHERE c.relname = 'job_lane' AND i.indrelid = 'pgqueue.job'::regclass
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Release:
    return Release(tmp_path, monkeypatch)


@pytest.fixture
def writer(database: str, pq: pgqueue.PgQueue) -> Iterator[psycopg.Connection[Any]]:
    """Somebody who has enqueued and not committed: the building of an index waits for that."""
    with psycopg.connect(database) as connection:
        pq.enqueue("work", queue="q", using=connection)
        yield connection


@pytest.fixture
def prefix(database: str) -> Iterator[str]:
    """Of roles that are gone after the test."""
    name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
    yield name
    for kind in roles.KINDS:
        execute(database, f'DROP OWNED BY "{name}_{kind}"')
        execute(database, f'DROP ROLE "{name}_{kind}"')


def building(admin: psycopg.Connection[Any], seconds: float = 0.0) -> int:
    """The backend that has been building, and waiting, for so long."""
    [pid] = wait_until(lambda: admin.execute(BUILDS, [seconds]).fetchone(), PATIENCE, "the index is being built")
    return int(pid)


def index(admin: psycopg.Connection[Any]) -> tuple[int, bool] | None:
    return admin.execute(VALID).fetchone()


def built(admin: psycopg.Connection[Any]) -> bool:
    found = index(admin)
    return found is not None and found[1]


def test_producers_and_workers_go_on_while_an_index_is_built(
    pq: pgqueue.PgQueue,
    admin: psycopg.Connection[Any],
    database: str,
    writer: psycopg.Connection[Any],
    release: Release,
) -> None:
    new = release.add_index()
    work = pq.task(name="work", queue="q")(lambda: None)
    with running(pq, poll=0.2):
        upgrade = Upgrade(database)
        building(admin)
        for done in range(1, 21):
            work.enqueue()
            wait_for_count(admin, done, "archive")
        assert building(admin)
        assert not upgrade.answers
        writer.commit()
        assert upgrade.answer() == migrate.MigrationResult(before=release.head, after=new)
        wait_for_count(admin, 21, "archive")
    assert built(admin)


def test_a_build_whose_backend_is_terminated_leaves_the_schema_as_it_was_and_is_begun_anew(
    pq: pgqueue.PgQueue,
    admin: psycopg.Connection[Any],
    database: str,
    writer: psycopg.Connection[Any],
    release: Release,
) -> None:
    new = release.add_index()
    left: tuple[int, bool] | None = None
    for _ in range(2):  # the second build begins with the removal of what the first has left
        upgrade = Upgrade(database)
        admin.execute("SELECT pg_terminate_backend(%s)", [building(admin) if left is None else dropping(admin)])
        assert isinstance(upgrade.answer(), DatabaseUnavailable)
        left = index(admin)
        assert left is not None
        assert not left[1]
        assert migrate.current(database) == release.head
        assert migrate.check(database).state == "behind"
    pq.enqueue("work", queue="q")
    writer.commit()
    assert migrate.upgrade(database) == migrate.MigrationResult(before=release.head, after=new)
    after = index(admin)
    assert after is not None
    assert after[1]
    assert after[0] != left[0]
    assert len(pq.claim("q", limit=10)) == 2


def dropping(admin: psycopg.Connection[Any]) -> int:
    """The backend that removes what is not valid, and waits for the same writer."""
    question = (
        "SELECT pid FROM pg_stat_activity WHERE query LIKE 'DROP INDEX CONCURRENTLY%%' AND wait_event_type = 'Lock'"
    )
    [pid] = wait_until(lambda: admin.execute(question.encode()).fetchone(), PATIENCE, "the rest is removed")
    return int(pid)


def test_an_index_that_was_built_by_an_interrupted_run_is_not_built_again(
    admin: psycopg.Connection[Any], database: str, release: Release
) -> None:
    new = release.add_index()
    admin.execute("CREATE INDEX CONCURRENTLY job_lane ON pgqueue.job (queue, max_attempts)")
    before = index(admin)
    assert migrate.upgrade(database).after == new
    assert index(admin) == before


def test_whoever_waits_for_its_turn_does_not_keep_the_build_from_its_end(
    admin: psycopg.Connection[Any], database: str, writer: psycopg.Connection[Any], release: Release, prefix: str
) -> None:
    """A build waits for the end of every older snapshot, so nobody may hold one while it waits for the builder."""
    new = release.add_index()
    first = Upgrade(database)
    building(admin)
    second = Upgrade(database)
    grants = threading.Thread(target=roles.create, args=[database], kwargs={"prefix": prefix})
    grants.start()
    wait_until(lambda: admin.execute(WAITS_FOR_ITS_TURN).fetchone() == (2,), PATIENCE, "both wait")
    writer.commit()
    assert first.answer() == migrate.MigrationResult(before=release.head, after=new)
    assert second.answer() == migrate.MigrationResult(before=new, after=new)
    grants.join(PATIENCE)
    assert not grants.is_alive()
    assert built(admin)


def test_the_timeouts_and_the_isolation_of_a_role_do_not_end_a_build(
    admin: psycopg.Connection[Any], database: str, writer: psycopg.Connection[Any], release: Release
) -> None:
    new = release.add_index()
    limits = ["statement_timeout=2000", "lock_timeout=2000", "idle_in_transaction_session_timeout=2000"]
    options = " ".join(f"-c {one}" for one in [*limits, "default_transaction_isolation=serializable"])
    upgrade = Upgrade(make_conninfo(database, options=options))
    building(admin, seconds=3.0)
    writer.commit()
    answer = upgrade.answer()
    assert getattr(answer, "after", answer) == new


def test_a_build_that_waits_too_long_is_given_up_with_a_sentence(
    admin: psycopg.Connection[Any], database: str, writer: psycopg.Connection[Any], release: Release
) -> None:
    new = release.add_index()
    with pytest.raises(SchemaError, match=r"other sessions held locks .* for 1 s; nothing was changed"):
        migrate.upgrade(database, lock_timeout=1)
    assert migrate.current(database) == release.head
    writer.rollback()
    assert migrate.upgrade(database).after == new
    assert built(admin)


def test_several_revisions_are_applied_up_to_the_one_that_cannot_be_and_the_next_run_goes_on(
    admin: psycopg.Connection[Any], database: str, writer: psycopg.Connection[Any], release: Release
) -> None:
    first = release.add_column("lease")
    release.add_index()
    last = release.add_column("dead_letter")
    upgrade = Upgrade(database)
    admin.execute("SELECT pg_terminate_backend(%s)", [building(admin)])
    assert isinstance(upgrade.answer(), DatabaseUnavailable)
    assert migrate.current(database) == first
    with pytest.raises(SchemaError, match="for 1 s; nothing was changed"):
        migrate.upgrade(database, lock_timeout=1)
    writer.commit()
    assert migrate.upgrade(database) == migrate.MigrationResult(before=first, after=last)
    assert built(admin)
    assert migrate.to(database, first) == migrate.MigrationResult(before=last, after=first)
    assert index(admin) is None
    assert migrate.upgrade(database, revision=last) == migrate.MigrationResult(before=first, after=last)


def test_one_run_over_several_revisions_names_where_it_began_and_where_it_ended(
    database: str, release: Release
) -> None:
    release.add_column("lease")
    release.add_index()
    release.add_index("lease_lane", "lease (queue, worker_id)")
    last = release.add_column("dead_letter")
    assert migrate.upgrade(database) == migrate.MigrationResult(before=release.head, after=last)


def test_a_new_schema_gets_its_indexes_in_the_one_transaction_and_in_the_script(
    empty_database: str, release: Release
) -> None:
    release.add_column("lease")
    last = release.add_index()
    text = migrate.script()
    assert "CREATE INDEX job_lane" in text
    assert "CONCURRENTLY" not in text
    assert migrate.upgrade(empty_database) == migrate.MigrationResult(before=None, after=last)
    with psycopg.connect(empty_database, autocommit=True) as admin:
        assert built(admin)
        migrate.to(empty_database, "base")
        admin.execute(text.encode())
        assert built(admin)
    assert migrate.current(empty_database) == last


def test_an_index_that_cannot_be_made_is_reported_in_one_sentence_and_its_rest_is_removed_by_the_next_run(
    pq: pgqueue.PgQueue, admin: psycopg.Connection[Any], database: str, release: Release
) -> None:
    revision = release.add_index()
    file = release.folder / "versions" / f"{revision}.py"
    good = file.read_text()
    file.write_text(good.replace("CREATE INDEX", "CREATE UNIQUE INDEX"))
    for _ in range(2):
        pq.enqueue("work", queue="q")
    with pytest.raises(SchemaError, match="could not create unique index"):
        migrate.upgrade(database)
    assert not built(admin)
    file.write_text(good)
    assert migrate.upgrade(database).after == revision
    assert built(admin)

"""Making, changing and checking the schema, from one process."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import migrate
from pgqueue.catalog import catalog_listing
from pgqueue.errors import ConfigurationError, DatabaseUnavailable, SchemaError
from pgqueue.migrate_connection import transaction

EVERYTHING = """
    SELECT relname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %(schema)s
    UNION ALL SELECT typname FROM pg_type t JOIN pg_namespace n ON n.oid = typnamespace WHERE nspname = %(schema)s
    UNION ALL SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace WHERE nspname = %(schema)s
    UNION ALL SELECT nspname FROM pg_namespace WHERE nspname = %(schema)s
"""
FUTURE = """
from alembic import context, op

revision, down_revision, branch_labels, depends_on = "0002_test", "{head}", None, None


def upgrade() -> None:
    op.execute(f'ALTER TABLE "{{context.get_context().opts["pgqueue_schema"]}}".job ADD COLUMN extra integer')


def downgrade() -> None:
    op.execute(f'ALTER TABLE "{{context.get_context().opts["pgqueue_schema"]}}".job DROP COLUMN extra')
"""


def listing(dsn: str, schema: str = "pgqueue") -> str:
    with transaction(dsn, read_only=True) as connection:
        return catalog_listing(connection, schema)


def everything(dsn: str, schema: str = "pgqueue") -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute(EVERYTHING, {"schema": schema})]


def run_sql(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """This package with one more revision, which is returned."""
    (head,) = migrate.heads()
    copy = tmp_path / "100% migrations"
    shutil.copytree(migrate.migrations_path(), copy)
    (copy / "versions" / "0002_test.py").write_text(FUTURE.format(head=head))
    monkeypatch.setattr(migrate, "migrations_path", lambda: copy)
    return "0002_test"


@pytest.fixture
def role(server_url: str, empty_database: str) -> Iterator[str]:
    """A role without any right; gone, with all it got, after the test."""
    name = f"pgqueue_test_{os.urandom(6).hex()}"
    run_sql(server_url, f"CREATE ROLE {name}")
    yield name
    run_sql(empty_database, f"DROP OWNED BY {name} CASCADE")
    run_sql(server_url, f"DROP ROLE {name}")


def acting_as(dsn: str, role: str) -> str:
    return make_conninfo(dsn, options=f"-c role={role}")


def test_up_down_up_leaves_nothing_behind_and_ends_the_same(empty_database: str) -> None:
    (head,) = migrate.heads()
    assert migrate.upgrade(empty_database) == migrate.MigrationResult(before=None, after=head)
    first = listing(empty_database)
    assert migrate.to(empty_database, "base") == migrate.MigrationResult(before=head, after=None)
    assert everything(empty_database) == []
    assert migrate.to(empty_database, "head").after == head
    assert listing(empty_database) == first


def test_a_second_upgrade_finds_nothing_to_do(database: str) -> None:
    (head,) = migrate.heads()
    assert migrate.upgrade(database) == migrate.MigrationResult(before=head, after=head)
    assert migrate.upgrade(database, revision="base").after == head, "upgrade never goes down"
    assert migrate.current(database) == head


def test_history_has_a_single_head() -> None:
    assert len(migrate.heads()) == 1


def test_schema_is_what_the_golden_listing_says(database: str) -> None:
    golden = migrate.migrations_path() / "schema.txt"
    if os.environ.get("PGQUEUE_UPDATE_GOLDEN") == "1":
        golden.write_text(listing(database), encoding="utf-8")
    assert listing(database) == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("schema", ["user", "order", "job", "archive", "_q1", "a" * 40, "public"])
def test_every_valid_schema_name_gives_the_same_schema(empty_database: str, schema: str) -> None:
    migrate.upgrade(empty_database, schema=schema)
    assert migrate.check(empty_database, schema).state == "current"
    assert listing(empty_database, schema) == (migrate.migrations_path() / "schema.txt").read_text(encoding="utf-8")
    migrate.to(empty_database, "base", schema=schema)
    assert everything(empty_database, schema) == (["public"] if schema == "public" else [])


@pytest.mark.parametrize("schema", ["", "Queue", "a-b", "1a", 'x"; DROP TABLE y', "a" * 41, "é"])
def test_an_invalid_schema_name_is_refused_before_anything_connects(schema: str) -> None:
    for call in (migrate.upgrade, migrate.current, migrate.check):
        with pytest.raises(ConfigurationError):
            call("host=/nowhere", schema=schema)
    with pytest.raises(ConfigurationError):
        migrate.script(schema)


def test_a_search_path_that_leads_to_the_schema_changes_nothing(database: str) -> None:
    dsn = make_conninfo(database, options="-c search_path=pgqueue,public")
    assert migrate.check(dsn).state == "current"
    with transaction(dsn) as connection:
        catalog_listing(connection, "pgqueue")
        assert connection.exec_driver_sql("SHOW search_path").scalar_one() == "pgqueue,public"


def test_two_schemas_in_one_database_do_not_see_each_other(database: str) -> None:
    assert migrate.check(database, "other").state == "missing"
    migrate.upgrade(database, schema="other")
    migrate.to(database, "base")
    assert migrate.check(database).state == "missing"
    assert migrate.check(database, "other").state == "current"
    run_sql(
        database, "SELECT other.archive_roll(interval '1 day')", "INSERT INTO other.job (queue, task) VALUES ('q', 't')"
    )


def test_the_script_makes_the_schema_that_an_upgrade_makes(empty_database: str, database: str, tmp_path: Path) -> None:
    online = listing(database)
    migrate.to(empty_database, "base")
    path = tmp_path / "pgqueue.sql"
    path.write_text(migrate.script("pgqueue", "head"), encoding="utf-8")
    if shutil.which("psql"):
        command = ["psql", "-X", "-1", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(path), empty_database]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    else:
        run_sql(empty_database, path.read_text(encoding="utf-8"))
    assert listing(empty_database) == online
    assert migrate.upgrade(empty_database).before == migrate.heads()[0]


def test_to_goes_up_and_down_to_a_revision(database: str, next_release: str) -> None:
    head = migrate.current(database)
    assert head is not None
    assert migrate.check(database).state == "behind"
    assert next_release in migrate.check(database).sentence
    assert migrate.to(database, next_release) == migrate.MigrationResult(before=head, after=next_release)
    assert "column job.extra: integer" in listing(database)
    assert migrate.upgrade(database, revision=head).after == next_release
    assert migrate.to(database, head) == migrate.MigrationResult(before=next_release, after=head)
    assert "job.extra" not in listing(database)


def test_check_says_missing_current_ahead_and_names_the_database(empty_database: str) -> None:
    missing = migrate.check(empty_database)
    assert missing.state == "missing"
    assert "pgqueue migrate" in missing.sentence
    assert str(conninfo_to_dict(empty_database)["dbname"]) in missing.sentence
    migrate.upgrade(empty_database)
    assert migrate.check(empty_database).state == "current"
    run_sql(empty_database, "UPDATE pgqueue.schema_version SET version_num = '9999'")
    ahead = migrate.check(empty_database)
    assert ahead.state == "ahead"
    assert "upgrade the package" in ahead.sentence
    for call in (migrate.upgrade, lambda dsn: migrate.to(dsn, "base")):
        with pytest.raises(SchemaError, match="upgrade the package"):
            call(empty_database)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("DROP INDEX pgqueue.job_due", "index job.job_due is missing"),
        ("ALTER TABLE pgqueue.job ADD COLUMN mine text", "column job.mine is not ours"),
        ("ALTER TABLE pgqueue.job ALTER COLUMN lost TYPE bigint", "column job.lost is different"),
        ("CREATE INDEX mine ON pgqueue.job (lease_id)", "index job.mine is not ours"),
        ("ALTER TABLE pgqueue.lease SET (fillfactor = 100)", "table lease is different"),
        ("ALTER TABLE pgqueue.job ENABLE ROW LEVEL SECURITY", "table job is different"),
        ("ALTER TABLE pgqueue.job SET UNLOGGED", "table job is different"),
        ("ALTER SEQUENCE pgqueue.job_id_seq CACHE 50", "sequence job_id_seq is different"),
        ("ALTER FUNCTION pgqueue.archive_roll SECURITY INVOKER", "function archive_roll(keep interval) is different"),
        ("ALTER TABLE pgqueue.job ADD CHECK (attempt < 9)", "constraint job.job_attempt_check is not ours"),
        ("DROP TABLE pgqueue.dead_letter", "table dead_letter is missing"),
    ],
)
def test_check_names_what_was_changed_by_hand(database: str, change: str, named: str) -> None:
    run_sql(database, change)
    found = migrate.check(database)
    assert found.state == "drifted"
    assert named in found.sentence


def test_a_guest_in_the_schema_and_grants_are_not_drift(database: str) -> None:
    run_sql(database, "CREATE TABLE pgqueue.guest (id int PRIMARY KEY)", "GRANT SELECT ON pgqueue.job TO PUBLIC")
    assert migrate.check(database).state == "current"
    migrate.to(database, "base")
    assert "guest" in everything(database), "what is not ours stays, and with it the schema"


def test_an_unknown_revision_is_answered_with_the_known_ones(empty_database: str) -> None:
    with pytest.raises(ConfigurationError, match=r"'4711'; known are base, 0001"):
        migrate.upgrade(empty_database, revision="4711")
    with pytest.raises(ConfigurationError, match="known are base"):
        migrate.script("pgqueue", "4711")


def test_an_unreachable_server_is_named_without_its_password() -> None:
    with pytest.raises(DatabaseUnavailable) as caught:
        migrate.upgrade("postgresql://app:hunter2@127.0.0.1:1/app?connect_timeout=2")
    assert "'app' on 127.0.0.1:1" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_an_unreadable_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        migrate.check("mysql://app:hunter2@db/app")
    assert "hunter2" not in str(caught.value)


def test_a_read_only_server_is_said_to_be_one(empty_database: str) -> None:
    dsn = make_conninfo(empty_database, options="-c default_transaction_read_only=on")
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        migrate.upgrade(dsn)
    migrate.upgrade(empty_database)
    assert migrate.upgrade(dsn).after == migrate.heads()[0], "nothing to do needs no writes"


def test_a_missing_right_is_named_with_the_statement_that_gives_it(empty_database: str, role: str) -> None:
    limited = acting_as(empty_database, role)
    with pytest.raises(SchemaError, match=f"GRANT CREATE ON DATABASE .* TO {role}"):
        migrate.upgrade(limited)
    run_sql(empty_database, "CREATE SCHEMA pgqueue")
    with pytest.raises(SchemaError, match=f"GRANT USAGE ON SCHEMA .pgqueue. TO {role}"):
        migrate.upgrade(limited)
    run_sql(empty_database, f"GRANT USAGE ON SCHEMA pgqueue TO {role}")
    with pytest.raises(SchemaError, match=f"GRANT CREATE ON SCHEMA .pgqueue. TO {role}"):
        migrate.upgrade(limited)
    migrate.upgrade(empty_database)
    with pytest.raises(SchemaError, match=f"GRANT SELECT ON .pgqueue..schema_version TO {role}"):
        migrate.check(limited)
    run_sql(empty_database, f"GRANT SELECT ON pgqueue.schema_version TO {role}")
    assert migrate.check(limited).state == "current"
    assert migrate.upgrade(limited).after == migrate.heads()[0], "nothing to do needs no right to change"
    with pytest.raises(SchemaError, match="CREATE ON SCHEMA"):
        migrate.to(limited, "base")


def test_a_role_that_owns_the_schema_needs_no_right_on_the_database(empty_database: str, role: str) -> None:
    run_sql(empty_database, f"CREATE SCHEMA pgqueue AUTHORIZATION {role}")
    limited = acting_as(empty_database, role)
    migrate.upgrade(limited)
    assert migrate.check(limited).state == "current"
    migrate.to(limited, "base")
    assert everything(empty_database) == ["pgqueue"], "it could not make the schema again, so it stays"
    migrate.upgrade(limited)


def test_the_logging_of_the_host_stays_as_it_was(empty_database: str) -> None:
    loggers = [logging.getLogger(name) for name in (None, "alembic", "sqlalchemy")]
    before = [(logger.level, list(logger.handlers), logger.disabled) for logger in loggers]
    migrate.upgrade(empty_database)
    assert [(logger.level, list(logger.handlers), logger.disabled) for logger in loggers] == before


def test_a_table_lock_of_somebody_else_is_waited_for_within_bounds(database: str, next_release: str) -> None:
    with psycopg.connect(database) as reader:
        reader.execute("SELECT FROM pgqueue.job")
        started = time.monotonic()
        with pytest.raises(SchemaError, match="locks on its tables"):
            migrate.upgrade(database, lock_timeout=1)
        assert time.monotonic() - started < 30
    assert migrate.current(database) != next_release
    assert migrate.upgrade(database).after == next_release

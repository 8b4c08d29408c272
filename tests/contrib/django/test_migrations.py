"""The schema through manage.py migrate: the revisions of the other road, and the same schema at the end of both."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.db.migrations.recorder import MigrationRecorder
from django.test import override_settings

from pgqueue import migrate, migrate_indexes
from pgqueue.catalog import catalog_listing
from pgqueue.contrib.django import migrations, revisions
from pgqueue.migrate_connection import transaction as own_transaction
from tests.conftest import execute
from tests.contrib.django.conftest import connected, work
from tests.contrib.django.settings import BACKEND, TASKS
from tests.contrib.django.shop import tasks
from tests.waiting import wait_until

NEWEST = migrate.revisions()[-1]


@pytest.fixture
def empty(empty_database: str) -> Any:
    with connected(default=empty_database):
        yield empty_database


def django_migrate(*words: str, **options: Any) -> None:
    call_command("migrate", *words, verbosity=0, **options)


def listing(url: str, schema: str = "pgqueue") -> str:
    with own_transaction(url, read_only=True) as found:
        return catalog_listing(found, schema)


def applied() -> list[str]:
    return sorted(name for app, name in MigrationRecorder(connection).applied_migrations() if app == "pgqueue")


def test_every_revision_has_its_migration_and_every_migration_its_revision() -> None:
    versions = {path.stem for path in (migrate.migrations_path() / "versions").glob("*.py")}
    ours = {path.stem for path in Path(str(migrations.__file__)).parent.glob("[0-9]*.py")}
    assert ours == versions, "copy any file of pgqueue/contrib/django/migrations to the name of the new revision's file"
    assert revisions.stems() == sorted(versions)


def test_both_roads_lead_to_the_same_schema(empty: str, database: str) -> None:
    django_migrate("pgqueue")
    assert listing(empty) == listing(database)
    assert migrate.current(empty) == NEWEST
    assert migrate.check(empty).state is migrate.SchemaState.CURRENT
    assert applied() == revisions.stems()


def test_the_roads_may_be_used_by_turns(empty: str) -> None:
    migrate.upgrade(empty, revision="0003")
    django_migrate("pgqueue", "0005")
    assert migrate.current(empty) == "0005"
    migrate.upgrade(empty)
    django_migrate("pgqueue")  # finds it done
    assert migrate.check(empty).state is migrate.SchemaState.CURRENT
    migrate.to(empty, "base")
    django_migrate("pgqueue", "0004")
    assert migrate.current(empty) == "0004"  # as far as Django has recorded, and no further
    django_migrate("pgqueue")
    assert migrate.current(empty) == NEWEST


def test_going_back_is_going_back_by_revisions_and_zero_removes_all(empty: str) -> None:
    django_migrate("pgqueue")
    django_migrate("pgqueue", "0002")
    assert migrate.current(empty) == "0002"
    django_migrate("pgqueue", "zero")
    assert execute(empty, "SELECT count(*) FROM pg_namespace WHERE nspname = 'pgqueue'") == [(0,)]
    assert applied() == []
    django_migrate("pgqueue")
    assert migrate.check(empty).state is migrate.SchemaState.CURRENT


def test_makemigrations_finds_nothing_to_do(shop: str) -> None:
    out = io.StringIO()
    call_command("makemigrations", "pgqueue", "--check", "--dry-run", stdout=out)
    assert "No changes detected" in out.getvalue()


def test_sqlmigrate_prints_the_sql_of_the_revision(shop: str) -> None:
    out = io.StringIO()
    call_command("sqlmigrate", "pgqueue", "0008", stdout=out)
    assert 'CREATE INDEX job_expiry ON "pgqueue".job' in out.getvalue()
    out = io.StringIO()
    call_command("sqlmigrate", "pgqueue", "0008", "--backwards", stdout=out)
    assert 'DROP INDEX "pgqueue".job_expiry' in out.getvalue()
    assert migrate.current(shop) == NEWEST


def test_plan_says_what_would_be_done(empty: str) -> None:
    out = io.StringIO()
    call_command("migrate", "pgqueue", "0001", "--plan", stdout=out)
    assert "Revision 0001 of the queue's schema" in out.getvalue()
    assert migrate.current(empty) is None


def test_flush_empties_the_queue_as_it_empties_every_table(pq: Any, shop: str) -> None:
    tasks.noop.enqueue()
    fails: Any = tasks.fails
    fails.using(backend="default", max_attempts=1).enqueue()
    work(pq)
    tasks.noop.enqueue()
    pq.pause("default")
    pq.subscribe("orders", tasks.send_receipt.pgqueue_task)
    pq.publish("orders", [1])
    with connection.cursor() as cursor:
        names = [f"{one.name}" for one in connection.introspection.get_table_list(cursor)]
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relnamespace = 'pgqueue'::regnamespace AND relkind IN ('r', 'p')"
        )
        names = [str(name) for (name,) in cursor.fetchall()]
    assert {"job", "archive", "dead_letter", "result", "schedule", "topic", "schema_version"} <= set(names)
    call_command("flush", interactive=False, verbosity=0)
    filled = [name for name in names if execute(shop, f"SELECT count(*) FROM pgqueue.{name}") != [(0,)]]
    assert filled == ["schema_version"]
    assert migrate.check(shop).state is migrate.SchemaState.CURRENT
    assert tasks.noop.enqueue().id


def test_a_flush_that_is_not_confirmed_empties_nothing(pq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks.noop.enqueue()
    monkeypatch.setattr("builtins.input", lambda _: "no")
    call_command("flush", interactive=True, verbosity=0, stdout=io.StringIO())
    assert len(pq.jobs()) == 1


def test_a_schema_of_another_name_is_migrated_where_the_settings_put_it(empty: str, database: str) -> None:
    options = {"OPTIONS": {"schema": "jobs"}}
    with override_settings(TASKS={"default": {"BACKEND": BACKEND, "QUEUES": [], **options}}):
        django_migrate("pgqueue")
    assert listing(empty, "jobs") == listing(database)
    assert migrate.current(empty) is None


def test_other_databases_are_left_alone(empty: str, database: str) -> None:
    with connected(other=empty), override_settings(TASKS={"default": TASKS["default"]}):
        django_migrate("pgqueue", database="other")
    assert migrate.current(empty) is None


def test_where_migrations_are_switched_off_the_schema_is_made_all_the_same(empty: str) -> None:
    with override_settings(MIGRATION_MODULES={"pgqueue": None}):
        call_command("migrate", run_syncdb=True, verbosity=0)
        call_command("migrate", run_syncdb=True, verbosity=0)
    assert migrate.check(empty).state is migrate.SchemaState.CURRENT


def test_an_index_on_a_table_in_use_is_built_beside_the_work(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    django_migrate("pgqueue", "0007")
    execute(empty, "INSERT INTO pgqueue.job (queue, task) VALUES ('q', 'work')")
    built: list[tuple[str, ...]] = []
    original = migrate_indexes.build_beside

    def noted(dsn: str, schema: str, indexes: Any, patience: float) -> bool:
        built.append(tuple(indexes))
        return original(dsn, schema, indexes, patience)

    monkeypatch.setattr(revisions, "build_beside", noted)
    with psycopg.connect(empty) as writer:
        writer.execute("SELECT 1")  # somebody who reads holds nothing up
        django_migrate("pgqueue")
    assert built == [tuple(found) for one in migrate.revisions() if one > "0007" and (found := migrate.indexes_of(one))]
    assert built[0] == ("job_expiry",)
    assert migrate.check(empty).state is migrate.SchemaState.CURRENT


def test_a_migration_waits_for_the_locks_of_others_and_lets_them_through(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "PAUSE", 0.05)
    monkeypatch.setattr(migrate, "DDL_PATIENCE", 0.05)
    django_migrate("pgqueue", "0001")
    errors: list[BaseException] = []

    def run() -> None:
        try:
            django_migrate("pgqueue", "0002")
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    with psycopg.connect(empty) as reader:
        reader.execute("SELECT count(*) FROM pgqueue.worker")
        thread = threading.Thread(target=run)
        thread.start()
        tried = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%COLUMN completed%'"
        )
        wait_until(lambda: execute(empty, tried) != [(0,)], 60, "the migration waits for the lock")
        reader.rollback()
    thread.join(60)
    assert errors == []
    assert migrate.current(empty) == "0002"


def test_a_lock_that_is_held_for_too_long_is_one_sentence(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    django_migrate("pgqueue", "0001")
    for name, value in (("PAUSE", 0.05), ("DDL_PATIENCE", 0.05)):
        monkeypatch.setattr(migrate, name, value)
    monkeypatch.setattr(revisions, "PATIENCE", 0.3)
    with psycopg.connect(empty) as reader:
        reader.execute("SELECT count(*) FROM pgqueue.worker")
        with pytest.raises(CommandError, match="other sessions held locks on its tables"):
            django_migrate("pgqueue", "0002")
    assert migrate.current(empty) == "0001"
    django_migrate("pgqueue", "0002")


def test_a_schema_of_a_newer_release_is_left_alone_or_refused_as_that_release_says(empty: str) -> None:
    django_migrate("pgqueue")
    execute(empty, "UPDATE pgqueue.schema_version SET version_num = '9999'")
    execute(empty, "DELETE FROM django_migrations WHERE name = %s", revisions.stems()[-1])
    with pytest.raises(CommandError, match="revision 9999, which this pgqueue does not know: upgrade the package"):
        django_migrate("pgqueue")
    note = f"Revision 9999: workers of revision {NEWEST} and later run on it."
    execute(empty, f"COMMENT ON TABLE pgqueue.schema_version IS '{note}'")
    django_migrate("pgqueue")
    assert migrate.current(empty) == "9999"


def test_nothing_of_the_sessions_settings_is_left_changed(empty: str) -> None:
    with transaction.atomic():
        revisions.bring_up(connection, "pgqueue", NEWEST)
        with connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('lock_timeout'), current_setting('statement_timeout')")
            assert cursor.fetchone() == ("0", "0")
        transaction.set_rollback(True)
    assert migrate.current(empty) is None


def test_the_models_show_columns_that_exist(shop: str) -> None:
    for model in apps.get_app_config("pgqueue").get_models():
        assert list(model._default_manager.all()) == []

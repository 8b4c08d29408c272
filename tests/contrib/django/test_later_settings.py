"""Settings that change after the first `migrate`: the next one brings what they name to where its migrations are."""

from __future__ import annotations

import io
from typing import Any

from django.core.management import call_command
from django.test import override_settings

from pgqueue import migrate
from tests.contrib.django.conftest import connected
from tests.contrib.django.settings import BACKEND, TASKS

NEWEST = migrate.revisions()[-1]


def entry(**options: Any) -> dict[str, Any]:
    return {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": options}


def migrated(*words: str, **options: Any) -> str:
    out = io.StringIO()
    call_command("migrate", *words, stdout=out, **options)
    return out.getvalue()


def test_a_second_schema_is_made_by_the_next_migrate(shop: str) -> None:
    with override_settings(TASKS={"default": TASKS["default"], "second": entry(schema="second")}):
        assert f"schema 'second' to revision {NEWEST}" in migrated()
        assert migrate.check(shop, "second").state is migrate.SchemaState.CURRENT
        assert "schema 'second'" not in migrated()


def test_it_is_made_as_far_as_migrations_are_recorded_and_no_further(empty_database: str) -> None:
    with connected(default=empty_database):
        migrated("pgqueue", "0005")
        with override_settings(TASKS={"default": entry(schema="second")}):
            migrated("pgqueue", "0005")
            assert migrate.current(empty_database, schema="second") == "0005"
            migrated("pgqueue", "zero")
            assert migrate.current(empty_database, schema="second") is None


def test_a_database_that_was_migrated_before_a_backend_leads_to_it_gets_the_schema(empty_database: str) -> None:
    with connected(other=empty_database):
        migrated("pgqueue", database="other")
        assert migrate.current(empty_database) is None
        with override_settings(TASKS={"default": entry(database="other")}):
            migrated("pgqueue", database="other")
        assert migrate.check(empty_database).state is migrate.SchemaState.CURRENT


def test_a_flush_makes_no_schema(shop: str) -> None:
    with override_settings(TASKS={"default": TASKS["default"], "second": entry(schema="second")}):
        call_command("flush", interactive=False, verbosity=0)
        assert migrate.check(shop, "second").state is migrate.SchemaState.MISSING


def test_without_a_backend_of_ours_other_databases_are_left_alone(empty_database: str) -> None:
    with connected(other=empty_database), override_settings(TASKS={}):
        migrated(database="other")
    assert migrate.current(empty_database) is None

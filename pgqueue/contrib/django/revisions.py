"""Django migrations made of the revisions of the schema: each brings it to its revision, from wherever it is.

So both roads lead to the same schema, and may be used by turns: what `pgqueue migrate` has done already is found done, and
the table of its revisions is written here too. A new revision needs a file in `migrations/` beside this module that is like
all the others, under the name of the revision's own file.

The waits are those of `pgqueue.migrate`: half a second at a time for the locks of others, an index on a table in use is
built beside the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from django.apps import apps
from django.core.management.base import CommandError
from django.db import OperationalError, router, transaction
from django.db.migrations import Migration
from django.db.migrations.operations.base import Operation
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ModelState

from pgqueue import migrate
from pgqueue.contrib.django import options
from pgqueue.contrib.django.databases import url_of
from pgqueue.errors import PgQueueError
from pgqueue.migrate_connection import translated_errors
from pgqueue.migrate_indexes import build_beside
from pgqueue.tables import VERSION_TABLE
from pgqueue.version import runs_on

PATIENCE = 60.0
"""Seconds for which a revision waits for other migrations and for locks."""
LABEL = "pgqueue"
_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout", "lock_timeout")


def migration(module: str) -> type[Migration]:
    """The class Migration of a file that is named as that of its revision is."""
    names = stems()
    name = module.rpartition(".")[2]
    place = names.index(name)
    attributes = {
        "atomic": False,  # each step is a transaction of its own, and tries again where it would hold up others
        "dependencies": [(LABEL, names[place - 1])] if place else [],
        "operations": [Revision(migrate.revisions()[place])],
        "__module__": module,
    }
    return type("Migration", (Migration,), attributes)


def stems() -> list[str]:
    """The names of the revisions' files, oldest first."""
    found = sorted(path.stem for path in (migrate.migrations_path() / "versions").glob("[0-9]*.py"))
    order = migrate.revisions()
    return sorted(found, key=lambda stem: order.index(stem.partition("_")[0]))


def schemas_in(alias: str) -> list[str]:
    """The schemas that the settings put into this database. Where no backend is configured, that of the models is in the
    one to which the routers write."""
    from pgqueue.contrib.django.queues import queue

    ours = options.our_aliases()
    if not ours:
        return ["pgqueue"] if alias == router.db_for_write(apps.get_model(LABEL, "Job")) else []
    return list(dict.fromkeys(queue(one).settings.schema for one in ours if queue(one).database == alias))


class Revision(Operation):
    """Brings the schema to a revision, or to the one before it."""

    atomic = False
    reversible = True
    reduces_to_sql = True

    def __init__(self, revision: str) -> None:
        self.revision = revision

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models are those of now, at every revision: Django neither makes nor changes their tables."""
        for model in apps.get_app_config(app_label).get_models():
            if (app_label, model._meta.model_name) not in state.models:
                state.add_model(ModelState.from_model(model))

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Up to the revision."""
        for schema in concerned(schema_editor.connection, app_label):
            if schema_editor.collect_sql:
                schema_editor.execute(migrate.step(schema, self._before(), self.revision), None)
            else:
                bring_up(schema_editor.connection, schema, self.revision)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Down to the one before it."""
        for schema in concerned(schema_editor.connection, app_label):
            if schema_editor.collect_sql:
                schema_editor.execute(migrate.step(schema, self.revision, self._before()), None)
            else:
                bring_down(schema_editor.connection, schema, self.revision)

    def describe(self) -> str:
        """For `migrate --plan`."""
        return f"Revision {self.revision} of the queue's schema"

    def _before(self) -> str | None:
        known = migrate.revisions()
        place = known.index(self.revision)
        return known[place - 1] if place else None


def bring_up(connection: Any, schema: str, revision: str) -> None:
    """To at least this revision; CommandError in one sentence where that cannot be."""
    known = migrate.revisions()
    with _said():
        while True:
            before = _version(connection, schema)
            if _newer(connection, schema, before, known):
                return
            place = known.index(before) + 1 if before else 0
            if place > known.index(revision):
                return
            following = known[place]
            _build(connection, schema, before, following)
            _in_turn(connection, schema, before, following)


def bring_down(connection: Any, schema: str, revision: str) -> None:
    """To below this revision; at the first one the schema goes, with all jobs."""
    known = migrate.revisions()
    with _said():
        while True:
            before = _version(connection, schema)
            if before is None:
                return
            if before not in known:
                raise CommandError(_ahead(connection, schema, before))
            place = known.index(before)
            if place < known.index(revision):
                return
            _in_turn(connection, schema, before, known[place - 1] if place else None)


def concerned(connection: Any, app_label: str) -> list[str]:
    """The schemas of this database that are ours to migrate."""
    if connection.vendor != "postgresql" or not router.allow_migrate(connection.alias, app_label):
        return []
    return schemas_in(connection.alias)


def recorded(connection: Any) -> str:
    """The newest revision whose migration Django has recorded in this database, "" for none."""
    names = {name for label, name in MigrationRecorder(connection).applied_migrations() if label == LABEL}
    known = [revision for revision, name in zip(migrate.revisions(), stems(), strict=True) if name in names]
    return known[-1] if known else ""


def is_behind(connection: Any, schema: str, revision: str) -> bool:
    """Whether the schema is missing, or at an older revision than this one."""
    known = migrate.revisions()
    before = _version(connection, schema)
    return before is None or (before in known and known.index(before) < known.index(revision))


def _in_turn(connection: Any, schema: str, before: str | None, after: str | None) -> None:
    """One step, under the lock that all migrations of this schema take."""
    end = time.monotonic() + PATIENCE
    outermost = not connection.in_atomic_block

    def attempt() -> None:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor, _limits(cursor):
            _take_turn(cursor, schema, end)
            if _version(connection, schema) == before:  # else somebody was faster
                cursor.execute(migrate.step(schema, before, after))

    _patiently(attempt, end if outermost else 0.0, schema)


def _patiently(attempt: Callable[[], None], end: float, schema: str) -> None:
    """Again and again while tables are locked by others, with pauses in which those who queue up behind us get through."""
    while True:
        try:
            attempt()
        except OperationalError as error:
            locked = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
            if not isinstance(error.__cause__, locked):
                raise
            if time.monotonic() + migrate.PAUSE >= end:
                raise CommandError(
                    f"schema {schema!r}: other sessions held locks on its tables for too long; nothing of this revision was "
                    "changed. End the sessions that pg_locks shows, and run it again."
                ) from error
            time.sleep(migrate.PAUSE)
        else:
            return


def _take_turn(cursor: Any, schema: str, end: float) -> None:
    while True:
        # Asked again and again: who waits inside a statement holds a snapshot, for which an index in the making waits.
        cursor.execute(migrate.lock_statement(schema, wait=False))
        if cursor.fetchone()[0]:
            return
        if time.monotonic() >= end:
            raise CommandError(f"another migration of schema {schema!r} is still running; nothing was changed")
        time.sleep(migrate.TURN)


@contextmanager
def _limits(cursor: Any) -> Iterator[None]:
    """For this transaction: locks are waited for briefly, and nothing else ends a statement."""
    cursor.execute("SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", [list(_LIMITS)])
    before = cursor.fetchall()
    for name, _ in before:
        _set(cursor, name, str(int(migrate.DDL_PATIENCE * 1000)) if name == "lock_timeout" else "0")
    yield
    for name, value in before:
        _set(cursor, name, value)


def _set(cursor: Any, name: str, milliseconds: str) -> None:
    cursor.execute("SELECT set_config(%s, %s, true)", [name, milliseconds])


def _build(connection: Any, schema: str, before: str | None, following: str) -> None:
    """Indexes on tables in use, beside the work. Where nobody works yet, the step makes them."""
    indexes = migrate.indexes_of(following)
    if before is None or not indexes or connection.in_atomic_block:
        return
    with connection.cursor() as cursor:
        cursor.execute(f'SELECT EXISTS (SELECT FROM "{schema}".job) OR EXISTS (SELECT FROM "{schema}".worker)')  # noqa: S608 - a validated name
        in_use = cursor.fetchone()[0]
    if in_use:
        url = url_of(connection.alias)
        with translated_errors(url, schema):
            build_beside(url, schema, indexes, PATIENCE)


def _version(connection: Any, schema: str) -> str | None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT to_regclass(%s) IS NOT NULL", [f'"{schema}".{VERSION_TABLE}'])
        if not cursor.fetchone()[0]:
            return None
        cursor.execute(f'SELECT version_num FROM "{schema}".{VERSION_TABLE}')  # noqa: S608 - a validated name
        row = cursor.fetchone()
        return str(row[0]) if row else None


def _newer(connection: Any, schema: str, version: str | None, known: list[str]) -> bool:
    """Whether the schema is that of a newer release, on which this one still runs; CommandError where it does not."""
    if version is None or version in known:
        return False
    with connection.cursor() as cursor:
        cursor.execute("SELECT obj_description(to_regclass(%s), 'pg_class')", [f'"{schema}".{VERSION_TABLE}'])
        note = cursor.fetchone()[0]
    if not runs_on(version, note):
        raise CommandError(_ahead(connection, schema, version))
    return True


def _ahead(connection: Any, schema: str, version: str) -> str:
    where = f"schema {schema!r} in database {connection.alias!r}"
    return f"{where} is at revision {version}, which this pgqueue does not know: upgrade the package."


@contextmanager
def _said() -> Iterator[None]:
    """Our errors as those of commands, which are printed in one line."""
    try:
        yield
    except PgQueueError as error:
        raise CommandError(str(error)) from error

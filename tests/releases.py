"""Releases of this package that there are not yet: its migrations, and some more."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from pgqueue import migrate
from tests.workers import PATIENCE

HEAD = """
from alembic import context, op

from pgqueue.migrate_indexes import make_missing

revision, down_revision, branch_labels, depends_on = "{revision}", "{before}", None, None
{facts}


def run(*statements):
    for statement in statements:
        op.execute(statement.replace("SCHEMA", f'"{{context.get_context().opts["pgqueue_schema"]}}"'))


def upgrade():
    run({up})


def downgrade():
    run({down})
"""


class Upgrade:
    """`migrate.upgrade` in a thread; `answers` holds its result, or what it raised, once it has ended."""

    def __init__(self, database: str, **options: Any) -> None:
        self.answers: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=[database, options])
        self._thread.start()

    def _run(self, database: str, options: dict[str, Any]) -> None:
        try:
            self.answers.append(migrate.upgrade(database, **options))
        except BaseException as error:
            self.answers.append(error)

    def answer(self) -> Any:
        """Wait for the end: the result, or the error."""
        self._thread.join(PATIENCE * 2)
        assert not self._thread.is_alive(), "the migration does not end"
        return self.answers[0]

    def result(self) -> migrate.MigrationResult:
        """The result of an upgrade that went well."""
        answer = self.answer()
        assert isinstance(answer, migrate.MigrationResult), repr(answer)
        return answer


class Release:
    """The next release; while the test runs, `pgqueue.migrate` is that of this release, and all else is as it is now."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (self.head,) = migrate.heads()
        self.current = self.head
        self.folder = folder / "migrations"
        shutil.copytree(migrate.migrations_path(), self.folder)
        monkeypatch.setattr(migrate, "migrations_path", lambda: self.folder)

    def add(self, name: str, *, up: str = "", down: str = "", facts: str = "") -> str:
        """One more revision that runs these statements (Python expressions); its id."""
        revision = f"{int(self.current[:4]) + 1:04}_{name}"
        text = HEAD.format(revision=revision, before=self.current, facts=facts, up=up, down=down)
        (self.folder / "versions" / f"{revision}.py").write_text(text)
        self.current = revision
        return revision

    def add_column(self, table: str = "job", *, oldest_worker: str = "") -> str:
        """One that gives a table a column, and says which workers may stay."""
        return self.add(
            f"{table}_more",
            up=f"'ALTER TABLE SCHEMA.{table} ADD COLUMN more integer'",
            down=f"'ALTER TABLE SCHEMA.{table} DROP COLUMN more'",
            facts=f"oldest_worker = {oldest_worker!r}" if oldest_worker else "",
        )

    def add_index(self, name: str = "job_lane", on: str = "job (queue, max_attempts)") -> str:
        """One that gives a table in use an index, built beside the work."""
        definition = f"CREATE INDEX {{concurrently}} {name} ON {{schema}}.{on}"
        return self.add(
            name,
            up='*make_missing(INDEXES, context.get_context().opts["pgqueue_schema"])',
            down=f"'DROP INDEX SCHEMA.{name}'",
            facts=f"INDEXES = {{{name!r}: {definition!r}}}",
        )

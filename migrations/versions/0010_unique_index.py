"""Unique keys: the index of what waits behind the job of its key, built beside the work.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from collections.abc import Iterable

from alembic import context, op

from pgqueue.migrate_indexes import make_missing

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None
oldest_worker = "0004"

# A claim does not change its columns (HOT), and a job that waits behind no other is not in it.
INDEXES = {
    "job_next": """
        CREATE UNIQUE INDEX {concurrently} job_next ON {schema}.job (queue, next_key) WHERE next_key IS NOT NULL
    """,
}


def _run(statements: Iterable[str]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(make_missing(INDEXES, context.get_context().opts["pgqueue_schema"]))


def downgrade() -> None:
    _run(f"DROP INDEX {{schema}}.{name}" for name in INDEXES)

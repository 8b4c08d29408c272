"""Expiry: the index that finds what is too old, built beside the work.

Revision ID: 0008
Revises: 0007
"""

from __future__ import annotations

from collections.abc import Iterable

from alembic import context, op

from pgqueue.migrate_indexes import make_missing

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None
oldest_worker = "0004"

# A claim does not change its columns (HOT), and a job that does not expire is not in it.
INDEXES = {
    "job_expiry": """
        CREATE INDEX {concurrently} job_expiry ON {schema}.job (queue, expires_at) WHERE expires_at IS NOT NULL
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

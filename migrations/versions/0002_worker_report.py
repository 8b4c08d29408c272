"""What a worker says of itself with its heartbeat: how many attempts it has completed, and which queues it holds back.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import context, op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None
oldest_worker = "0001"

UPGRADE = (
    # Both have what an older worker leaves out: its beats go on. Neither is indexed: beats stay on their page (HOT).
    # completed: an object, attempts by queue since the worker's start. circuits: an array of what is open now, else NULL.
    """
    ALTER TABLE {schema}.worker
        ADD COLUMN completed jsonb NOT NULL DEFAULT '{}',
        ADD COLUMN circuits jsonb
    """,
)

DOWNGRADE = ("ALTER TABLE {schema}.worker DROP COLUMN circuits, DROP COLUMN completed",)


def _run(statements: tuple[str, ...]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(UPGRADE)


def downgrade() -> None:
    _run(DOWNGRADE)

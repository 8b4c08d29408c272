"""Keys: the indexes of their columns, built beside the work.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from collections.abc import Iterable

from alembic import context, op

from pgqueue.migrate_indexes import make_missing

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None
oldest_worker = "0004"

# A claim changes none of their columns (HOT), and a job without keys is in none of them.
# job_lane_head is the safety net of ordering keys: whatever goes wrong, two jobs of one key are never claimable at once.
INDEXES = {
    "job_unique": """
        CREATE UNIQUE INDEX {concurrently} job_unique ON {schema}.job (unique_key, queue) WHERE unique_key IS NOT NULL
    """,
    "job_lane_waiting": """
        CREATE INDEX {concurrently} job_lane_waiting ON {schema}.job (queue, lane, lane_rank, id)
        WHERE lane IS NOT NULL AND admitted IS NULL AND run_at IS NULL
    """,
    "job_lane_admitted": "CREATE INDEX {concurrently} job_lane_admitted ON {schema}.job (lane, queue) WHERE admitted",
    "job_lane_head": """
        CREATE UNIQUE INDEX {concurrently} job_lane_head ON {schema}.job (lane, queue)
        WHERE admitted AND lane >= 'o' AND lane < 'p'
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

"""Limits of queues, and rates of queues and of keys: their columns.

Revision ID: 0011
Revises: 0010
"""

from __future__ import annotations

from alembic import context, op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None
# An older worker works on beside it and knows no limit: it claims from a limited queue whatever is ready, and gives its keys
# places without asking for their rate. It loses nothing and strands nothing.
oldest_worker = "0004"

UPGRADE = (
    # most_running, rate (starts a second): NULL where there is no such limit. tokens, as of refilled_at: NULL for a bucket
    # that nothing was taken of yet, which is full. limit_definition: what the code said last; superseded and affirmed_at are
    # what they are in schedule.
    """
    ALTER TABLE {schema}.queue
        ADD COLUMN most_running integer,
        ADD COLUMN rate double precision,
        ADD COLUMN burst integer,
        ADD COLUMN tokens double precision,
        ADD COLUMN refilled_at timestamptz,
        ADD COLUMN limit_definition text,
        ADD COLUMN limit_superseded text[],
        ADD COLUMN limit_affirmed_at timestamptz
    """,
    # wakes_at: the due_at of the row in `admission` that waits for the next token, so that there is one such row.
    """
    ALTER TABLE {schema}.lane
        ADD COLUMN rate double precision,
        ADD COLUMN burst integer,
        ADD COLUMN tokens double precision,
        ADD COLUMN refilled_at timestamptz,
        ADD COLUMN wakes_at timestamptz
    """,
)

DOWNGRADE = (
    # What waits for a token of a lane waits no longer: nobody would look at it before its time.
    """
    UPDATE {schema}.admission SET due_at = NULL
    WHERE (lane, queue) IN (SELECT lane, queue FROM {schema}.lane WHERE rate IS NOT NULL)
    """,
    """
    ALTER TABLE {schema}.lane
        DROP COLUMN rate, DROP COLUMN burst, DROP COLUMN tokens, DROP COLUMN refilled_at, DROP COLUMN wakes_at
    """,
    """
    ALTER TABLE {schema}.queue
        DROP COLUMN most_running, DROP COLUMN rate, DROP COLUMN burst, DROP COLUMN tokens, DROP COLUMN refilled_at,
        DROP COLUMN limit_definition, DROP COLUMN limit_superseded, DROP COLUMN limit_affirmed_at
    """,
)


def _run(statements: tuple[str, ...]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(UPGRADE)


def downgrade() -> None:
    _run(DOWNGRADE)

"""Pauses with an end and pauses of tasks, expiry of jobs, ageing of priorities: their columns.

Revision ID: 0007
Revises: 0006
"""

from __future__ import annotations

from alembic import context, op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None
# An older worker works on beside it, and knows nothing of all this: it goes on with a paused task, starts what has expired,
# and leaves a pause with an end to the newer ones. It loses nothing and strands nothing.
oldest_worker = "0004"

UPGRADE = (
    # paused_until: NULL for a pause without an end. paused_tasks: an object; to each task that is paused when that was said
    # and when it ends, as seconds since 1970 ({"at": …, "until": …}): numbers, so that no text written by hand can make a
    # claim fail. ageing: seconds, NULL where priorities do not age; the other three are where the ageing has got to.
    """
    ALTER TABLE {schema}.queue
        ADD COLUMN paused_until timestamptz,
        ADD COLUMN paused_tasks jsonb,
        ADD COLUMN ageing double precision,
        ADD COLUMN ageing_mark bigint,
        ADD COLUMN ageing_next bigint,
        ADD COLUMN ageing_level smallint,
        ADD COLUMN aged_at timestamptz
    """,
    # NULL for a job that does not expire, which then takes no byte more. A claim does not change it (HOT).
    "ALTER TABLE {schema}.job ADD COLUMN expires_at timestamptz",
    # Seconds after the tick's job was made; NULL where its jobs do not expire.
    "ALTER TABLE {schema}.schedule ADD COLUMN expires_in double precision",
)

DOWNGRADE = (
    "ALTER TABLE {schema}.schedule DROP COLUMN expires_in",
    "ALTER TABLE {schema}.job DROP COLUMN expires_at",
    # Without its end a pause that is over would begin anew, and last.
    "UPDATE {schema}.queue SET paused_at = NULL WHERE paused_until <= clock_timestamp()",
    """
    ALTER TABLE {schema}.queue
        DROP COLUMN paused_until, DROP COLUMN paused_tasks, DROP COLUMN ageing, DROP COLUMN ageing_mark,
        DROP COLUMN ageing_next, DROP COLUMN ageing_level, DROP COLUMN aged_at
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

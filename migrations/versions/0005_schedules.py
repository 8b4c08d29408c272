"""Schedules: what ticks, when it does next, and which job a tick makes.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import context, op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
oldest_worker = "0004"

UPGRADE = (
    # ticked_to: everything up to there is decided, and only what comes after it can make a job. A tick compares it, so it
    # makes one job whoever looks. next_at only says when somebody must look: now, for a row that was just written, also by
    # hand; NULL where nothing ever comes.
    # definition: the fingerprint of what the code said when it wrote the row, NULL for what was made at run time;
    # superseded: those before it. affirmed_at: when a process whose code says the same was last seen.
    # version: counts the changes of everything but the ticks. starts_at: what intervals are counted from.
    """
    CREATE TABLE {schema}.schedule (
        name text COLLATE "C" NOT NULL,
        cron text,
        every double precision,
        tz text NOT NULL DEFAULT 'UTC',
        missed text NOT NULL DEFAULT 'once',
        grace double precision NOT NULL DEFAULT 60,
        overlap boolean NOT NULL DEFAULT true,
        queue text COLLATE "C" NOT NULL DEFAULT 'default',
        task text NOT NULL,
        args json,
        kwargs json,
        priority smallint NOT NULL DEFAULT 0,
        max_attempts integer NOT NULL DEFAULT 20,
        timeout double precision,
        retry json,
        headers json,
        definition text,
        superseded text[] NOT NULL DEFAULT '{}',
        affirmed_at timestamptz,
        version bigint NOT NULL DEFAULT 1,
        starts_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        ticked_to timestamptz NOT NULL DEFAULT clock_timestamp(),
        next_at timestamptz DEFAULT clock_timestamp(),
        paused_at timestamptz,
        last_at timestamptz,
        last_job_id bigint,
        last_queue text COLLATE "C",
        CONSTRAINT schedule_pkey PRIMARY KEY (name)
    ) WITH (
        fillfactor = 50,
        autovacuum_vacuum_threshold = 200,
        autovacuum_vacuum_cost_delay = 0
    )
    """,
    "CREATE INDEX schedule_next ON {schema}.schedule (next_at) WHERE next_at IS NOT NULL AND paused_at IS NULL",
)

DOWNGRADE = ("DROP TABLE {schema}.schedule",)


def _run(statements: tuple[str, ...]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(UPGRADE)


def downgrade() -> None:
    _run(DOWNGRADE)

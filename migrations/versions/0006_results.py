"""Results of jobs, the tasks whose results are kept, and the progress of what runs.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import context, op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None
# An older worker knows no task that keeps results: what it runs leaves none, and whoever waits sees the end all the same.
oldest_worker = "0004"

UPGRADE = (
    # Written together with the end of a job, and only for the tasks of kept_task. value is json, not jsonb: what was
    # returned comes back byte for byte. error says why there is no value.
    """
    CREATE TABLE {schema}.result (
        id bigint NOT NULL,
        queue text COLLATE "C" NOT NULL,
        state text COLLATE "C" NOT NULL,
        value json,
        error text,
        finished_at timestamptz NOT NULL,
        expires_at timestamptz NOT NULL,
        CONSTRAINT result_pkey PRIMARY KEY (id, queue)
    ) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000)
    """,
    "CREATE INDEX result_expiry ON {schema}.result (expires_at)",
    # Which tasks keep results, and for how long; workers say it as they start. Who rescues or cancels a job may not know
    # its task.
    """
    CREATE TABLE {schema}.kept_task (
        task text NOT NULL,
        seconds double precision NOT NULL,
        CONSTRAINT kept_task_pkey PRIMARY KEY (task)
    )
    """,
    # A narrow table of its own: the row of the job is not touched. Only the key is indexed, so that every report stays on
    # its page (HOT). token: of the claim that reported.
    """
    CREATE TABLE {schema}.progress (
        id bigint NOT NULL,
        queue text COLLATE "C" NOT NULL,
        token bigint NOT NULL,
        attempt integer NOT NULL,
        percent double precision,
        message text NOT NULL,
        updated_at timestamptz NOT NULL,
        CONSTRAINT progress_pkey PRIMARY KEY (id, queue)
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 500)
    """,
)

DOWNGRADE = (
    "DROP TABLE {schema}.progress",
    "DROP TABLE {schema}.kept_task",
    "DROP TABLE {schema}.result",
)


def _run(statements: tuple[str, ...]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(UPGRADE)


def downgrade() -> None:
    _run(DOWNGRADE)

"""Keys: the columns of unique keys and of lanes (ordering, concurrency and fairness keys), and the tables of admission.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import context, op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None
# An older worker would settle a job of a lane and not say so: the lane would stand until the next repair.
oldest_worker = "0003"

UPGRADE = (
    # All are NULL for a job without keys, which then takes no byte more. A claim changes none of them (HOT).
    # lane: what the job shares a line with: 'o' and an ordering key, 'c' and a concurrency key, 'f' and a fairness key.
    # lane_rank: the order within the lane, before the id. lane_width: how many of the lane may be admitted at once.
    # admitted: the job holds one of the lane's slots; a job with a lane and without a slot has no position.
    # park: when this job dies, its lane stops until an operator decides.
    """
    ALTER TABLE {schema}.job
        ADD COLUMN unique_key text COLLATE "C",
        ADD COLUMN lane text COLLATE "C",
        ADD COLUMN lane_rank smallint,
        ADD COLUMN lane_width integer,
        ADD COLUMN admitted boolean,
        ADD COLUMN park boolean
    """,
    """
    ALTER TABLE {schema}.dead_letter
        ADD COLUMN unique_key text COLLATE "C",
        ADD COLUMN lane text COLLATE "C",
        ADD COLUMN lane_rank smallint,
        ADD COLUMN lane_width integer,
        ADD COLUMN park boolean
    """,
    # One row for every time that a lane may have a free slot or a new job, written by the transaction that made it so:
    # no commit without its own wake-up. Workers take the rows and admit. The queue is first in the key: what lies here for
    # one that no worker serves must not be read by those of the others.
    """
    CREATE TABLE {schema}.admission (
        id bigint GENERATED ALWAYS AS IDENTITY,
        queue text COLLATE "C" NOT NULL,
        lane text COLLATE "C" NOT NULL,
        due_at timestamptz,
        CONSTRAINT admission_pkey PRIMARY KEY (queue, id)
    ) WITH (
        autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0
    )
    """,
    # What is said of a lane at run time: its width, instead of that of its jobs; whether it is parked.
    """
    CREATE TABLE {schema}.lane (
        lane text COLLATE "C" NOT NULL,
        queue text COLLATE "C" NOT NULL,
        width integer,
        parked_at timestamptz,
        parked_by bigint,
        CONSTRAINT lane_pkey PRIMARY KEY (lane, queue)
    )
    """,
)

DOWNGRADE = (
    "DROP TABLE {schema}.lane",
    "DROP TABLE {schema}.admission",
    """
    ALTER TABLE {schema}.dead_letter
        DROP COLUMN unique_key, DROP COLUMN lane, DROP COLUMN lane_rank, DROP COLUMN lane_width, DROP COLUMN park
    """,
    # What waits for its turn would be stranded without the line that it waits in.
    """
    UPDATE {schema}.job SET position = nextval('{schema}.job_id_seq')
    WHERE lane IS NOT NULL AND position IS NULL AND run_at IS NULL
    """,
    """
    ALTER TABLE {schema}.job
        DROP COLUMN unique_key, DROP COLUMN lane, DROP COLUMN lane_rank, DROP COLUMN lane_width,
        DROP COLUMN admitted, DROP COLUMN park
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

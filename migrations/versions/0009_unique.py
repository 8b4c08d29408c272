"""Unique keys: the job that waits for the running one of its key, windows, and how the one follows the other.

Revision ID: 0009
Revises: 0008
"""

from __future__ import annotations

from alembic import context, op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
# An older worker works on beside it, and never runs two jobs of a key at once: what waits behind a running one has no place
# in line, and none of its statements gives it one. It does not tell a running job that it is superseded, tries it again,
# and leaves what waits behind to the newer workers.
oldest_worker = "0004"

UPGRADE = (
    # A key has two places: that of its job (unique_key), and behind it (next_key), for one job that waits until a running
    # one has ended. So the row of the running one is never touched: no enqueue waits for a worker, nor a worker for one.
    # All are NULL for other jobs. next_mode: 1 follows once the key's job is gone, 2 replaces it as soon as it does not
    # run, 3 supersedes it. next_at: when it may run at the earliest; run_at is infinity meanwhile, which nothing promotes.
    # A claim changes none of them (HOT).
    """
    ALTER TABLE {schema}.job
        ADD COLUMN next_key text COLLATE "C",
        ADD COLUMN next_mode smallint,
        ADD COLUMN next_at timestamptz
    """,
    # No second job of a key until then, whatever has become of the first.
    """
    CREATE TABLE {schema}.unique_window (
        unique_key text COLLATE "C" NOT NULL,
        queue text COLLATE "C" NOT NULL,
        until timestamptz NOT NULL,
        job_id bigint NOT NULL,
        CONSTRAINT unique_window_pkey PRIMARY KEY (unique_key, queue)
    ) WITH (
        autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 500
    )
    """,
    "CREATE INDEX unique_window_end ON {schema}.unique_window (queue, until)",
    # Two payloads as one: lists that stand at the same place in both are joined, elsewhere the newer value counts. By their
    # text, so that numbers stay what they are. once: what is in a list already does not come again.
    # Whatever is no list of arguments or object of keywords (a row written by hand) is replaced, never an error.
    """
    CREATE FUNCTION {schema}.payload_merge(old json, new json, once boolean) RETURNS json
    LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $body$
        SELECT CASE
            WHEN new IS NULL THEN old
            WHEN old IS NULL OR json_typeof(old) <> json_typeof(new) OR json_typeof(new) NOT IN ('array', 'object')
                THEN new
            ELSE (
                SELECT (CASE json_typeof(new) WHEN 'array' THEN '[' ELSE '{' END
                        || coalesce(string_agg(pair.name || pair.item, ',' ORDER BY pair.first, pair.second), '')
                        || CASE json_typeof(new) WHEN 'array' THEN ']' ELSE '}' END)::json
                FROM (
                    SELECT CASE json_typeof(new) WHEN 'array' THEN '' ELSE to_json(coalesce(a.key, b.key))::text || ':' END
                               AS name,
                           a.place AS first, b.place AS second,
                           CASE WHEN json_typeof(a.value) = 'array' AND json_typeof(b.value) = 'array' THEN (
                               SELECT '[' || coalesce(string_agg(one.item, ',' ORDER BY one.place), '') || ']'
                               FROM (
                                   SELECT DISTINCT ON (CASE WHEN once THEN every.item ELSE every.place::text END)
                                          every.item, every.place
                                   FROM (
                                       SELECT e.value::text AS item, e.place FROM json_array_elements(a.value)
                                           WITH ORDINALITY AS e(value, place)
                                       UNION ALL
                                       SELECT e.value::text, json_array_length(a.value) + e.place
                                       FROM json_array_elements(b.value) WITH ORDINALITY AS e(value, place)) AS every
                                   ORDER BY CASE WHEN once THEN every.item ELSE every.place::text END, every.place) AS one)
                           ELSE coalesce(b.value, a.value)::text END AS item
                    FROM (
                        SELECT e.place::text AS key, e.value, e.place
                        FROM json_array_elements(CASE WHEN json_typeof(old) = 'array' THEN old END)
                            WITH ORDINALITY AS e(value, place)
                        UNION ALL
                        SELECT e.key, e.value, e.place FROM json_each(CASE WHEN json_typeof(old) = 'object' THEN old END)
                            WITH ORDINALITY AS e(key, value, place)) AS a
                    FULL JOIN (
                        SELECT e.place::text AS key, e.value, e.place
                        FROM json_array_elements(CASE WHEN json_typeof(new) = 'array' THEN new END)
                            WITH ORDINALITY AS e(value, place)
                        UNION ALL
                        SELECT e.key, e.value, e.place FROM json_each(CASE WHEN json_typeof(new) = 'object' THEN new END)
                            WITH ORDINALITY AS e(key, value, place)) AS b ON b.key = a.key) AS pair)
        END
    $body$
    """,
    # Moves jobs from behind their key into its place, once that is free: its job is gone or, for modes 2 and 3, waits, and
    # is archived then. Each by itself, and without waiting: the place may belong to an enqueue that has not committed, or
    # be taken at this moment. Such a one is left for the next time and holds up no other. They stand in line then, but for
    # those with a lane and those that are not due: these pass through promotion. Twenty of them are a second: enough for
    # one time. In no order, so that the same twenty do not come first again. freed, told: as in settle.sql.
    """
    CREATE FUNCTION {schema}.unique_follow(wanted text, keep boolean) RETURNS bigint[]
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $body$
    DECLARE
        candidate bigint;
        follower record;
        moved bigint[] := '{}';
        refused integer := 0;
    BEGIN
        FOR candidate IN
            SELECT free.id
            FROM (SELECT n.id
                  FROM {schema}.job AS n
                  WHERE n.queue = wanted AND n.next_key IS NOT NULL
                    AND NOT EXISTS (
                        SELECT 1 FROM {schema}.job AS a
                        WHERE a.queue = wanted AND a.unique_key = n.next_key
                          AND (a.lease_id IS NOT NULL OR n.next_mode = 1))
                  ORDER BY n.queue, n.next_key OFFSET 0) AS free
            ORDER BY random()
        LOOP
            EXIT WHEN refused > 20;
            BEGIN
                SELECT n.next_key, n.next_mode INTO follower
                FROM {schema}.job AS n
                WHERE n.id = candidate AND n.queue = wanted AND n.next_key IS NOT NULL
                FOR NO KEY UPDATE SKIP LOCKED;
                CONTINUE WHEN NOT FOUND;
                WITH gone AS (
                    DELETE FROM {schema}.job AS a
                    WHERE a.queue = wanted AND a.unique_key = follower.next_key AND a.lease_id IS NULL
                      AND follower.next_mode > 1
                    RETURNING a.*
                ), freed AS (
                    INSERT INTO {schema}.admission (queue, lane) SELECT queue, lane FROM gone WHERE lane IS NOT NULL
                ), told AS (
                    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
                    SELECT e.id, e.queue, 'superseded', 'superseded while waiting', at, at + k.seconds * interval '1 second'
                    FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task,
                         LATERAL (SELECT clock_timestamp() AS at) AS moment
                    ON CONFLICT (id, queue) DO UPDATE
                    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
                        expires_at = excluded.expires_at
                )
                INSERT INTO {schema}.archive (
                    id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at,
                    finished_at)
                SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, 'superseded',
                       'superseded while waiting', created_at, clock_timestamp()
                FROM gone
                WHERE keep;
                UPDATE {schema}.job AS n
                SET unique_key = n.next_key, next_key = NULL, next_mode = NULL, next_at = NULL,
                    run_at = CASE WHEN n.lane IS NOT NULL THEN coalesce(n.next_at, clock_timestamp())
                                  WHEN n.next_at > clock_timestamp() THEN n.next_at END,
                    position = CASE WHEN n.lane IS NULL AND coalesce(n.next_at <= clock_timestamp(), true)
                                    THEN nextval('{schema}.job_id_seq') END
                WHERE n.id = candidate AND n.queue = wanted;
                moved := moved || candidate;
            EXCEPTION WHEN lock_not_available OR unique_violation OR deadlock_detected THEN
                refused := refused + 1;
            END;
        END LOOP;
        RETURN moved;
    END
    $body$
    """,
    # Archives what has one of these keys, waits, and is too old to be run: the sweep has not come to it yet, and meanwhile
    # it must not keep newer jobs of its key away. With the rights of the owner, since who only enqueues may neither see
    # whether a job runs nor remove one; it does nothing that the sweep would not do. In the order in which enqueues take
    # keys. gone, kept, woken, told: as in job_expire.
    """
    CREATE FUNCTION {schema}.unique_expire(wanted text, keys text[], keep boolean) RETURNS text[]
    LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
        WITH late AS MATERIALIZED (
            SELECT id
            FROM {schema}.job
            WHERE queue = wanted AND lease_id IS NULL AND expires_at <= clock_timestamp() AND id = ANY (ARRAY(
                SELECT id FROM {schema}.job WHERE queue = wanted AND unique_key = ANY (keys)
                UNION ALL
                SELECT id FROM {schema}.job WHERE queue = wanted AND next_key = ANY (keys)))
            ORDER BY next_key IS NULL, coalesce(next_key, unique_key)
            FOR UPDATE
        ), gone AS (
            DELETE FROM {schema}.job WHERE queue = wanted AND id = ANY (ARRAY(SELECT id FROM late)) RETURNING *
        ), kept AS (
            INSERT INTO {schema}.archive (
                id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at,
                finished_at)
            SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, 'expired',
                   CASE WHEN attempt = 0 THEN 'expired before it ran' ELSE 'expired before its next attempt' END,
                   created_at, clock_timestamp()
            FROM gone
            WHERE keep
        ), woken AS (
            INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM gone WHERE lane IS NOT NULL
        ), told AS (
            INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
            SELECT e.id, e.queue, 'expired',
                   CASE WHEN attempt = 0 THEN 'expired before it ran' ELSE 'expired before its next attempt' END,
                   at, at + k.seconds * interval '1 second'
            FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task,
                 LATERAL (SELECT clock_timestamp() AS at) AS moment
            ON CONFLICT (id, queue) DO UPDATE
            SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
                expires_at = excluded.expires_at
        )
        SELECT array_agg(coalesce(unique_key, next_key)) FROM gone
    $body$
    """,
    "REVOKE ALL ON FUNCTION {schema}.unique_expire(text, text[], boolean) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION {schema}.payload_merge(json, json, boolean) FROM PUBLIC",
    "REVOKE ALL ON FUNCTION {schema}.unique_follow(text, boolean) FROM PUBLIC",
)

DOWNGRADE = (
    "DROP FUNCTION {schema}.unique_expire(text, text[], boolean)",
    "DROP FUNCTION {schema}.unique_follow(text, boolean)",
    "DROP FUNCTION {schema}.payload_merge(json, json, boolean)",
    "DROP TABLE {schema}.unique_window",
    # What waits behind a running job would wait for ever: it runs at its time, without its key.
    "UPDATE {schema}.job SET run_at = next_at WHERE next_key IS NOT NULL",
    "ALTER TABLE {schema}.job DROP COLUMN next_key, DROP COLUMN next_mode, DROP COLUMN next_at",
)


def _run(statements: tuple[str, ...]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(UPGRADE)


def downgrade() -> None:
    _run(DOWNGRADE)

-- name: job_expire
-- Archives waiting jobs that are too old, in pieces. What runs is left alone: it comes back here if it is retried. The
-- ranges that are always true are explained at job_claim. SKIP LOCKED, and lease_id read again under the lock: of a claim
-- and a sweep at the same moment one has the job.
-- woken: an expired job may have held a slot of its lane; nobody else would say that it is free. Its row says so in the same
--   commit, as at job_complete.
WITH late AS MATERIALIZED (
    SELECT id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND expires_at IS NOT NULL AND expires_at >= '-infinity' AND expires_at <= (SELECT clock_timestamp())
      AND lease_id IS NULL
    ORDER BY expires_at
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM late))
    RETURNING *
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, 'expired',
           CASE WHEN attempt = 0 THEN 'expired before it ran' ELSE 'expired before its next attempt' END,
           created_at, clock_timestamp()
    FROM gone
    WHERE %(archive)s::bool
), woken AS (
    INSERT INTO {schema}.admission (queue, lane)
    SELECT DISTINCT queue, lane FROM gone WHERE lane IS NOT NULL
    RETURNING lane
), told AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, 'expired', CASE WHEN attempt = 0 THEN 'expired before it ran' ELSE 'expired before its next attempt' END,
           at, at + k.seconds * interval '1 second'
    FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task, LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
    RETURNING result.id
)
SELECT array_agg(id ORDER BY id),
       CASE WHEN %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM woken)
            THEN pg_notify(%(channel)s::text, 'key ' || %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM told) THEN
            pg_notify(%(channel)s::text || '.done',
                      (SELECT CASE WHEN count(*) <= 300 THEN string_agg(told.id::text, ' ') ELSE '' END FROM told)) END
FROM gone

-- name: queue_names
-- Every queue that holds a job, a dead letter or a setting. The recursive walk jumps from queue to queue along the index:
-- its cost follows the number of queues, not of jobs.
WITH RECURSIVE ready AS (
    (SELECT queue FROM {schema}.job WHERE position IS NOT NULL ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.job AS j WHERE j.position IS NOT NULL AND j.queue > ready.queue ORDER BY j.queue LIMIT 1)
    FROM ready WHERE ready.queue IS NOT NULL
), waiting AS (
    (SELECT queue FROM {schema}.job WHERE run_at IS NOT NULL ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.job AS j WHERE j.run_at IS NOT NULL AND j.queue > waiting.queue ORDER BY j.queue LIMIT 1)
    FROM waiting WHERE waiting.queue IS NOT NULL
), blocked AS (
    (SELECT queue FROM {schema}.job WHERE lane IS NOT NULL AND admitted IS NULL AND run_at IS NULL ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT j.queue FROM {schema}.job AS j
            WHERE j.lane IS NOT NULL AND j.admitted IS NULL AND j.run_at IS NULL AND j.queue > blocked.queue
            ORDER BY j.queue LIMIT 1)
    FROM blocked WHERE blocked.queue IS NOT NULL
), dead AS (
    (SELECT queue FROM {schema}.dead_letter ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT d.queue FROM {schema}.dead_letter AS d WHERE d.queue > dead.queue ORDER BY d.queue LIMIT 1)
    FROM dead WHERE dead.queue IS NOT NULL
)
SELECT queue FROM ready WHERE queue IS NOT NULL
UNION SELECT queue FROM waiting WHERE queue IS NOT NULL
UNION SELECT queue FROM dead WHERE queue IS NOT NULL
UNION SELECT name FROM {schema}.queue
UNION SELECT queue FROM {schema}.lane
UNION SELECT queue FROM blocked WHERE queue IS NOT NULL
ORDER BY 1

-- name: queue_status
-- Counts stop at `most`: a page that counts three million rows is a page that nobody can afford to watch.
-- blocked: the ranges, which are always true, are explained at job_claim; without them a million jobs of other queues are read.
SELECT (SELECT count(*) FROM (
            SELECT 1 FROM {schema}.job WHERE queue = %(queue)s::text AND position IS NOT NULL AND lease_id IS NULL
            LIMIT %(most)s::int8) AS ready),
       (SELECT count(*) FROM (
            SELECT 1 FROM {schema}.job WHERE queue = %(queue)s::text AND run_at IS NOT NULL LIMIT %(most)s::int8) AS scheduled),
       (SELECT count(*) FROM (
            SELECT 1 FROM {schema}.lease AS l CROSS JOIN LATERAL unnest(l.job_ids) AS held(id)
            JOIN {schema}.job AS j ON j.id = held.id AND j.queue = %(queue)s::text AND j.lease_id = l.id
            WHERE l.queue = %(queue)s::text LIMIT %(most)s::int8) AS running),
       (SELECT count(*) FROM (
            SELECT 1 FROM {schema}.dead_letter WHERE queue = %(queue)s::text LIMIT %(most)s::int8) AS dead),
       (SELECT paused_at FROM {schema}.queue
        WHERE name = %(queue)s::text AND coalesce(paused_until > clock_timestamp(), true)),
       (SELECT CASE WHEN isfinite(created_at) THEN extract(epoch FROM clock_timestamp() - created_at)::float8 END FROM {schema}.job
        WHERE queue = %(queue)s::text AND position IS NOT NULL AND lease_id IS NULL
        ORDER BY priority DESC, position LIMIT 1),
       (SELECT count(*) FROM (
            SELECT 1 FROM {schema}.job
            WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
              AND lane IS NOT NULL AND admitted IS NULL AND run_at IS NULL
            LIMIT %(most)s::int8) AS blocked)

-- name: job_list
-- Live jobs, oldest id first. Times beyond Python's years are left out, as in job_claim. The state is derived: it is stored nowhere, so it cannot disagree with the row.
SELECT id, queue, task,
       CASE WHEN lease_id IS NOT NULL THEN 'running' WHEN run_at IS NOT NULL THEN 'scheduled'
            WHEN position IS NULL AND lane IS NOT NULL THEN 'blocked' ELSE 'ready' END AS state,
       priority, attempt, max_attempts, lost,
       CASE WHEN run_at >= '0001-01-02' AND run_at < '9999-12-30' THEN run_at END,
       CASE WHEN created_at >= '0001-01-02' AND created_at < '9999-12-30' THEN created_at END,
       cancel_requested, args::text, kwargs::text, errors::text, coalesce(unique_key, next_key)
FROM {schema}.job
WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR task = %(task)s::text)
  AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
  AND (%(state)s::text IS NULL OR %(state)s::text =
       CASE WHEN lease_id IS NOT NULL THEN 'running' WHEN run_at IS NOT NULL THEN 'scheduled'
            WHEN position IS NULL AND lane IS NOT NULL THEN 'blocked' ELSE 'ready' END)
ORDER BY id
LIMIT %(limit)s::int8

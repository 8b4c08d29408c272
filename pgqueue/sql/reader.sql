-- What a role sees that may not read payloads. PostgreSQL asks for the rights on every column that a statement names, read or
-- not, so these are statements of their own; columns and conditions are those of job_list and dead_list.

-- name: payload_rights
-- Whether this role may read arguments and errors, of jobs and of dead letters.
SELECT has_column_privilege('{schema}.job', 'args', 'SELECT') AND has_column_privilege('{schema}.job', 'kwargs', 'SELECT')
       AND has_column_privilege('{schema}.job', 'errors', 'SELECT'),
       has_column_privilege('{schema}.dead_letter', 'args', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'kwargs', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'headers', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'errors', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'reason', 'SELECT')

-- name: job_list_bare
SELECT id, queue, task,
       CASE WHEN lease_id IS NOT NULL THEN 'running' WHEN run_at IS NOT NULL THEN 'scheduled'
            WHEN position IS NULL AND lane IS NOT NULL THEN 'blocked' ELSE 'ready' END AS state,
       priority, attempt, max_attempts, lost,
       CASE WHEN run_at >= '0001-01-02' AND run_at < '9999-12-30' THEN run_at END,
       CASE WHEN created_at >= '0001-01-02' AND created_at < '9999-12-30' THEN created_at END,
       cancel_requested, NULL, NULL, NULL, coalesce(unique_key, next_key), true
FROM {schema}.job
WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR task = %(task)s::text)
  AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
  AND (%(state)s::text IS NULL OR %(state)s::text =
       CASE WHEN lease_id IS NOT NULL THEN 'running' WHEN run_at IS NOT NULL THEN 'scheduled'
            WHEN position IS NULL AND lane IS NOT NULL THEN 'blocked' ELSE 'ready' END)
ORDER BY id
LIMIT %(limit)s::int8

-- name: dead_list_bare
SELECT id, queue, task, NULL, NULL, priority, attempt, max_attempts, lost, NULL, NULL,
       CASE WHEN created_at >= '0001-01-02' AND created_at < '9999-12-30' THEN created_at END,
       '', died_at, true
FROM {schema}.dead_letter
WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR task = %(task)s::text)
  AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
ORDER BY died_at DESC, id DESC
LIMIT %(limit)s::int8

-- name: dead_list
-- Newest first. Every filter is optional.
SELECT id, queue, task, args::text, kwargs::text, priority, attempt, max_attempts, lost, headers::text, errors::text,
       CASE WHEN created_at >= '0001-01-02' AND created_at < '9999-12-30' THEN created_at END,
       reason, died_at
FROM {schema}.dead_letter
WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR task = %(task)s::text)
  AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
ORDER BY died_at DESC, id DESC
LIMIT %(limit)s::int8

-- name: dead_redrive
-- Back into the queue under the same id, with all attempts anew and the history of errors kept, oldest first.
-- The id keeps its place in an ordering key's line. resumed: who redrives the job that has parked its lane has decided about it.
-- ON CONFLICT: whose unique key has a job stays where it is, and is told; it must not fail the others. So does one whose key
--   has a job waiting behind.
-- after_at, after_id: where the last batch ended, since what stays would be picked again. The time travels as text, as in
--   job_rescue.
WITH picked AS MATERIALIZED (
    SELECT *
    FROM {schema}.dead_letter
    WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR task = %(task)s::text)
      AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
      AND (died_at, id) > (%(after_at)s::timestamptz, %(after_id)s::int8)
    ORDER BY died_at, id
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
), back AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, max_attempts, timeout, retry, headers, errors, created_at,
        unique_key, lane, lane_rank, lane_width, park)
    SELECT id, queue, task, args, kwargs, priority, CASE WHEN lane IS NULL THEN nextval('{schema}.job_id_seq') END,
           greatest(max_attempts, 1), timeout, retry, headers, errors, created_at, unique_key, lane, lane_rank, lane_width, park
    FROM (SELECT *
          FROM picked
          WHERE NOT EXISTS (SELECT 1 FROM {schema}.job AS n WHERE n.queue = picked.queue AND n.next_key = picked.unique_key)
          ORDER BY died_at, id) AS sorted
    ON CONFLICT (unique_key, queue) WHERE unique_key IS NOT NULL DO NOTHING
    RETURNING id, queue, lane
), gone AS (
    DELETE FROM {schema}.dead_letter AS d USING back WHERE d.id = back.id AND d.queue = back.queue
), resumed AS (
    UPDATE {schema}.lane AS l SET parked_at = NULL, parked_by = NULL
    FROM back
    WHERE l.lane = back.lane AND l.queue = back.queue AND l.parked_by = back.id
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM back WHERE lane IS NOT NULL
), told AS (
    SELECT queue, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, queue) END AS sent,
           CASE WHEN %(channel)s::text IS NOT NULL AND keyed THEN pg_notify(%(channel)s::text, 'key ' || queue) END AS keyed
    FROM (SELECT queue, bool_or(lane IS NOT NULL) AS keyed FROM back GROUP BY queue) AS queues
)
SELECT picked.id, back.id IS NOT NULL, picked.died_at::text, told.sent, told.keyed
FROM picked
LEFT JOIN back ON back.id = picked.id AND back.queue = picked.queue
LEFT JOIN told ON told.queue = back.queue
ORDER BY picked.died_at, picked.id

-- name: dead_purge
-- For good. In batches, so that no purge is one long transaction; MATERIALIZED, so that no plan takes more than a batch.
WITH picked AS MATERIALIZED (
    SELECT id, queue
    FROM {schema}.dead_letter
    WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR task = %(task)s::text)
      AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
      AND died_at <= clock_timestamp() - %(older_than)s::float8 * interval '1 second'
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.dead_letter AS d USING picked WHERE d.id = picked.id AND d.queue = picked.queue RETURNING d.id

-- name: dead_count
SELECT count(*) FROM {schema}.dead_letter
WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
  AND (%(task)s::text IS NULL OR task = %(task)s::text)
  AND (%(ids)b::int8[] IS NULL OR id = ANY (%(ids)b::int8[]))
  AND died_at <= clock_timestamp() - %(older_than)s::float8 * interval '1 second'

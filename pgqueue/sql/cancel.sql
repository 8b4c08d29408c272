-- name: job_newest
-- Where a walk over all live jobs ends: what is enqueued later is not meant.
SELECT coalesce(max(id), 0) FROM {schema}.job

-- name: job_page
-- One step of that walk: so many rows from an id on, and which of them are meant. MATERIALIZED and without conditions
--   inside: a step costs the same however few match.
-- coalesce: what waits behind the running job of its key has it as next_key.
WITH page AS MATERIALIZED (
    SELECT id, queue, task, lane, coalesce(unique_key, next_key) AS unique_key, lease_id
    FROM {schema}.job
    WHERE id > %(after)s::int8 AND id <= %(newest)s::int8
    ORDER BY id
    LIMIT %(limit)s::int8
), chosen AS (
    SELECT id, queue, lease_id
    FROM page
    WHERE (%(queue)s::text IS NULL OR queue = %(queue)s::text)
      AND (%(task)s::text IS NULL OR task = %(task)s::text)
      AND (%(lane)s::text IS NULL OR lane = %(lane)s::text)
      AND (%(unique_key)s::text IS NULL OR unique_key = %(unique_key)s::text)
)
SELECT NULL AS queue, count(*), max(id), NULL::bigint[] FROM page
UNION ALL
SELECT queue, count(lease_id), NULL, array_agg(id ORDER BY id) FROM chosen GROUP BY queue

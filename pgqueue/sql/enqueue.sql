-- name: job_enqueue
-- One job. clock_timestamp(), not now(): a caller's long transaction must not make a delay start before the call.
-- pg_notify is a column of the answer: a CTE that nobody reads would not run. It is delivered at the caller's commit.
WITH placed AS (
    SELECT nextval('{schema}.job_id_seq') AS id, clock_timestamp() AS at
), timed AS (
    SELECT id, at, coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second') AS due FROM placed
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at)
    SELECT id, %(queue)s::text, %(task)s::text, %(args)s::json, %(kwargs)s::json, %(priority)s::int2,
           CASE WHEN due > at THEN NULL ELSE id END, CASE WHEN due > at THEN due END,
           %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, at
    FROM timed
    RETURNING id
)
SELECT id, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(prefix)s::text || %(queue)s::text) END
FROM new

-- name: job_enqueue_many
-- Jobs that differ in their arguments only. Arrays are bound in binary (%b): as text this costs three times as much.
-- The subquery with nextval is not flattened (it is volatile), so ids follow the order of the input.
-- The answer is one row with one array: a row per id would cost more than the insert.
WITH placed AS (
    SELECT nextval('{schema}.job_id_seq') AS id, args, kwargs
    FROM unnest(%(args)b::text[], %(kwargs)b::text[]) AS given(args, kwargs)
), moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), timed AS MATERIALIZED (
    SELECT at, coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second') AS due FROM moment
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at)
    SELECT id, %(queue)s::text, %(task)s::text, args::json, kwargs::json, %(priority)s::int2,
           CASE WHEN due > at THEN NULL ELSE id END, CASE WHEN due > at THEN due END,
           %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, at
    FROM placed, timed
    RETURNING id
)
SELECT array_agg(id ORDER BY id),
       CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(prefix)s::text || %(queue)s::text) END
FROM new

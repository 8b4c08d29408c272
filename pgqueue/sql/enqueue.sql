-- name: job_enqueue
-- One job. clock_timestamp(), not now(): a caller's long transaction must not make a delay start before the call.
-- Subqueries, not WITH: a CTE that inserts costs as much as the insert itself; one with volatile functions is not flattened
--   into its reader, so id and moment are taken once.
-- pg_notify is a column of the answer: what nobody reads would not run. It is delivered at the caller's commit.
INSERT INTO {schema}.job (
    id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at)
SELECT id, %(queue)s::text, %(task)s::text, %(args)s::json, %(kwargs)s::json, %(priority)s::int2,
       CASE WHEN due > at THEN NULL ELSE id END, CASE WHEN due > at THEN due END,
       %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, at
FROM (SELECT nextval('{schema}.job_id_seq') AS id, clock_timestamp() AS at) AS placed,
     LATERAL (SELECT coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second') AS due) AS timed
RETURNING id, CASE WHEN %(channel)s::text IS NOT NULL
                   THEN pg_notify(%(channel)s::text, %(prefix)s::text || %(queue)s::text) END

-- name: job_enqueue_many
-- Jobs that differ in their arguments only. Arrays are bound in binary (%b): as text this costs three times as much.
-- unnest in the select list: in FROM it would first put everything into a store of its own.
-- kwargs NULL: no job has any; the shorter of the two lists is filled up.
-- The subquery with nextval is not flattened (it is volatile), so ids follow the order of the input.
-- timed is read as scalars: joined to every row, the time would be compared anew for every job.
-- The answer is one row with one array: a row per id would cost more than the insert.
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), timed AS MATERIALIZED (
    SELECT at, coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second') AS due FROM moment
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at)
    SELECT id, %(queue)s::text, %(task)s::text, args::json, kwargs::json, %(priority)s::int2,
           CASE WHEN (SELECT due > at FROM timed) THEN NULL ELSE id END, (SELECT due FROM timed WHERE due > at),
           %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, (SELECT at FROM timed)
    FROM (SELECT nextval('{schema}.job_id_seq') AS id, args, kwargs
          FROM (SELECT unnest(%(args)b::text[]) AS args, unnest(%(kwargs)b::text[]) AS kwargs) AS given) AS placed
    RETURNING id
)
SELECT array_agg(id ORDER BY id),
       CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(prefix)s::text || %(queue)s::text) END
FROM new

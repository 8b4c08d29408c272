-- name: job_enqueue_keyed
-- Jobs with keys, each with its own arguments, unique key and lane; what is written at job_enqueue_many holds here too.
-- position: none for a job with a lane: it gets one when a worker admits it. Nothing is looked up and nothing is locked here:
--   the snapshot of the caller's transaction may be old, and a slow caller must not hold up workers.
-- woken: one row per lane and commit, so that no commit comes without its own wake-up. A job for later is announced when it is
--   due.
-- expires_at: counted from the moment at which the job may run first.
-- ON CONFLICT: waits for the transaction that holds the key, and goes on when that rolls back; the answer leaves out whom a
--   committed job of the same key has kept away. Of two with one key in one call the first is taken.
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), timed AS MATERIALIZED (
    SELECT at, coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second') AS due FROM moment
), placed AS MATERIALIZED (
    SELECT nextval('{schema}.job_id_seq') AS id, number, args, kwargs, unique_key, lane
    FROM unnest(%(args)b::text[], %(kwargs)b::text[], %(unique_keys)b::text[], %(lanes)b::text[])
         WITH ORDINALITY AS given(args, kwargs, unique_key, lane, number)
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at,
        unique_key, lane, lane_rank, lane_width, park, expires_at)
    SELECT id, %(queue)s::text, %(task)s::text, args::json, kwargs::json, %(priority)s::int2,
           CASE WHEN lane IS NULL AND (SELECT due <= at FROM timed) THEN id END, (SELECT due FROM timed WHERE due > at),
           %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, (SELECT at FROM timed),
           unique_key, lane, %(lane_rank)s::int2, %(lane_width)s::int4, %(park)s::bool,
           (SELECT greatest(due, at) + %(expires_in)s::float8 * interval '1 second' FROM timed)
    FROM placed
    ORDER BY number
    ON CONFLICT (unique_key, queue) WHERE unique_key IS NOT NULL DO NOTHING
    RETURNING id
), woken AS (
    INSERT INTO {schema}.admission (queue, lane)
    SELECT DISTINCT %(queue)s::text, placed.lane FROM placed JOIN new ON new.id = placed.id
    WHERE placed.lane IS NOT NULL AND (SELECT due <= at FROM timed)
)
SELECT array_agg(new.id ORDER BY placed.number),
       CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(prefix)s::text || %(queue)s::text) END
FROM placed LEFT JOIN new ON new.id = placed.id

-- name: job_claim
-- Takes up to `limit` ready jobs of one queue, highest priority first, first come first served, under one new lease.
-- spans: the low-water hints. Each span is a range of priorities and the position to start behind; dead rows before it
--   are not visited. The nested loop over the spans stops at the outer LIMIT, so rows beyond it are never locked.
-- left_out: tasks whose jobs are passed over and keep their places. Without it a task that fails would hold up all others.
-- halted: what the queue's row says, read once: a pause of the whole queue, and tasks that are paused, whose jobs keep their
--   places too. A pause whose end has passed says nothing any more. Numbers and CASE: a row written by hand must not fail
--   the claims of its queue. A queue that is limited counts as paused here: who does not know of its limit must not break it
--   (job_claim_limited).
-- expires_at: what is too old is left to the sweep (job_expire); without it a job would run after it has expired.
-- queue >= and <=: true whenever queue = is, and dropped by the index scan. They make the planner expect a single row, so
--   that it reads in index order; expecting thousands (statistics of a queue table are always wrong), it would sort them all.
-- MATERIALIZED and ARRAY(SELECT …): the lock is taken once, whatever the plan; without them a nested loop may run the
--   inner select again and claim more than `limit`.
-- NO KEY: does not conflict with the key-share locks of a host's foreign keys. SKIP LOCKED: claimers do not queue up.
-- run_at IS NULL: a row written by hand may have a place in line and a time; the time counts.
-- least(): such a row may also have the largest attempt there is, and must not fail the whole claim.
-- lease_id and attempt are in no index: the update stays on its page (HOT).
-- created_at in UTC, without a zone: the client would ask the session's zone about every single row. CASE around it: a time beyond Python's years (infinity, written by hand) must not make the whole batch unreadable.
-- relaxed: a lost claim is a redelivery, so it needs no fsync; set for this transaction only, and never in a caller's.
WITH halted AS MATERIALIZED (
    SELECT most_running IS NOT NULL OR rate IS NOT NULL
               OR paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true) AS whole,
           CASE WHEN jsonb_typeof(paused_tasks) = 'object' THEN paused_tasks END AS tasks
    FROM {schema}.queue
    WHERE name = %(queue)s::text
      AND (paused_at IS NOT NULL OR paused_tasks IS NOT NULL OR most_running IS NOT NULL OR rate IS NOT NULL)
), ready AS MATERIALIZED (
    SELECT j.id
    FROM unnest(%(floors)b::int8[]::int2[], %(ceilings)b::int8[]::int2[], %(after)b::int8[]) AS span(floor, ceiling, after)
    CROSS JOIN LATERAL (
        SELECT id
        FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
          AND position IS NOT NULL AND lease_id IS NULL AND run_at IS NULL
          AND task <> ALL (%(left_out)b::text[])
          AND task <> ALL (ARRAY(
              SELECT paused.task
              FROM halted CROSS JOIN LATERAL jsonb_each(tasks) AS paused(task, term)
              WHERE CASE WHEN jsonb_typeof(term -> 'until') = 'number'
                         THEN (term ->> 'until')::numeric > extract(epoch FROM clock_timestamp()) ELSE true END))
          AND (expires_at IS NULL OR expires_at > (SELECT clock_timestamp()))
          AND priority >= span.floor AND priority <= span.ceiling AND position > span.after
        ORDER BY priority DESC, position
        LIMIT %(limit)s::int8
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS j
    WHERE NOT EXISTS (SELECT 1 FROM halted WHERE whole)
    LIMIT %(limit)s::int8
), granted AS (
    INSERT INTO {schema}.lease (queue, worker_id, job_ids, claimed_at, expires_at)
    SELECT %(queue)s::text, %(worker_id)s::int8, ids, at, at + %(lease)s::float8 * interval '1 second'
    FROM (SELECT array_agg(id) AS ids FROM ready) AS taken,
         (SELECT clock_timestamp() AS at,
                 CASE WHEN %(relaxed)s::bool THEN set_config('synchronous_commit', 'off', true) END AS relaxed) AS moment
    WHERE ids IS NOT NULL
    RETURNING id
)
UPDATE {schema}.job AS j
SET lease_id = granted.id, attempt = least(j.attempt, 2147483646) + 1
FROM granted
WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM ready))
RETURNING j.id, j.queue, j.task, j.lease_id, j.attempt, j.max_attempts, j.lost, j.priority, j.position, j.timeout,
          CASE WHEN j.created_at >= '0001-01-02' AND j.created_at < '9999-12-30' THEN j.created_at AT TIME ZONE 'UTC' END,
          j.args::text, j.kwargs::text, j.retry::text, j.headers::text,
          CASE WHEN j.expires_at IS NOT NULL
               THEN extract(epoch FROM least(j.expires_at, '9999-01-01') - clock_timestamp())::float8 END

-- name: lease_extend
-- Says which of the given (id, token) pairs are still held, after moving the end of their leases. greatest(): a short
-- extension must not take away time that a heartbeat gave.
WITH extended AS (
    UPDATE {schema}.lease
    SET expires_at = greatest(expires_at, clock_timestamp() + %(lease)s::float8 * interval '1 second')
    WHERE queue = %(queue)s::text AND id = ANY (%(leases)b::int8[])
    RETURNING id
)
SELECT array_agg(id)
FROM {schema}.job
WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
  AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
  AND lease_id IN (SELECT id FROM extended)

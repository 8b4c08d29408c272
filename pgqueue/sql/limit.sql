-- Limits of queues: how many of its jobs run at once, and how often they start. A claim from a limited queue is a transaction of
-- four statements: begin, the lock of the queue's limit, the claim, commit. So what is counted was committed. job_claim takes
-- nothing from a queue that is limited, so who does not know of the limit cannot break it.
-- A bucket of tokens is the pair of tokens and refilled_at: so many there were at that moment. NULL is a full one.

-- name: limit_begin
-- READ COMMITTED, whatever the role's default: the statement after the lock must see what was committed before the lock came.
BEGIN ISOLATION LEVEL READ COMMITTED

-- name: limit_lock
-- The lock is that of the transaction: nothing is left behind in the session. Claims of other queues do not meet it.
-- wait: False for a worker, which has other queues too: whoever holds the lock may be frozen. The answer is whether it is ours.
-- relaxed: what a crash forgets of a claim it forgets of its tokens, too.
-- idle_in_transaction_session_timeout, for this transaction: a worker that is frozen now, or cut off, gives the lock back.
SELECT CASE WHEN %(wait)s::bool THEN pg_advisory_xact_lock(hash)::text = '' ELSE pg_try_advisory_xact_lock(hash) END,
       set_config('synchronous_commit', 'off', true), set_config('idle_in_transaction_session_timeout', '5s', true)
FROM hashtextextended(%(queue)s::text, hashtextextended('{schema}.limit', 0)) AS hash

-- name: job_claim_limited
-- As job_claim, and what is written there holds here; but no more than the limits of the queue leave room for.
-- The answer is short, whatever the jobs hold: a client that is frozen does not read, and a server that has to wait for it would
--   wait with the lock in its hands. What the jobs hold is read afterwards (job_claimed).
-- setting: without its row the queue has no limit.
-- bucket: SKIP LOCKED, since somebody's open transaction may hold the row: then nothing is claimed now, and nobody waits. What a
--   concurrent change has left is read again under the lock.
-- filled: greatest() and least() on both sides: a clock that was set back adds nothing, and a row written by hand must not fail
--   the claims of its queue. A bucket that was filled in the future begins anew now (early), or it would rest until then.
-- listed: jobs of all leases, those settled already included: never less than run, and cheap. Only where that leaves too little
--   room the jobs themselves are counted. Slots follow from rows that live, so none can leak.
--   A lease that ended counts until it is rescued, and for a minute at most: without the bound, dead rows of leases that an old
--   snapshot keeps would be read at every claim.
-- allowed: what is asked for, up to the room that there is. Beyond its free runners a claimer gets a quarter of that room at most,
--   so that it does not hoard what others could run.
-- spent: in the same transaction, and what was really taken.
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), setting AS MATERIALIZED (
    SELECT most_running, rate, paused_at IS NOT NULL AND coalesce(paused_until > at, true) AS paused,
           CASE WHEN jsonb_typeof(paused_tasks) = 'object' THEN paused_tasks END AS tasks
    FROM {schema}.queue, moment
    WHERE name = %(queue)s::text
), bucket AS MATERIALIZED (
    SELECT greatest(least(rate, 1e9), 0) AS rate, greatest(coalesce(burst, 1), 1) AS burst, tokens, refilled_at
    FROM {schema}.queue
    WHERE name = %(queue)s::text AND rate IS NOT NULL
    FOR NO KEY UPDATE SKIP LOCKED
), filled AS MATERIALIZED (
    SELECT rate, burst, at, refilled_at > at AS early,
           CASE WHEN isfinite(refilled_at) AND tokens IS NOT NULL
                THEN greatest(least(tokens + rate * greatest(extract(epoch FROM at - refilled_at)::float8, 0), burst), 0)
                ELSE burst END AS tokens
    FROM bucket, moment
), held AS MATERIALIZED (
    SELECT id, job_ids
    FROM {schema}.lease
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND expires_at > (SELECT at - interval '1 minute' FROM moment)
), listed AS MATERIALIZED (
    SELECT coalesce(sum(cardinality(job_ids)), 0) AS jobs FROM held
), room AS MATERIALIZED (
    SELECT CASE WHEN most_running IS NULL THEN NULL
                WHEN most_running - (SELECT jobs FROM listed) >= %(limit)s::int8
                THEN most_running - (SELECT jobs FROM listed)
                ELSE greatest(most_running - (
                    SELECT count(*)
                    FROM held CROSS JOIN LATERAL unnest(held.job_ids) AS one(id)
                    JOIN {schema}.job AS j ON j.id = one.id AND j.queue = %(queue)s::text AND j.lease_id = held.id), 0)
                END::int8 AS running,
           CASE WHEN rate IS NOT NULL THEN coalesce((SELECT floor(tokens) FROM filled), 0)::int8 END AS tokens,
           coalesce(paused, false) AS paused, tasks
    FROM (SELECT 1) AS once LEFT JOIN setting ON true
), allowed AS MATERIALIZED (
    SELECT CASE WHEN paused THEN 0
                WHEN least(running, tokens) IS NULL THEN %(limit)s::int8
                ELSE least(%(limit)s::int8, running, tokens, greatest(%(free)s::int8, least(running, tokens) / 4)) END AS jobs
    FROM room
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
              FROM room CROSS JOIN LATERAL jsonb_each(tasks) AS paused(task, term)
              WHERE CASE WHEN jsonb_typeof(term -> 'until') = 'number'
                         THEN (term ->> 'until')::numeric > extract(epoch FROM clock_timestamp()) ELSE true END))
          AND (expires_at IS NULL OR expires_at > (SELECT clock_timestamp()))
          AND priority >= span.floor AND priority <= span.ceiling AND position > span.after
        ORDER BY priority DESC, position
        LIMIT (SELECT jobs FROM allowed)
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS j
    LIMIT (SELECT jobs FROM allowed)
), granted AS (
    INSERT INTO {schema}.lease (queue, worker_id, job_ids, claimed_at, expires_at)
    SELECT %(queue)s::text, %(worker_id)s::int8, ids, at, clock_timestamp() + %(lease)s::float8 * interval '1 second'
    FROM (SELECT array_agg(id) AS ids FROM ready) AS taken, moment
    WHERE ids IS NOT NULL
    RETURNING id
), claimed AS (
    UPDATE {schema}.job AS j
    SET lease_id = granted.id, attempt = least(j.attempt, 2147483646) + 1
    FROM granted
    WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM ready))
    RETURNING j.id
), counted AS MATERIALIZED (
    SELECT count(*) AS jobs FROM claimed
), spent AS (
    UPDATE {schema}.queue
    SET tokens = filled.tokens - counted.jobs, refilled_at = filled.at
    FROM filled, counted
    WHERE name = %(queue)s::text AND (counted.jobs > 0 OR filled.early)
)
SELECT (SELECT id FROM granted), counted.jobs, room.running, room.tokens, allowed.jobs,
       filled.tokens - counted.jobs, filled.rate, filled.burst
FROM room CROSS JOIN allowed CROSS JOIN counted LEFT JOIN filled ON true

-- name: job_claimed
-- What the jobs of this lease hold, where it is still the current one. Found through the lease: their ids would have to be read and
-- written by the client, which takes as long as the statement.
SELECT j.id, j.queue, j.task, j.lease_id, j.attempt, j.max_attempts, j.lost, j.priority, j.position, j.timeout,
       CASE WHEN j.created_at >= '0001-01-02' AND j.created_at < '9999-12-30' THEN j.created_at AT TIME ZONE 'UTC' END,
       j.args::text, j.kwargs::text, j.retry::text, j.headers::text,
       CASE WHEN j.expires_at IS NOT NULL
            THEN extract(epoch FROM least(j.expires_at, '9999-01-01') - clock_timestamp())::float8 END
FROM {schema}.job AS j
WHERE j.queue = %(queue)s::text AND j.lease_id = %(token)s::int8
  AND j.id = ANY (ARRAY(
      SELECT unnest(job_ids) FROM {schema}.lease WHERE id = %(token)s::int8 AND queue = %(queue)s::text))

-- name: limit_commit
COMMIT

-- name: limit_waits
-- Whether a job of this queue is ready; it waits for the limit, then.
SELECT (SELECT id FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
          AND position IS NOT NULL AND lease_id IS NULL AND run_at IS NULL
        ORDER BY priority DESC, position
        LIMIT 1) IS NOT NULL

-- name: limit_set
-- What is not given is not limited any more. A bucket goes on with what is in it, so that saying the same once more gives nobody
-- tokens; where there was no rate before it is full.
INSERT INTO {schema}.queue AS q (name, most_running, rate, burst)
VALUES (%(queue)s::text, %(running)s::int4, %(rate)s::float8, %(burst)s::int4)
ON CONFLICT (name) DO UPDATE
SET most_running = excluded.most_running, rate = excluded.rate, burst = excluded.burst,
    tokens = CASE WHEN q.rate IS NOT NULL AND excluded.rate IS NOT NULL THEN q.tokens END,
    refilled_at = CASE WHEN q.rate IS NOT NULL AND excluded.rate IS NOT NULL THEN q.refilled_at END
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END

-- name: limit_lift
UPDATE {schema}.queue
SET most_running = NULL, rate = NULL, burst = NULL, tokens = NULL, refilled_at = NULL
WHERE name = %(queue)s::text AND (most_running IS NOT NULL OR rate IS NOT NULL)
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END

-- name: limit_list
-- With what is in the buckets now, as job_claim_limited has it.
SELECT name, most_running, rate, CASE WHEN rate IS NOT NULL THEN greatest(coalesce(burst, 1), 1) END,
       CASE WHEN rate IS NULL THEN NULL
            WHEN isfinite(refilled_at) AND tokens IS NOT NULL
            THEN greatest(least(tokens + greatest(least(rate, 1e9), 0)
                                         * greatest(extract(epoch FROM clock_timestamp() - refilled_at)::float8, 0),
                                greatest(coalesce(burst, 1), 1)), 0)
            ELSE greatest(coalesce(burst, 1), 1) END::float8,
       limit_definition IS NOT NULL
FROM {schema}.queue
WHERE (most_running IS NOT NULL OR rate IS NOT NULL) AND (%(names)b::text[] IS NULL OR name = ANY (%(names)b::text[]))
ORDER BY name

-- name: limit_affirm
-- Says which of these definitions must be written: what is not there, and what says something else. A definition that was superseded
-- comes back only when no process that says the newer one was seen for a while: as for schedules (schedule_affirm).
-- SKIP LOCKED: somebody's open transaction may hold a row. What is affirmed is affirmed again soon.
WITH given AS MATERIALIZED (
    SELECT name, definition FROM unnest(%(names)b::text[], %(definitions)b::text[]) AS given(name, definition)
), ours AS MATERIALIZED (
    SELECT q.name
    FROM {schema}.queue AS q JOIN given ON given.name = q.name AND given.definition = q.limit_definition
    WHERE q.limit_affirmed_at IS NULL OR q.limit_affirmed_at < clock_timestamp() - %(often)s::float8 * interval '1 second'
    FOR NO KEY UPDATE OF q SKIP LOCKED
), affirmed AS (
    UPDATE {schema}.queue SET limit_affirmed_at = clock_timestamp() WHERE name = ANY (ARRAY(SELECT name FROM ours))
)
SELECT given.name
FROM given LEFT JOIN {schema}.queue AS q ON q.name = given.name
WHERE q.limit_definition IS NULL
   OR (q.limit_definition <> given.definition
       AND (given.definition <> ALL (coalesce(q.limit_superseded, '{}')) OR q.limit_affirmed_at IS NULL
            OR q.limit_affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second'))

-- name: limit_define
-- What the code says, over what it said before, and over what was set by hand before that. Of processes that start together one
-- writes; the rule is that of limit_affirm. The bucket goes on, as in limit_set.
INSERT INTO {schema}.queue AS q (name, most_running, rate, burst, limit_definition, limit_affirmed_at)
VALUES (%(queue)s::text, %(running)s::int4, %(rate)s::float8, %(burst)s::int4, %(definition)s::text, clock_timestamp())
ON CONFLICT (name) DO UPDATE
SET most_running = excluded.most_running, rate = excluded.rate, burst = excluded.burst,
    tokens = CASE WHEN q.rate IS NOT NULL AND excluded.rate IS NOT NULL THEN q.tokens END,
    refilled_at = CASE WHEN q.rate IS NOT NULL AND excluded.rate IS NOT NULL THEN q.refilled_at END,
    limit_definition = excluded.limit_definition, limit_affirmed_at = excluded.limit_affirmed_at,
    limit_superseded = CASE WHEN q.limit_definition IS NULL THEN q.limit_superseded
        ELSE (array_remove(coalesce(q.limit_superseded, '{}'), excluded.limit_definition)
              || q.limit_definition)[greatest(1, cardinality(coalesce(q.limit_superseded, '{}')) - 30):] END
WHERE q.limit_definition IS NULL
   OR (q.limit_definition <> excluded.limit_definition
       AND (excluded.limit_definition <> ALL (coalesce(q.limit_superseded, '{}')) OR q.limit_affirmed_at IS NULL
            OR q.limit_affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second'))
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END

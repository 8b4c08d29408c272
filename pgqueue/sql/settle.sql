-- Every statement here is fenced: a row is touched only while its lease_id is the token that came with its id. The pair is
-- compared position by position, since one caller may hold an old and a new token at once. ids are unique and ascending:
-- width_bucket finds the place of an id by binary search; array_position, reading from the start, took half of the time of a
-- completion of a thousand.
-- The answer is how many were accepted, and which only when some were not: nearly always all are, and reading their ids back
-- would cost the client as much as sending them. Then whether lanes have a free slot now: a worker that goes on looks for itself,
-- others are told (lanes_channel).
-- told: what ends otherwise than by completion leaves an entry in result too, where its task keeps results: somebody may wait.
-- superseded: what a newer job of its unique key waits for (next_mode 3) does not count as the newest, however it ended.

-- name: job_complete
-- Removes finished jobs, keeps them in the archive if asked, and gives back the leases that hold nothing any more.
-- leases: those whose jobs the caller believes all settled. The row goes only if that is true: each of its jobs is either
--   removed here or no longer its own; a lease row that went too early would strand a running job for ever.
-- woken: a lane has a free slot; its row says so in the same commit, so that no crash can leave the lane standing.
-- SKIP LOCKED: a rescue holds a lease and waits for its jobs; waiting for the lease here would be a deadlock. A lease that
--   is skipped expires and is rescued empty.
WITH gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
      AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
    RETURNING *
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors,
           CASE WHEN unique_key IS NOT NULL AND EXISTS (
                    SELECT 1 FROM {schema}.job AS n
                    WHERE n.queue = %(queue)s::text AND n.next_key = gone.unique_key AND n.next_mode = 3)
                THEN 'superseded' ELSE %(state)s::text END,
           (%(reasons)b::text[])[width_bucket(id, %(ids)b::int8[])], created_at, clock_timestamp()
    FROM gone
    WHERE %(archive)s::bool
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM gone WHERE lane IS NOT NULL
), freed AS (
    DELETE FROM {schema}.lease
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(
        SELECT id
        FROM {schema}.lease AS l
        WHERE queue = %(queue)s::text AND id = ANY (%(leases)b::int8[])
          AND (cardinality(job_ids) = (SELECT count(*) FROM gone WHERE gone.lease_id = l.id)
               OR NOT EXISTS (
                   SELECT 1
                   FROM {schema}.job AS j
                   WHERE j.queue = %(queue)s::text AND j.id = ANY (l.job_ids) AND j.lease_id = l.id
                     AND j.id <> ALL (ARRAY(SELECT gone.id FROM gone))))
        FOR UPDATE SKIP LOCKED))
)
SELECT count(*), CASE WHEN count(*) < cardinality(%(ids)b::int8[]) THEN array_agg(id) END, count(lane) > 0,
       CASE WHEN count(lane) > 0 AND %(lanes_channel)s::text IS NOT NULL
            THEN pg_notify(%(lanes_channel)s::text, 'key ' || %(queue)s::text) END
FROM gone

-- name: lease_free
-- The same for leases whose last jobs were settled by another statement.
DELETE FROM {schema}.lease
WHERE queue = %(queue)s::text AND id = ANY (ARRAY(
    SELECT id
    FROM {schema}.lease AS l
    WHERE queue = %(queue)s::text AND id = ANY (%(leases)b::int8[])
      AND NOT EXISTS (
          SELECT 1 FROM {schema}.job AS j
          WHERE j.queue = %(queue)s::text AND j.id = ANY (l.job_ids) AND j.lease_id = l.id)
    FOR UPDATE SKIP LOCKED))
RETURNING id

-- name: job_retry
-- Back into the queue after an attempt: at once at the end of the line, or when `delays` (seconds) have passed.
-- spent: false gives the attempt back (snooze). lost: it ran in a batch whose process has died; counted as
--   a rescue counts it, since any job of the batch may have killed it, and must run alone from now on. At most ten errors are kept, the newest ones; what is no list (written by
--   hand) is dropped.
-- admitted: a job with an ordering key keeps its slot while it waits, so that nothing overtakes it; of the other lanes it gives
--   it up.
-- locked: a job whose cancellation was asked for while it ran is not tried again but archived as cancelled. The flag is read
--   under the lock: read before it, a cancellation that commits in between would leave the row to neither branch.
-- ended: nor is a job whose key has a newer one waiting (next_mode 2 or 3), which is archived as superseded.
WITH locked AS MATERIALIZED (
    SELECT id, cancel_requested OR (unique_key IS NOT NULL AND EXISTS (
               SELECT 1 FROM {schema}.job AS n
               WHERE n.queue = %(queue)s::text AND n.next_key = job.unique_key AND n.next_mode > 1)) AS ended
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
      AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
    ORDER BY id
    FOR UPDATE
), asked AS (
    SELECT a.*
    FROM unnest(%(ids)b::int8[], %(delays)b::float8[], %(spent)b::bool[], %(lost)b::bool[], %(errors)b::text[])
         AS a(id, delay, spent, lost, error)
), moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM locked WHERE ended))
    RETURNING *
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END || ' while running', created_at, clock_timestamp()
    FROM gone
    WHERE %(archive)s::bool
), told AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END || ' while running',
           at, at + k.seconds * interval '1 second'
    FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task, LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
), back AS (
    UPDATE {schema}.job AS j
    SET lease_id = NULL,
        attempt = CASE WHEN a.spent THEN j.attempt ELSE j.attempt - 1 END,
        lost = CASE WHEN a.lost THEN least(j.lost, 2147483646) + 1 ELSE j.lost END,
        run_at = CASE WHEN a.delay > 0 THEN at + a.delay * interval '1 second' END,
        admitted = CASE WHEN a.delay > 0 AND j.lane < 'o' THEN NULL ELSE j.admitted END,
        position = CASE WHEN a.delay > 0 THEN NULL ELSE nextval('{schema}.job_id_seq') END,
        errors = CASE WHEN a.error IS NULL THEN j.errors ELSE
            CASE WHEN jsonb_typeof(j.errors) IS DISTINCT FROM 'array' THEN '[]'
                 WHEN jsonb_array_length(j.errors) >= 10 THEN j.errors - 0 ELSE j.errors END
            || jsonb_build_array(a.error::jsonb || jsonb_build_object('at', at)) END
    FROM asked AS a, moment
    WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM locked WHERE NOT ended)) AND j.id = a.id
    RETURNING j.id, j.lane, CASE WHEN j.admitted IS NULL THEN j.lane END AS freed
), woken AS (
    INSERT INTO {schema}.admission (queue, lane)
    SELECT %(queue)s::text, lane FROM gone WHERE lane IS NOT NULL
    UNION
    SELECT %(queue)s::text, freed FROM back WHERE freed IS NOT NULL
)
SELECT count(*), CASE WHEN count(*) < cardinality(%(ids)b::int8[]) THEN array_agg(id) END, count(freed) > 0,
       CASE WHEN count(freed) > 0 AND %(lanes_channel)s::text IS NOT NULL
            THEN pg_notify(%(lanes_channel)s::text, 'key ' || %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM asked WHERE delay <= 0)
            THEN pg_notify(%(channel)s::text, %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM asked WHERE delay > 0 AND delay < 5)
            THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END
FROM (SELECT id, freed FROM back UNION ALL SELECT id, lane FROM gone) AS settled

-- name: job_bury
-- Into the dead letters, with the reason and the last error; cancelled and superseded jobs into the archive, as in job_retry.
-- parked: the lane stops until an operator decides, if its jobs were enqueued so. DISTINCT ON: two jobs of one lane in one call,
--   which only a hand can bring about, must not fail the settles of all others.
WITH locked AS MATERIALIZED (
    SELECT id, cancel_requested OR (unique_key IS NOT NULL AND EXISTS (
               SELECT 1 FROM {schema}.job AS n
               WHERE n.queue = %(queue)s::text AND n.next_key = job.unique_key AND n.next_mode = 3)) AS ended
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
      AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
    ORDER BY id
    FOR UPDATE
), asked AS (
    SELECT a.* FROM unnest(%(ids)b::int8[], %(reasons)b::text[], %(errors)b::text[]) AS a(id, reason, error)
), gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM locked WHERE ended))
    RETURNING *
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END || ' while running', created_at, clock_timestamp()
    FROM gone
    WHERE %(archive)s::bool
), told AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END || ' while running',
           at, at + k.seconds * interval '1 second'
    FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task, LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
), buried AS (
    DELETE FROM {schema}.job AS j
    USING asked AS a
    WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM locked WHERE NOT ended)) AND j.id = a.id
    RETURNING j.*, a.reason, a.error
), dead AS (
    INSERT INTO {schema}.dead_letter (
        id, queue, task, args, kwargs, priority, attempt, max_attempts, lost, timeout, retry, headers, errors, created_at,
        reason, died_at, unique_key, lane, lane_rank, lane_width, park)
    SELECT id, queue, task, args, kwargs, priority, attempt, max_attempts, lost, timeout, retry, headers,
           CASE WHEN error IS NULL THEN errors ELSE
            CASE WHEN jsonb_typeof(errors) IS DISTINCT FROM 'array' THEN '[]'
                 WHEN jsonb_array_length(errors) >= 10 THEN errors - 0 ELSE errors END
            || jsonb_build_array(error::jsonb || jsonb_build_object('at', clock_timestamp())) END,
           created_at, reason, clock_timestamp(), unique_key, lane, lane_rank, lane_width, park
    FROM buried
), told_dead AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, 'dead', e.reason, at, at + k.seconds * interval '1 second'
    FROM buried AS e JOIN {schema}.kept_task AS k ON k.task = e.task, LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
    RETURNING result.id
), parked AS (
    INSERT INTO {schema}.lane (lane, queue, parked_at, parked_by)
    SELECT DISTINCT ON (lane, queue) lane, queue, clock_timestamp(), id FROM buried WHERE park AND lane IS NOT NULL
    ORDER BY lane, queue, id
    ON CONFLICT (lane, queue) DO UPDATE SET parked_at = excluded.parked_at, parked_by = excluded.parked_by
), woken AS (
    INSERT INTO {schema}.admission (queue, lane)
    SELECT queue, lane FROM gone WHERE lane IS NOT NULL
    UNION
    SELECT queue, lane FROM buried WHERE lane IS NOT NULL
)
SELECT count(*), CASE WHEN count(*) < cardinality(%(ids)b::int8[]) THEN array_agg(id) END, count(lane) > 0,
       CASE WHEN count(lane) > 0 AND %(lanes_channel)s::text IS NOT NULL
            THEN pg_notify(%(lanes_channel)s::text, 'key ' || %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM told_dead) THEN
            pg_notify(%(channel)s::text || '.done',
                      (SELECT CASE WHEN count(*) <= 300 THEN string_agg(told_dead.id::text, ' ') ELSE '' END FROM told_dead)) END
FROM (SELECT id, lane FROM buried UNION ALL SELECT id, lane FROM gone) AS settled

-- name: job_release
-- Given back unfinished: the attempt is not counted and the place in line is kept; cancelled and superseded jobs as in
-- job_retry.
WITH locked AS MATERIALIZED (
    SELECT id, cancel_requested OR (unique_key IS NOT NULL AND EXISTS (
               SELECT 1 FROM {schema}.job AS n
               WHERE n.queue = %(queue)s::text AND n.next_key = job.unique_key AND n.next_mode > 1)) AS ended
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
      AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
    ORDER BY id
    FOR UPDATE
), gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM locked WHERE ended))
    RETURNING *
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END || ' while running', created_at, clock_timestamp()
    FROM gone
    WHERE %(archive)s::bool
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM gone WHERE lane IS NOT NULL
), told AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END,
           CASE WHEN cancel_requested THEN 'cancelled' ELSE 'superseded' END || ' while running',
           at, at + k.seconds * interval '1 second'
    FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task, LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
), back AS (
    UPDATE {schema}.job
    SET lease_id = NULL, attempt = attempt - 1
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM locked WHERE NOT ended))
    RETURNING id
)
SELECT count(*), CASE WHEN count(*) < cardinality(%(ids)b::int8[]) THEN array_agg(id) END, count(lane) > 0,
       CASE WHEN count(lane) > 0 AND %(lanes_channel)s::text IS NOT NULL
            THEN pg_notify(%(lanes_channel)s::text, 'key ' || %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(queue)s::text) END
FROM (SELECT id, NULL AS lane FROM back UNION ALL SELECT id, lane FROM gone) AS settled

-- name: job_queues
-- Which queue holds each id: an operator knows ids, the other statements want one queue at a time.
SELECT id, queue FROM {schema}.job WHERE id = ANY (%(ids)b::int8[])

-- name: job_cancel
-- A waiting job is archived as cancelled; a running one is marked, and its worker finds the mark at its next heartbeat, which
-- the notification brings forward.
-- ORDER BY id under the lock: two cancellations of the same jobs take them in the same order.
WITH picked AS MATERIALIZED (
    SELECT id, lease_id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
    ORDER BY id
    FOR UPDATE
), gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM picked WHERE lease_id IS NULL))
    RETURNING *
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, 'cancelled', 'cancelled while waiting',
           created_at, clock_timestamp()
    FROM gone
    WHERE %(archive)s::bool
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM gone WHERE lane IS NOT NULL
), told AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, 'cancelled', 'cancelled while waiting', at, at + k.seconds * interval '1 second'
    FROM gone AS e JOIN {schema}.kept_task AS k ON k.task = e.task, LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
), asked AS (
    UPDATE {schema}.job
    SET cancel_requested = true
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM picked WHERE lease_id IS NOT NULL))
    RETURNING id
)
SELECT id, 'cancelled',
       CASE WHEN lane IS NOT NULL AND %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'key ' || %(queue)s::text) END
FROM gone
UNION ALL
SELECT id, 'requested',
       CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'cancel ' || %(queue)s::text) END
FROM asked

-- name: job_rescue
-- Takes back what expired leases still hold: into the same place in line, or into the dead letters after the last attempt.
-- held: only jobs whose lease_id is still one of these leases; a lease may list jobs that are settled long ago.
-- SKIP LOCKED, on leases and on jobs: a rescue never waits. A lease that is being extended, or a job that somebody settles in
--   an open transaction, is left for the next round; waiting for it would stop the rescue of all the others.
-- least(): a row written by hand may hold the largest number there is, and must not fail the round of all the others.
-- DISTINCT ON: as in job_bury.
-- freed: a lease row goes only with the last of its jobs, so leases of earlier rounds may be left over.
-- after, seen: where the last round ended, and the leases of that very moment. Naming all that were looked at made the rounds
--   past ten thousand leases of locked jobs take 38 s instead of a third of one. The time travels as text: minus infinity, written by hand,
--   is no datetime.
-- (SELECT clock_timestamp()): evaluated once, so that the index on expires_at can be used.
-- told, superseded: as in settle.sql.
WITH expired AS MATERIALIZED (
    SELECT id, job_ids, expires_at
    FROM {schema}.lease
    WHERE queue = %(queue)s::text AND expires_at < (SELECT clock_timestamp())
      AND expires_at >= %(after)s::timestamptz AND id <> ALL (%(seen)b::int8[])
    ORDER BY expires_at
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
), held AS MATERIALIZED (
    SELECT id, lane,
           CASE WHEN cancel_requested THEN 'cancelled'
                WHEN unique_key IS NOT NULL AND EXISTS (
                    SELECT 1 FROM {schema}.job AS n
                    WHERE n.queue = %(queue)s::text AND n.next_key = job.unique_key
                      AND (n.next_mode = 3 OR n.next_mode = 2 AND job.attempt < job.max_attempts)) THEN 'superseded'
                WHEN attempt >= max_attempts THEN 'dead' ELSE 'returned' END AS fate
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT unnest(job_ids) FROM expired))
      AND lease_id = ANY (ARRAY(SELECT id FROM expired))
    ORDER BY id
    FOR UPDATE SKIP LOCKED
), back AS (
    UPDATE {schema}.job
    SET lease_id = NULL, lost = least(lost, 2147483646) + 1,
        errors = CASE WHEN jsonb_typeof(errors) IS DISTINCT FROM 'array' THEN '[]'
                 WHEN jsonb_array_length(errors) >= 10 THEN errors - 0 ELSE errors END
            || jsonb_build_array(jsonb_build_object(
                'attempt', attempt, 'type', 'WorkerLost', 'message', 'worker lost: its lease expired', 'at', clock_timestamp()))
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM held WHERE fate = 'returned'))
), gone AS (
    DELETE FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM held WHERE fate <> 'returned'))
    RETURNING *
), dead AS (
    INSERT INTO {schema}.dead_letter (
        id, queue, task, args, kwargs, priority, attempt, max_attempts, lost, timeout, retry, headers, errors, created_at,
        reason, died_at, unique_key, lane, lane_rank, lane_width, park)
    SELECT id, queue, task, args, kwargs, priority, attempt, max_attempts, least(lost, 2147483646) + 1, timeout, retry, headers,
           CASE WHEN jsonb_typeof(errors) IS DISTINCT FROM 'array' THEN '[]'
                 WHEN jsonb_array_length(errors) >= 10 THEN errors - 0 ELSE errors END
            || jsonb_build_array(jsonb_build_object(
                'attempt', attempt, 'type', 'WorkerLost', 'message', 'worker lost: its lease expired', 'at', clock_timestamp())),
           created_at, 'worker lost', clock_timestamp(), unique_key, lane, lane_rank, lane_width, park
    FROM gone
    WHERE id = ANY (ARRAY(SELECT id FROM held WHERE fate = 'dead'))
), parked AS (
    INSERT INTO {schema}.lane (lane, queue, parked_at, parked_by)
    SELECT DISTINCT ON (lane, queue) lane, queue, clock_timestamp(), id
    FROM gone
    WHERE park AND lane IS NOT NULL AND id = ANY (ARRAY(SELECT id FROM held WHERE fate = 'dead'))
    ORDER BY lane, queue, id
    ON CONFLICT (lane, queue) DO UPDATE SET parked_at = excluded.parked_at, parked_by = excluded.parked_by
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM gone WHERE lane IS NOT NULL
), kept AS (
    INSERT INTO {schema}.archive (
        id, queue, task, args, kwargs, priority, attempt, lost, headers, errors, state, reason, created_at, finished_at)
    SELECT gone.id, queue, task, args, kwargs, priority, attempt, least(lost, 2147483646) + 1, headers, errors, held.fate,
           held.fate || ' while running, worker lost', created_at, clock_timestamp()
    FROM gone JOIN held ON held.id = gone.id
    WHERE held.fate <> 'dead' AND %(archive)s::bool
), told AS (
    INSERT INTO {schema}.result (id, queue, state, error, finished_at, expires_at)
    SELECT e.id, e.queue, held.fate,
           CASE WHEN held.fate = 'dead' THEN 'worker lost' ELSE held.fate || ' while running, worker lost' END,
           at, at + k.seconds * interval '1 second'
    FROM gone AS e JOIN held ON held.id = e.id JOIN {schema}.kept_task AS k ON k.task = e.task,
         LATERAL (SELECT clock_timestamp() AS at) AS moment
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = NULL, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
), freed AS (
    DELETE FROM {schema}.lease AS l
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM expired))
      AND NOT EXISTS (
          SELECT 1 FROM {schema}.job AS j
          WHERE j.queue = %(queue)s::text AND j.id = ANY (l.job_ids) AND j.lease_id = l.id
            AND j.id <> ALL (ARRAY(SELECT held.id FROM held)))
)
SELECT id, 'lease', NULL, expires_at::text, expires_at = (SELECT max(expires_at) FROM expired) FROM expired
UNION ALL
SELECT id, fate, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text,
    CASE WHEN fate <> 'returned' AND lane IS NOT NULL THEN 'key ' ELSE '' END || %(queue)s::text) END, NULL, NULL
FROM held

-- name: job_adopt
-- The ranges that are always true are explained at job_claim.
-- The repair for what no rule above can find: running jobs whose lease row is gone (deleted by hand, restored from a
-- partial dump). They stand at the head of the line, so looking at its first rows is enough.
WITH head AS MATERIALIZED (
    SELECT id, lease_id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND position IS NOT NULL AND priority >= -32768 AND priority <= 32767
    ORDER BY priority DESC, position
    LIMIT %(limit)s::int8
), orphan AS MATERIALIZED (
    SELECT head.id, head.lease_id
    FROM head
    WHERE head.lease_id IS NOT NULL
      AND NOT EXISTS (SELECT 1 FROM {schema}.lease AS l WHERE l.id = head.lease_id AND l.queue = %(queue)s::text)
)
INSERT INTO {schema}.lease (id, queue, job_ids, claimed_at, expires_at)
SELECT lease_id, %(queue)s::text, array_agg(id), clock_timestamp(), clock_timestamp()
FROM orphan
GROUP BY lease_id
ON CONFLICT DO NOTHING
RETURNING job_ids

-- name: job_promote
-- Puts due jobs at the end of their line, in the order of their due times. The ranges are explained at job_claim.
-- woken: a job of a lane that holds no slot goes back among those that wait for one.
-- placed: as arrays, in which width_bucket finds the place of an id; joined to the jobs, PostgreSQL 14 looks every job up among
--   all ids.
WITH due AS MATERIALIZED (
    SELECT id, run_at, lane IS NULL OR admitted IS NOT NULL AS free
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND run_at IS NOT NULL AND run_at >= '-infinity' AND run_at <= (SELECT clock_timestamp())
    ORDER BY run_at
    LIMIT %(limit)s::int8
    FOR NO KEY UPDATE SKIP LOCKED
), numbered AS MATERIALIZED (
    SELECT id, CASE WHEN free THEN nextval('{schema}.job_id_seq') END AS position
    FROM (SELECT id, free FROM due ORDER BY run_at, id) AS sorted
), placed AS MATERIALIZED (
    SELECT array_agg(id ORDER BY id) AS ids, array_agg(position ORDER BY id) AS positions FROM numbered
), moved AS (
    UPDATE {schema}.job AS j
    SET position = (SELECT positions FROM placed)[width_bucket(j.id, (SELECT ids FROM placed))], run_at = NULL
    WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM due))
    RETURNING j.id, CASE WHEN j.position IS NULL THEN j.lane END AS lane
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT %(queue)s::text, lane FROM moved WHERE lane IS NOT NULL
)
SELECT array_agg(id), count(lane) > 0,
       CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL AND count(lane) > 0 THEN pg_notify(%(channel)s::text, 'key ' || %(queue)s::text) END
FROM moved

-- name: job_hasten
-- What waits for a time is due now, and in line at the next promotion. SKIP LOCKED: what somebody holds is left as it is.
-- next_key: what waits behind the running job of its unique key waits for that, and not for a time.
WITH later AS MATERIALIZED (
    SELECT id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[]) AND run_at > clock_timestamp() AND next_key IS NULL
    ORDER BY id
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {schema}.job SET run_at = clock_timestamp()
WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM later))
RETURNING id

-- name: queue_agenda
-- Seconds until the next lease ends, until the next job is due, until a lane is to be looked at, until a waiting job expires,
-- until the next pause ends, until priorities age, and until what waits behind the job of its key is worth a look (0 or less:
-- now); and the limits of the queue. One cheap look instead of eight statements that find nothing. Lanes: a row that is to be
-- looked at now is the first thing that is found, so a million of them are not read; rows that wait for a token must not hide it,
-- however many they are, and of those ten thousand are read. Infinity is a job that somebody parked by hand; greatest(): before
-- PostgreSQL 17 nothing can be subtracted from minus infinity.
SELECT (SELECT extract(epoch FROM expires_at - clock_timestamp())::float8
        FROM {schema}.lease
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text AND isfinite(expires_at)
        ORDER BY expires_at
        LIMIT 1),
       (SELECT extract(epoch FROM greatest(run_at, 'epoch') - clock_timestamp())::float8
        FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
          AND run_at IS NOT NULL AND run_at < 'infinity'
        ORDER BY run_at
        LIMIT 1),
       CASE WHEN (SELECT id FROM {schema}.admission
                  WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
                    AND (due_at IS NULL OR due_at <= (SELECT clock_timestamp()))
                  ORDER BY id LIMIT 1) IS NOT NULL THEN 0
            ELSE (SELECT extract(epoch FROM min(due_at) - clock_timestamp())
                  FROM (SELECT due_at FROM {schema}.admission
                        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
                          AND due_at < 'infinity'
                        ORDER BY id LIMIT 10000) AS first) END::float8,
       (SELECT extract(epoch FROM greatest(expires_at, 'epoch') - clock_timestamp())::float8
        FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
          AND expires_at IS NOT NULL AND expires_at < 'infinity' AND lease_id IS NULL
        ORDER BY expires_at
        LIMIT 1),
       resume_in, age_in,
       (SELECT CASE bool_or(free) WHEN true THEN 0 WHEN false THEN 0.25 END::float8
        FROM (SELECT NOT EXISTS (
                         SELECT 1 FROM {schema}.job AS a
                         WHERE a.queue = %(queue)s::text AND a.unique_key = n.next_key
                           AND (a.lease_id IS NOT NULL OR n.next_mode = 1)) AS free
              FROM {schema}.job AS n
              WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text AND next_key IS NOT NULL
              ORDER BY queue, next_key
              LIMIT 1000) AS behind),
       most_running, rate, burst
FROM (SELECT 1) AS once
LEFT JOIN (
    SELECT (SELECT min(seconds) FROM (
                SELECT extract(epoch FROM paused_until - clock_timestamp())::float8 AS seconds
                WHERE paused_at IS NOT NULL AND isfinite(paused_until)
                UNION ALL
                SELECT greatest(least((term ->> 'until')::numeric - extract(epoch FROM clock_timestamp()), 1e9), -1)::float8
                FROM jsonb_each(CASE WHEN jsonb_typeof(paused_tasks) = 'object' THEN paused_tasks END) AS paused(task, term)
                WHERE jsonb_typeof(term -> 'until') = 'number') AS ends
            WHERE seconds > 0) AS resume_in,
           CASE WHEN ageing IS NULL THEN NULL
                WHEN ageing_level IS NOT NULL THEN 0
                WHEN isfinite(aged_at) THEN greatest(least(ageing, 1e9) - extract(epoch FROM clock_timestamp() - aged_at), 0)
                ELSE 0 END::float8 AS age_in,
           most_running, rate, burst
    FROM {schema}.queue
    WHERE name = %(queue)s::text
) AS setting ON true

-- name: archive_roll
SELECT {schema}.archive_roll(%(keep)s::float8 * interval '1 second')

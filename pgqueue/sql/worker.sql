-- name: worker_register
INSERT INTO {schema}.worker (name, hostname, pid, version, queues, concurrency, lease_seconds)
VALUES (%(name)s::text, %(hostname)s::text, %(pid)s::int4, %(version)s::text, %(queues)s::text[], %(concurrency)s::int4,
        %(lease)s::float8)
RETURNING id

-- name: worker_beat
-- An upsert: a row that somebody pruned comes back under its old id. Leases do not depend on it.
INSERT INTO {schema}.worker (id, name, hostname, pid, version, queues, concurrency, lease_seconds, completed, circuits)
VALUES (%(worker_id)s::int8, %(name)s::text, %(hostname)s::text, %(pid)s::int4, %(version)s::text, %(queues)s::text[],
        %(concurrency)s::int4, %(lease)s::float8, %(completed)s::jsonb, %(circuits)s::jsonb)
ON CONFLICT (id) DO UPDATE
SET seen_at = clock_timestamp(), completed = excluded.completed, circuits = excluded.circuits

-- name: worker_peers
-- What others have completed of these queues. A worker that is silent for a lease, or holds a task of the queue back itself, is
-- no proof that the queue works; its number is needed all the same, to see later what came after it.
-- CASE: a row written by hand must not make a heartbeat fail.
SELECT w.id, done.queue, CASE WHEN jsonb_typeof(done.count) = 'number' THEN done.count::int8 ELSE 0 END,
       w.seen_at > clock_timestamp() - w.lease_seconds * interval '1 second'
       AND NOT coalesce(w.circuits @> jsonb_build_array(jsonb_build_object('queue', done.queue)), false)
FROM {schema}.worker AS w
CROSS JOIN LATERAL jsonb_each(CASE WHEN jsonb_typeof(w.completed) = 'object' THEN w.completed END) AS done(queue, count)
WHERE w.id <> %(worker_id)s::int8 AND done.queue = ANY (%(queues)s::text[])

-- name: circuit_list
-- Which tasks are held back, of which queue, by whom and why. A worker that is silent for a lease does not count: it may be gone. What it
-- said was said at its last beat, so the age of that is added.
-- CASE: a row written by hand must not take the whole list away.
SELECT c.queue, c.task, w.id, w.name, c.reason, c.failures,
       c.seconds + extract(epoch FROM clock_timestamp() - w.seen_at)::float8, c.pause
FROM {schema}.worker AS w
CROSS JOIN LATERAL jsonb_to_recordset(CASE WHEN jsonb_typeof(w.circuits) = 'array' THEN w.circuits END)
    AS c(queue text, task text, reason text, failures int8, seconds float8, pause float8)
WHERE w.seen_at > clock_timestamp() - w.lease_seconds * interval '1 second' AND c.queue IS NOT NULL AND c.task IS NOT NULL
ORDER BY c.queue COLLATE "C", c.task COLLATE "C", w.id

-- name: lease_beat
-- Extends one row per claim, however many jobs it holds, and says of each lease that is still ours whether it was extended
-- and whose cancellation was asked for, and which are superseded. A lease that does not come back is lost.
-- LATERAL … LIMIT: from the few that wait behind their key to the one of each; joined otherwise, all jobs might be read.
-- SKIP LOCKED: a caller's open transaction may hold a lease row; waiting for it would let all the others run out. Such a lease
--   comes back as not extended, and is tried again soon.
-- greatest(): a beat must not take away time that a handler asked for.
-- worker_id: a heartbeat never touches a lease of somebody else.
-- synchronous_commit: a beat that is lost in a crash of the server is a lease that ends earlier.
WITH mine AS MATERIALIZED (
    SELECT id
    FROM {schema}.lease
    WHERE queue = %(queue)s::text AND id = ANY (%(leases)b::int8[]) AND worker_id = %(worker_id)s::int8
    FOR NO KEY UPDATE SKIP LOCKED
), beaten AS (
    UPDATE {schema}.lease
    SET expires_at = greatest(expires_at, clock_timestamp() + %(lease)s::float8 * interval '1 second')
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS relaxed
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM mine))
    RETURNING id
), cancelled AS MATERIALIZED (
    SELECT id, lease_id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND cancel_requested
    ORDER BY queue, id
), superseded AS MATERIALIZED (
    SELECT a.id, a.lease_id
    FROM (SELECT queue, next_key FROM {schema}.job
          WHERE queue = %(queue)s::text AND next_key IS NOT NULL AND next_mode = 3
          ORDER BY queue, next_key OFFSET 0) AS n
    CROSS JOIN LATERAL (
        SELECT id, lease_id FROM {schema}.job WHERE queue = %(queue)s::text AND unique_key = n.next_key LIMIT 1) AS a
)
SELECT id, id IN (SELECT id FROM beaten), ARRAY(SELECT c.id FROM cancelled AS c WHERE c.lease_id = l.id),
       ARRAY(SELECT s.id FROM superseded AS s WHERE s.lease_id = l.id)
FROM {schema}.lease AS l
WHERE queue = %(queue)s::text AND id = ANY (%(leases)b::int8[]) AND worker_id = %(worker_id)s::int8

-- name: worker_leave
DELETE FROM {schema}.worker WHERE id = %(worker_id)s::int8

-- name: worker_prune
-- Rows of workers that were not seen for many times their lease: only a list for people, nothing is decided by it.
DELETE FROM {schema}.worker
WHERE id = ANY (ARRAY(
    SELECT id FROM {schema}.worker
    WHERE seen_at < clock_timestamp() - greatest(lease_seconds * 20, 3600) * interval '1 second'
    LIMIT 100
    FOR UPDATE SKIP LOCKED))

-- name: worker_list
SELECT w.id, w.name, w.hostname, w.pid, w.version, w.queues, w.concurrency, w.lease_seconds, w.started_at, w.seen_at,
       extract(epoch FROM clock_timestamp() - w.seen_at)::float8,
       (SELECT coalesce(sum(cardinality(job_ids)), 0) FROM {schema}.lease AS l WHERE l.worker_id = w.id)::int8
FROM {schema}.worker AS w
ORDER BY w.id

-- name: queue_drained
-- True when nothing is ready or running, no retry waits, and nothing blocked can come into line, nor anything that waits
-- behind the job of its unique key. Jobs that were enqueued for later do not count, nor do a paused queue, a parked lane and
-- what waits of a paused task; what is paused, until when, is read as in job_claim.
-- The ranges that are always true are explained at job_claim; the line is read in its order, since a million blocked jobs may
--   lie before the one that is ready.
-- waiting: jumps from lane to lane, so that a million jobs of a parked one are not read. (SELECT … LIMIT 1) IS NOT NULL:
--   where EXISTS stood the planner would join, and read them all.
-- next_mode 1: it follows the end of a job that waits, and is there as long as that one is.
-- NOT (…): nor does what stands behind jobs of paused tasks that hold the slots of its lane. A row in `admission` says that
--   a slot may be free, so the lane is not settled yet.
WITH RECURSIVE waiting AS (
    (SELECT lane FROM {schema}.job
     WHERE queue = %(queue)s::text AND lane IS NOT NULL AND admitted IS NULL AND run_at IS NULL
     ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT j.lane FROM {schema}.job AS j
            WHERE j.queue = %(queue)s::text AND j.admitted IS NULL AND j.run_at IS NULL AND j.lane > waiting.lane
            ORDER BY j.lane LIMIT 1)
    FROM waiting WHERE waiting.lane IS NOT NULL
), halted AS MATERIALIZED (
    SELECT paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true) AS whole,
           CASE WHEN jsonb_typeof(paused_tasks) = 'object' THEN paused_tasks END AS tasks
    FROM {schema}.queue
    WHERE name = %(queue)s::text AND (paused_at IS NOT NULL OR paused_tasks IS NOT NULL)
), paused AS MATERIALIZED (
    SELECT paused.task
    FROM halted CROSS JOIN LATERAL jsonb_each(tasks) AS paused(task, term)
    WHERE CASE WHEN jsonb_typeof(term -> 'until') = 'number'
               THEN (term ->> 'until')::numeric > extract(epoch FROM clock_timestamp()) ELSE true END
)
SELECT EXISTS (SELECT 1 FROM halted WHERE whole)
    OR (SELECT id FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text AND position IS NOT NULL
          AND (lease_id IS NOT NULL OR task <> ALL (ARRAY(SELECT task FROM paused)))
        ORDER BY priority DESC, position LIMIT 1) IS NULL
   AND NOT EXISTS (
       SELECT 1 FROM {schema}.job
       WHERE queue = %(queue)s::text AND run_at < 'infinity' AND attempt > 0
         AND task <> ALL (ARRAY(SELECT task FROM paused)))
   AND (SELECT n.id FROM {schema}.job AS n
        WHERE n.queue = %(queue)s::text AND n.queue >= %(queue)s::text AND n.queue <= %(queue)s::text
          AND n.next_key IS NOT NULL AND n.task <> ALL (ARRAY(SELECT task FROM paused))
          AND NOT EXISTS (
              SELECT 1 FROM {schema}.job AS a
              WHERE a.queue = %(queue)s::text AND a.unique_key = n.next_key AND a.lease_id IS NULL AND n.next_mode = 1)
        ORDER BY n.queue, n.next_key LIMIT 1) IS NULL
   AND NOT EXISTS (
       SELECT 1 FROM waiting AS w
       WHERE w.lane IS NOT NULL
         AND NOT EXISTS (
             SELECT 1 FROM {schema}.lane AS l
             WHERE l.lane = w.lane AND l.queue = %(queue)s::text AND l.parked_at IS NOT NULL)
         AND (SELECT j.id FROM {schema}.job AS j
              WHERE j.lane = w.lane AND j.queue = %(queue)s::text AND j.admitted IS NULL AND j.run_at IS NULL
                AND j.task <> ALL (ARRAY(SELECT task FROM paused))
              LIMIT 1) IS NOT NULL
         AND NOT (
             (SELECT a.id FROM {schema}.job AS a
              WHERE a.lane = w.lane AND a.queue = %(queue)s::text AND a.admitted
              LIMIT 1) IS NOT NULL
             AND (SELECT a.id FROM {schema}.job AS a
                  WHERE a.lane = w.lane AND a.queue = %(queue)s::text AND a.admitted
                    AND (a.lease_id IS NOT NULL OR a.task <> ALL (ARRAY(SELECT task FROM paused)))
                  LIMIT 1) IS NULL
             AND NOT EXISTS (
                 SELECT 1 FROM {schema}.admission AS n WHERE n.lane = w.lane AND n.queue = %(queue)s::text)))

-- name: worker_hello
-- What a listener waits for to know that it hears: through a pooler in transaction mode it does not.
SELECT pg_notify(%(channel)s::text, 'hello ' || %(worker_id)s::text)

-- name: schema_version
-- With the comment in which a migration says which older workers still run.
SELECT version_num, obj_description('{schema}.schema_version'::regclass, 'pg_class') FROM {schema}.schema_version

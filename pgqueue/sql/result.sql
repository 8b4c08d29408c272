-- Results, waiting for the end of jobs, progress, and jobs whose handlers settle them in transactions of their own.

-- name: job_complete_kept
-- job_complete for jobs that leave a result: what is explained there is not repeated. A statement of its own, so that jobs
-- without results pay nothing.
-- told: the entry is written with the end of the job or not at all. A job that was redriven has one already.
-- seconds: below 0 it is not the caller who knows how long, but kept_task; a task that is not there leaves no entry.
-- superseded: as in settle.sql. Its value is that of an older call: who waits for it is told so instead.
-- pg_notify: on a channel of its own, which wakes no worker, once per statement. It names the ids as long as they fit into
--   the 8000 bytes of a notification.
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
), ended AS (
    SELECT gone.id, gone.queue, width_bucket(gone.id, %(ids)b::int8[]) AS place, k.seconds AS known, clock_timestamp() AS at,
           unique_key IS NOT NULL AND EXISTS (
               SELECT 1 FROM {schema}.job AS n
               WHERE n.queue = %(queue)s::text AND n.next_key = gone.unique_key AND n.next_mode = 3) AS superseded
    FROM gone LEFT JOIN {schema}.kept_task AS k ON k.task = gone.task
), told AS (
    INSERT INTO {schema}.result AS r (id, queue, state, value, error, finished_at, expires_at)
    SELECT id, queue, CASE WHEN superseded THEN 'superseded' ELSE %(state)s::text END,
           CASE WHEN NOT superseded THEN (%(values)b::text[])[place]::json END,
           CASE WHEN superseded THEN 'superseded while running'
                ELSE coalesce((%(errors)b::text[])[place], (%(reasons)b::text[])[place]) END, at,
           at + coalesce(nullif((%(seconds)b::float8[])[place], -1), known) * interval '1 second'
    FROM ended
    WHERE (%(seconds)b::float8[])[place] >= 0 OR known IS NOT NULL
    ON CONFLICT (id, queue) DO UPDATE
    SET state = excluded.state, value = excluded.value, error = excluded.error, finished_at = excluded.finished_at,
        expires_at = excluded.expires_at
    RETURNING r.id
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
            THEN pg_notify(%(lanes_channel)s::text, 'key ' || %(queue)s::text) END,
       CASE WHEN %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM told) THEN
            pg_notify(%(channel)s::text || '.done',
                      (SELECT CASE WHEN count(*) <= 300 THEN string_agg(told.id::text, ' ') ELSE '' END FROM told)) END
FROM gone

-- name: job_doubt
-- What became of jobs that their handlers settled in a transaction of their own: "ours" (the row is there under its token
-- and nobody holds it: that transaction did not commit), "open" (it has not ended), "other" (the row is there, and not
-- ours). A job that is gone gives no row.
-- SKIP LOCKED: nobody may wait for a transaction that somebody else left open. The lock is taken after the snapshot: what
--   commits in between is skipped too, counts as open, and is gone at the next look.
WITH free AS MATERIALIZED (
    SELECT id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
      AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
    FOR NO KEY UPDATE SKIP LOCKED
)
SELECT id, CASE WHEN lease_id IS DISTINCT FROM (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])] THEN 'other'
                WHEN id IN (SELECT free.id FROM free) THEN 'ours' ELSE 'open' END
FROM {schema}.job
WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])

-- name: kept_forget
-- What no longer keeps results. ORDER BY: workers that start together take the rows in one order.
WITH old AS MATERIALIZED (
    SELECT task FROM {schema}.kept_task WHERE task = ANY (%(tasks)b::text[]) ORDER BY task FOR UPDATE
)
DELETE FROM {schema}.kept_task WHERE task = ANY (ARRAY(SELECT task FROM old))

-- name: kept_declare
-- IS DISTINCT FROM: every worker says it at every start, and nearly always nothing is new.
INSERT INTO {schema}.kept_task AS k (task, seconds)
SELECT task, seconds FROM unnest(%(tasks)b::text[], %(seconds)b::float8[]) AS given(task, seconds) ORDER BY task
ON CONFLICT (task) DO UPDATE SET seconds = excluded.seconds WHERE k.seconds IS DISTINCT FROM excluded.seconds

-- name: result_prune
-- In batches, past what somebody holds; MATERIALIZED, so that no plan takes more than a batch. (SELECT clock_timestamp()):
-- evaluated once, so that the index can be used.
WITH old AS MATERIALIZED (
    SELECT id, queue
    FROM {schema}.result
    WHERE expires_at <= (SELECT clock_timestamp())
    ORDER BY expires_at
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.result AS r USING old WHERE r.id = old.id AND r.queue = old.queue RETURNING r.id
)
SELECT count(*) FROM gone

-- name: end_rights
-- Whether this role may read where jobs end; one that may not sees only that they have ended, and what is in result.
SELECT has_column_privilege('{schema}.archive', 'state', 'SELECT')
       AND has_column_privilege('{schema}.archive', 'reason', 'SELECT')
       AND has_column_privilege('{schema}.dead_letter', 'reason', 'SELECT'),
       has_column_privilege('{schema}.result', 'value', 'SELECT')

-- name: job_ends
-- The ends of jobs; live ones give no row, and one that nobody knows is one that has ended. One statement, so one snapshot: a
-- job that moves from one table to another at this moment is seen in exactly one.
-- CASE: a time beyond Python's years, written by hand, must not make the answer unreadable.
-- r.id IS NULL: where a result tells, the partitions of the archive are not visited.
SELECT asked.id, coalesce(d.state, r.state, a.state), CASE WHEN d.id IS NULL THEN r.value END,
       CASE WHEN d.id IS NOT NULL THEN d.reason WHEN r.id IS NOT NULL THEN r.error ELSE a.reason END,
       CASE WHEN coalesce(d.at, r.at, a.at) >= '0001-01-02' AND coalesce(d.at, r.at, a.at) < '9999-12-30'
            THEN coalesce(d.at, r.at, a.at) END,
       CASE WHEN r.expires_at < '9999-12-30' THEN r.expires_at END
FROM unnest(%(ids)b::int8[]) AS asked(id)
LEFT JOIN LATERAL (
    SELECT id, state, value::text AS value, error, finished_at AS at, expires_at
    FROM {schema}.result AS known
    WHERE known.id = asked.id AND known.expires_at > clock_timestamp()
    LIMIT 1) AS r ON true
LEFT JOIN LATERAL (
    SELECT id, 'dead' AS state, reason, died_at AS at FROM {schema}.dead_letter AS letter WHERE letter.id = asked.id LIMIT 1
) AS d ON true
LEFT JOIN LATERAL (
    SELECT state, reason, finished_at AS at FROM {schema}.archive AS old WHERE old.id = asked.id AND r.id IS NULL LIMIT 1
) AS a ON true
WHERE NOT EXISTS (SELECT 1 FROM {schema}.job AS live WHERE live.id = asked.id)

-- name: job_ends_bare
-- The same for a role that may not read the archive and the dead letters.
SELECT asked.id, r.state, r.value, r.error,
       CASE WHEN r.at >= '0001-01-02' AND r.at < '9999-12-30' THEN r.at END,
       CASE WHEN r.expires_at < '9999-12-30' THEN r.expires_at END
FROM unnest(%(ids)b::int8[]) AS asked(id)
LEFT JOIN LATERAL (
    SELECT id, state, value::text AS value, error, finished_at AS at, expires_at
    FROM {schema}.result AS known
    WHERE known.id = asked.id AND known.expires_at > clock_timestamp()
    LIMIT 1) AS r ON true
WHERE NOT EXISTS (SELECT 1 FROM {schema}.job AS live WHERE live.id = asked.id)

-- name: job_ends_hidden
-- The same for a role that may not read values either.
SELECT asked.id, r.state, NULL::text, NULL::text,
       CASE WHEN r.at >= '0001-01-02' AND r.at < '9999-12-30' THEN r.at END,
       CASE WHEN r.expires_at < '9999-12-30' THEN r.expires_at END
FROM unnest(%(ids)b::int8[]) AS asked(id)
LEFT JOIN LATERAL (
    SELECT state, finished_at AS at, expires_at
    FROM {schema}.result AS known
    WHERE known.id = asked.id AND known.expires_at > clock_timestamp()
    LIMIT 1) AS r ON true
WHERE NOT EXISTS (SELECT 1 FROM {schema}.job AS live WHERE live.id = asked.id)

-- name: job_whole
-- All that is known of one job, wherever it lies. One statement, so one snapshot: a job that moves from one table to another at
-- this moment is seen in one of them. rank: a job that was redriven may have an end of its first life in the archive.
-- CASE: as in job_ends.
WITH found AS (
    SELECT 1 AS rank, id, queue, task, args, kwargs, priority, attempt, errors, created_at, NULL::timestamptz AS finished_at,
           CASE WHEN lease_id IS NOT NULL THEN 'running' WHEN run_at IS NOT NULL THEN 'scheduled'
                WHEN position IS NULL AND lane IS NOT NULL THEN 'blocked' ELSE 'ready' END AS state,
           CASE WHEN run_at >= '0001-01-02' AND run_at < '9999-12-30' THEN run_at END AS run_at, lease_id AS token
    FROM {schema}.job WHERE id = %(id)s::int8
    UNION ALL
    SELECT 2, id, queue, task, args, kwargs, priority, attempt, errors, created_at, died_at, 'dead', NULL, NULL
    FROM {schema}.dead_letter WHERE id = %(id)s::int8
    UNION ALL
    SELECT 3, id, queue, task, args, kwargs, priority, attempt, errors, created_at, finished_at, state, NULL, NULL
    FROM {schema}.archive WHERE id = %(id)s::int8
)
SELECT f.id, f.queue, f.task, f.state, f.args::text, f.kwargs::text, f.priority, f.attempt, f.errors::text,
       CASE WHEN f.created_at >= '0001-01-02' AND f.created_at < '9999-12-30' THEN f.created_at END,
       CASE WHEN f.finished_at >= '0001-01-02' AND f.finished_at < '9999-12-30' THEN f.finished_at END,
       f.run_at, f.token,
       (SELECT w.name FROM {schema}.lease AS l JOIN {schema}.worker AS w ON w.id = l.worker_id
        WHERE l.id = f.token AND l.queue = f.queue),
       CASE WHEN f.rank = 3 THEN (
           SELECT r.value::text FROM {schema}.result AS r
           WHERE r.id = f.id AND r.queue = f.queue AND r.expires_at > clock_timestamp()) END
FROM found AS f
ORDER BY f.rank
LIMIT 1

-- name: progress_write
-- What running jobs report, of those whose token is still the current one. percent: below 0 there is none.
-- token <=: a report that was long on its way does not cover what the next attempt has said.
INSERT INTO {schema}.progress AS p (id, queue, token, attempt, percent, message, updated_at)
SELECT id, queue, lease_id, attempt, nullif((%(percents)b::float8[])[width_bucket(id, %(ids)b::int8[])], -1),
       (%(messages)b::text[])[width_bucket(id, %(ids)b::int8[])], clock_timestamp()
FROM {schema}.job
WHERE queue = %(queue)s::text AND id = ANY (%(ids)b::int8[])
  AND lease_id = (%(tokens)b::int8[])[width_bucket(id, %(ids)b::int8[])]
ORDER BY id
ON CONFLICT (id, queue) DO UPDATE
SET token = excluded.token, attempt = excluded.attempt, percent = excluded.percent, message = excluded.message,
    updated_at = excluded.updated_at
WHERE p.token <= excluded.token

-- name: progress_read
-- Only of jobs that live: the row of one that has ended waits for its removal, unseen.
SELECT p.id, p.percent, p.message, p.attempt,
       CASE WHEN p.updated_at >= '0001-01-02' AND p.updated_at < '9999-12-30' THEN p.updated_at END
FROM {schema}.progress AS p
WHERE p.id = ANY (%(ids)b::int8[]) AND EXISTS (SELECT 1 FROM {schema}.job AS j WHERE j.id = p.id)

-- name: progress_prune
-- What ended jobs left behind. The minute lets a report that is under way find its row.
WITH old AS MATERIALIZED (
    SELECT id, queue
    FROM {schema}.progress AS p
    WHERE updated_at < clock_timestamp() - interval '1 minute'
      AND NOT EXISTS (SELECT 1 FROM {schema}.job AS j WHERE j.id = p.id AND j.queue = p.queue)
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.progress AS p USING old WHERE p.id = old.id AND p.queue = old.queue RETURNING p.id
)
SELECT count(*) FROM gone

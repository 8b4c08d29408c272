-- Jobs with a unique key. Each of these statements works alone, so that nothing is half done between two of them. What it lost to a
-- transaction that committed meanwhile has no id in the answer, and is asked for again, in a new snapshot.

-- name: job_enqueue_unique
-- on_conflict skip and raise; what is written at job_enqueue_keyed holds here too. Nothing of an existing job is locked or changed.
-- held: the newest job of each key; the one that waits behind a running one counts.
-- read committed: elsewhere the snapshot may be old, and a job that it shows be gone; there the index alone decides. It waits for
--   the transaction that holds the key, and PostgreSQL refuses with a serialization error where the snapshot cannot see the row.
-- ORDER BY unique_key: two bulks with the same keys take them in the same order. nextval by the order of the input.
-- opened, before the job: of two that find no window only one opens it. Its id is that of the job inserted below; adopted corrects
--   it where a call without a window took the key at that very moment.
-- RETURNING only what a producer may read.
-- all_or_none: a bulk with on_conflict="raise" inserts nothing where something is in its way.
-- late: what has the key is too old to be run, and has not been swept: unique_expire decides, since who only enqueues may not
--   see whether it runs.
-- expires_at: as in job_enqueue_keyed.
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), timed AS MATERIALIZED (
    SELECT at, coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second') AS due FROM moment
), given AS MATERIALIZED (
    SELECT number, args, kwargs, unique_key, lane
    FROM unnest(%(args)b::text[], %(kwargs)b::text[], %(unique_keys)b::text[], %(lanes)b::text[])
         WITH ORDINALITY AS given(args, kwargs, unique_key, lane, number)
), held AS MATERIALIZED (
    SELECT DISTINCT ON (unique_key) unique_key, id, expires_at <= (SELECT at FROM moment) AS late
    FROM (SELECT unique_key, id, false AS behind, expires_at
          FROM {schema}.job WHERE queue = %(queue)s::text AND unique_key = ANY (%(unique_keys)b::text[])
          UNION ALL
          SELECT next_key, id, true, expires_at
          FROM {schema}.job WHERE queue = %(queue)s::text AND next_key = ANY (%(unique_keys)b::text[])) AS live
    ORDER BY unique_key, behind DESC
), spent AS MATERIALIZED (
    SELECT unique_key, job_id
    FROM {schema}.unique_window
    WHERE %(unique_for)s::float8 IS NOT NULL AND queue = %(queue)s::text AND unique_key = ANY (%(unique_keys)b::text[])
      AND until > (SELECT at FROM moment)
), adopted AS (
    UPDATE {schema}.unique_window AS w
    SET job_id = held.id
    FROM held
    WHERE %(unique_for)s::float8 IS NOT NULL AND w.queue = %(queue)s::text AND w.unique_key = held.unique_key
      AND w.until > (SELECT at FROM moment) AND w.job_id <> held.id
), wanted AS MATERIALIZED (
    SELECT nextval('{schema}.job_id_seq') AS id, free.*
    FROM (SELECT given.*
          FROM given
          WHERE NOT EXISTS (SELECT 1 FROM spent WHERE spent.unique_key = given.unique_key)
            AND (current_setting('transaction_isolation') <> 'read committed'
                 OR NOT EXISTS (SELECT 1 FROM held WHERE held.unique_key = given.unique_key))
            AND NOT (%(all_or_none)s::bool AND (EXISTS (SELECT 1 FROM held) OR EXISTS (SELECT 1 FROM spent)))
          ORDER BY number) AS free
), opened AS (
    INSERT INTO {schema}.unique_window (unique_key, queue, until, job_id)
    SELECT unique_key, %(queue)s::text, greatest(at, due) + %(unique_for)s::float8 * interval '1 second', id
    FROM wanted, timed
    WHERE %(unique_for)s::float8 IS NOT NULL AND unique_key IS NOT NULL
    ORDER BY unique_key
    ON CONFLICT (unique_key, queue) DO UPDATE SET until = excluded.until, job_id = excluded.job_id
    WHERE unique_window.until <= (SELECT at FROM moment)
    RETURNING job_id
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at,
        unique_key, lane, lane_rank, lane_width, park, expires_at)
    SELECT id, %(queue)s::text, %(task)s::text, args::json, kwargs::json, %(priority)s::int2,
           CASE WHEN lane IS NULL AND (SELECT due <= at FROM timed) THEN id END, (SELECT due FROM timed WHERE due > at),
           %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, (SELECT at FROM timed),
           unique_key, lane, %(lane_rank)s::int2, %(lane_width)s::int4, %(park)s::bool,
           (SELECT greatest(due, at) + %(expires_in)s::float8 * interval '1 second' FROM timed)
    FROM wanted
    WHERE %(unique_for)s::float8 IS NULL OR unique_key IS NULL OR id IN (SELECT job_id FROM opened)
    ORDER BY unique_key, number
    ON CONFLICT (unique_key, queue) WHERE unique_key IS NOT NULL DO NOTHING
    RETURNING id
), woken AS (
    INSERT INTO {schema}.admission (queue, lane)
    SELECT DISTINCT %(queue)s::text, lane
    FROM wanted JOIN new ON new.id = wanted.id
    WHERE lane IS NOT NULL AND (SELECT due <= at FROM timed)
)
SELECT given.number, coalesce(new.id, held.id, spent.job_id), new.id IS NOT NULL, new.id IS NULL AND coalesce(held.late, false),
       CASE WHEN given.number = 1 AND %(channel)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM new)
            THEN pg_notify(%(channel)s::text, %(prefix)s::text || %(queue)s::text) END
FROM given
LEFT JOIN wanted ON wanted.number = given.number
LEFT JOIN new ON new.id = wanted.id
LEFT JOIN held ON held.unique_key = given.unique_key
LEFT JOIN spent ON spent.unique_key = given.unique_key

-- name: job_enqueue_over
-- on_conflict merge (mode 1), replace (2) and supersede (3); what is written at job_enqueue_unique holds here too.
-- behind, waiting: the jobs that do not run, locked in the order of their keys; claims pass over them until the commit. A running
--   one is never locked: a slow caller must not hold up the worker that settles it.
-- asked: the time that counts. No later than delay_limit after the job was enqueued first, no earlier than its window allows. A
--   merge is as early as the earlier of both, but does not shorten the pause before a retry.
-- stays: what is in line keeps its place there. Everything else passes through promotion, which puts it into line.
-- holds: what has the slot of an ordering key keeps it while it waits for its retry, as in job_retry; a job for later does not.
-- expires_at: that of the new call; merged jobs are there until the last of them is too old.
-- runs: where the key's job runs, the new one waits behind it. If that job has ended or is given back at this moment, the next
--   unique_follow finds the new one.
-- opened: only where the window is still the one that was looked at.
-- ON CONFLICT without a target: either place of the key may be taken.
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), given AS MATERIALIZED (
    SELECT number, args::json AS args, kwargs::json AS kwargs, unique_key, lane
    FROM unnest(%(args)b::text[], %(kwargs)b::text[], %(unique_keys)b::text[], %(lanes)b::text[])
         WITH ORDINALITY AS given(args, kwargs, unique_key, lane, number)
), behind AS MATERIALIZED (
    SELECT id, next_key AS key, true AS is_next, false AS in_line, next_at AS before, attempt, created_at, lane, admitted
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND next_key = ANY (%(unique_keys)b::text[])
    ORDER BY next_key
    FOR NO KEY UPDATE
), waiting AS MATERIALIZED (
    SELECT id, unique_key AS key, false AS is_next, run_at IS NULL AS in_line, run_at AS before, attempt, created_at, lane,
           admitted
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND lease_id IS NULL AND unique_key = ANY (ARRAY(
        SELECT unnest(%(unique_keys)b::text[]) EXCEPT SELECT key FROM behind))
    ORDER BY unique_key
    FOR NO KEY UPDATE
), target AS MATERIALIZED (
    SELECT * FROM behind UNION ALL SELECT * FROM waiting
), windows AS MATERIALIZED (
    SELECT unique_key, until, job_id
    FROM {schema}.unique_window
    WHERE %(unique_for)s::float8 IS NOT NULL AND queue = %(queue)s::text AND unique_key = ANY (%(unique_keys)b::text[])
      AND until > (SELECT at FROM moment)
), asked AS MATERIALIZED (
    SELECT given.*, target.id AS old, target.is_next, target.lane AS old_lane, target.admitted, at,
           CASE WHEN %(mode)s::int2 > 1 OR target.id IS NULL THEN timed.due
                WHEN target.attempt > 0 THEN coalesce(target.before, at)
                ELSE least(timed.due, coalesce(target.before, at)) END AS due,
           target.in_line AND given.lane IS NOT DISTINCT FROM target.lane
               AND (timed.due <= at OR %(mode)s::int2 = 1) AS stays,
           coalesce(target.admitted AND given.lane = target.lane AND (timed.due <= at OR %(mode)s::int2 = 1)
                    AND (target.in_line OR target.lane >= 'o' AND target.lane < 'p'), false) AS holds
    FROM moment
    CROSS JOIN given
    LEFT JOIN target ON target.key = given.unique_key
    LEFT JOIN windows ON windows.unique_key = given.unique_key
    CROSS JOIN LATERAL (
        SELECT greatest(
            least(coalesce(%(run_at)s::timestamptz, at + %(delay)s::float8 * interval '1 second'),
                  target.created_at + %(delay_limit)s::float8 * interval '1 second'),
            CASE WHEN windows.job_id = target.id THEN windows.until - %(unique_for)s::float8 * interval '1 second'
                 ELSE windows.until END) AS due) AS timed
), changed AS (
    UPDATE {schema}.job AS j
    SET task = %(task)s::text,
        args = CASE WHEN %(mode)s::int2 = 1 THEN {schema}.payload_merge(j.args, a.args, %(distinct)s::bool) ELSE a.args END,
        kwargs = CASE WHEN %(mode)s::int2 = 1 THEN {schema}.payload_merge(j.kwargs, a.kwargs, %(distinct)s::bool)
                      ELSE a.kwargs END,
        priority = CASE WHEN %(mode)s::int2 = 1 THEN greatest(j.priority, %(priority)s::int2) ELSE %(priority)s::int2 END,
        max_attempts = %(max_attempts)s::int4, timeout = %(timeout)s::float8, retry = %(retry)s::json,
        headers = %(headers)s::json,
        attempt = CASE WHEN %(mode)s::int2 = 1 THEN j.attempt ELSE 0 END,
        lost = CASE WHEN %(mode)s::int2 = 1 THEN j.lost ELSE 0 END,
        errors = CASE WHEN %(mode)s::int2 = 1 THEN j.errors END,
        next_mode = CASE WHEN a.is_next THEN greatest(j.next_mode, %(mode)s::int2) END,
        next_at = CASE WHEN a.is_next THEN a.due END,
        run_at = CASE WHEN a.is_next THEN 'infinity' WHEN a.stays THEN NULL ELSE a.due END,
        position = CASE WHEN a.stays THEN j.position END,
        admitted = CASE WHEN a.holds THEN j.admitted END,
        lane = a.lane, lane_rank = %(lane_rank)s::int2, lane_width = %(lane_width)s::int4, park = %(park)s::bool,
        expires_at = CASE WHEN %(mode)s::int2 > 1
                          THEN greatest(a.due, a.at) + %(expires_in)s::float8 * interval '1 second'
                          WHEN j.expires_at IS NOT NULL AND %(expires_in)s::float8 IS NOT NULL
                          THEN greatest(j.expires_at, greatest(a.due, a.at) + %(expires_in)s::float8 * interval '1 second') END
    FROM asked AS a
    WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM target)) AND j.id = a.old
), stretched AS (
    UPDATE {schema}.unique_window AS w
    SET until = greatest(a.at, a.due) + %(unique_for)s::float8 * interval '1 second', job_id = a.old
    FROM asked AS a
    WHERE %(unique_for)s::float8 IS NOT NULL AND w.queue = %(queue)s::text AND w.unique_key = a.unique_key
      AND a.old IS NOT NULL
), wanted AS MATERIALIZED (
    SELECT nextval('{schema}.job_id_seq') AS id, free.*
    FROM (SELECT a.*, EXISTS (SELECT 1 FROM {schema}.job AS r
                              WHERE r.queue = %(queue)s::text AND r.unique_key = a.unique_key AND r.lease_id IS NOT NULL) AS runs
          FROM asked AS a
          WHERE old IS NULL
          ORDER BY number) AS free
), opened AS (
    INSERT INTO {schema}.unique_window (unique_key, queue, until, job_id)
    SELECT unique_key, %(queue)s::text, greatest(at, due) + %(unique_for)s::float8 * interval '1 second', id
    FROM wanted
    WHERE %(unique_for)s::float8 IS NOT NULL AND unique_key IS NOT NULL
    ORDER BY unique_key
    ON CONFLICT (unique_key, queue) DO UPDATE SET until = excluded.until, job_id = excluded.job_id
    WHERE unique_window.until <= (SELECT at FROM moment)
       OR unique_window.until = (SELECT w.until FROM windows AS w WHERE w.unique_key = unique_window.unique_key)
    RETURNING job_id
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at,
        unique_key, next_key, next_mode, next_at, lane, lane_rank, lane_width, park, expires_at)
    SELECT id, %(queue)s::text, %(task)s::text, args, kwargs, %(priority)s::int2,
           CASE WHEN lane IS NULL AND NOT runs AND due <= at THEN id END,
           CASE WHEN runs THEN 'infinity' WHEN due > at THEN due END,
           %(max_attempts)s::int4, %(timeout)s::float8, %(retry)s::json, %(headers)s::json, at,
           CASE WHEN NOT runs THEN unique_key END, CASE WHEN runs THEN unique_key END,
           CASE WHEN runs THEN %(mode)s::int2 END, CASE WHEN runs THEN due END,
           lane, %(lane_rank)s::int2, %(lane_width)s::int4, %(park)s::bool,
           greatest(due, at) + %(expires_in)s::float8 * interval '1 second'
    FROM wanted
    WHERE %(unique_for)s::float8 IS NULL OR unique_key IS NULL OR id IN (SELECT job_id FROM opened)
    ORDER BY unique_key, number
    ON CONFLICT DO NOTHING
    RETURNING id, lane, run_at, next_at, next_key
), woken AS (
    INSERT INTO {schema}.admission (queue, lane)
    SELECT DISTINCT %(queue)s::text, lane
    FROM (SELECT lane FROM new WHERE lane IS NOT NULL AND run_at IS NULL
          UNION ALL
          SELECT old_lane FROM asked WHERE old_lane IS NOT NULL AND NOT is_next AND NOT holds) AS lanes
    RETURNING lane
)
SELECT given.number, coalesce(asked.old, new.id), new.id IS NOT NULL, false,
       CASE WHEN given.number = 1 AND %(alert)s::text IS NOT NULL
                 AND (EXISTS (SELECT 1 FROM new WHERE run_at IS NULL) OR EXISTS (SELECT 1 FROM asked WHERE stays))
            THEN pg_notify(%(alert)s::text, %(queue)s::text) END,
       CASE WHEN given.number = 1 AND %(alert)s::text IS NOT NULL
                 AND (EXISTS (SELECT 1 FROM new, moment WHERE coalesce(next_at, run_at) < at + interval '5 seconds')
                      OR EXISTS (SELECT 1 FROM asked WHERE old IS NOT NULL AND NOT stays AND due < at + interval '5 seconds'))
            THEN pg_notify(%(alert)s::text, 'due ' || %(queue)s::text) END,
       CASE WHEN given.number = 1 AND %(alert)s::text IS NOT NULL AND %(mode)s::int2 = 3
                 AND (EXISTS (SELECT 1 FROM new WHERE next_key IS NOT NULL) OR EXISTS (SELECT 1 FROM asked WHERE is_next))
            THEN pg_notify(%(alert)s::text, 'cancel ' || %(queue)s::text) END,
       CASE WHEN given.number = 1 AND %(alert)s::text IS NOT NULL AND EXISTS (SELECT 1 FROM woken)
            THEN pg_notify(%(alert)s::text, 'key ' || %(queue)s::text) END
FROM given
JOIN asked ON asked.number = given.number
LEFT JOIN wanted ON wanted.number = given.number
LEFT JOIN new ON new.id = wanted.id

-- name: unique_expire
-- Archives what has these keys, waits, and is too old to be run, as job_expire does with all of a queue; see the function.
SELECT keys, CASE WHEN %(alert)s::text IS NOT NULL AND cardinality(keys) > 0
                  THEN pg_notify(%(alert)s::text, 'key ' || %(queue)s::text) END
FROM (SELECT {schema}.unique_expire(%(queue)s::text, %(unique_keys)b::text[], %(archive)s::bool) AS keys) AS expired

-- name: unique_follow
-- Moves what waits behind the job of its key into its place, where that is free now; see the function.
SELECT ids, CASE WHEN %(channel)s::text IS NOT NULL AND cardinality(ids) > 0 THEN pg_notify(%(channel)s::text, %(queue)s::text) END
FROM (SELECT {schema}.unique_follow(%(queue)s::text, %(archive)s::bool) AS ids) AS followed

-- name: unique_prune
-- Windows that have closed keep nobody away. In batches; SKIP LOCKED: an enqueue may be opening one anew.
DELETE FROM {schema}.unique_window
WHERE queue = %(queue)s::text AND unique_key = ANY (ARRAY(
    SELECT unique_key
    FROM {schema}.unique_window
    WHERE queue = %(queue)s::text AND until < clock_timestamp()
    ORDER BY queue, until
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED))
RETURNING unique_key

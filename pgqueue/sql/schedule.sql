-- A schedule whose `definition` is not NULL comes from code, and is ticked by processes only whose code has it: they name it in
-- `names`. So what disappears from the code stops with the last process that knew it, and nobody need decide when that is.

-- name: schedule_next
-- Seconds until somebody must look (0 or less: now); no row when nothing is to be waited for. What an idle worker asks.
-- left_out: what this process could not tick a moment ago must not hide what comes after it.
-- greatest(): before PostgreSQL 17 nothing can be subtracted from minus infinity, which somebody may have written by hand.
SELECT extract(epoch FROM greatest(next_at, 'epoch') - clock_timestamp())::float8
FROM {schema}.schedule
WHERE next_at IS NOT NULL AND paused_at IS NULL AND next_at < 'infinity'
  AND (definition IS NULL OR name = ANY (%(names)b::text[])) AND name <> ALL (%(left_out)b::text[])
ORDER BY next_at
LIMIT 1

-- name: schedule_due
-- Those to look at now, and what time it is. Nothing is locked: a process that is frozen between this and its tick holds nobody up.
-- CASE: a time beyond Python's years, written by hand, must not make the whole batch unreadable.
SELECT name, task, cron, every, tz, missed, grace, overlap, version,
       CASE WHEN starts_at >= '0001-01-02' AND starts_at < '9999-12-30' THEN starts_at END,
       CASE WHEN ticked_to >= '0001-01-02' AND ticked_to < '9999-12-30' THEN ticked_to END,
       clock_timestamp()
FROM {schema}.schedule
WHERE next_at IS NOT NULL AND paused_at IS NULL AND next_at <= (SELECT clock_timestamp())
  AND (definition IS NULL OR name = ANY (%(names)b::text[])) AND name <> ALL (%(left_out)b::text[])
ORDER BY next_at
LIMIT %(limit)s::int8

-- name: schedule_tick
-- The jobs of some ticks and the mark that these are made, in one statement: both or neither, whenever a process dies.
-- version and ticked_to: as they were read. Whoever comes second finds another mark, and makes nothing.
-- SKIP LOCKED: the second does not wait for the first, nor for somebody's open transaction.
-- wanted: without overlap, nothing while the last job lives. What changes last_job_id otherwise also changes the version, so that
--   job is in this statement's view.
-- greatest(), least(): a number written by hand must not fail the ticks of its schedule.
-- The subquery with nextval is not flattened (it is volatile), so ids follow the order of the ticks.
WITH mine AS MATERIALIZED (
    SELECT *
    FROM {schema}.schedule
    WHERE name = %(name)s::text AND version = %(version)s::int8 AND ticked_to = %(seen)s::timestamptz AND paused_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
), wanted AS MATERIALIZED (
    SELECT name
    FROM mine
    WHERE overlap OR NOT EXISTS (SELECT 1 FROM {schema}.job AS j WHERE j.id = mine.last_job_id AND j.queue = mine.last_queue)
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, max_attempts, timeout, retry, headers, created_at,
        expires_at)
    SELECT placed.id, queue, task, args, kwargs, priority, placed.id, max_attempts, timeout, retry,
           (coalesce(headers::jsonb, '{}') || jsonb_build_object('schedule', mine.name, 'scheduled_for', placed.tick))::json,
           clock_timestamp(),
           CASE WHEN mine.expires_in IS NOT NULL
                THEN clock_timestamp() + greatest(least(mine.expires_in, 1e9), 0) * interval '1 second' END
    FROM (SELECT nextval('{schema}.job_id_seq') AS id, tick
          FROM (SELECT unnest(%(ticks)b::text[]) AS tick WHERE EXISTS (SELECT 1 FROM wanted)) AS given) AS placed, mine
    RETURNING id, queue
), moved AS (
    UPDATE {schema}.schedule AS s
    SET ticked_to = %(ticked_to)s::timestamptz, next_at = %(next_at)s::timestamptz,
        last_at = CASE WHEN made.id IS NULL THEN s.last_at ELSE %(ticked_to)s::timestamptz END,
        last_job_id = coalesce(made.id, s.last_job_id), last_queue = coalesce(made.queue, s.last_queue)
    FROM (SELECT max(id) AS id, max(queue) AS queue FROM new) AS made
    WHERE s.name IN (SELECT name FROM mine)
    RETURNING s.name
)
SELECT ARRAY(SELECT id FROM new ORDER BY id),
       (SELECT CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, max(queue)) END FROM new HAVING count(*) > 0)
FROM moved

-- name: schedule_affirm
-- Says which of these definitions must be written: what is not there, and what says something else. A definition that was superseded
-- comes back only when no process that says the newer one was seen for a while: processes of the version before, which restart
-- during a deploy, must not turn it back.
-- The others are affirmed, about once per `often`, by whoever comes first.
WITH given AS MATERIALIZED (
    SELECT name, definition FROM unnest(%(names)b::text[], %(definitions)b::text[]) AS given(name, definition)
), ours AS MATERIALIZED (
    SELECT s.name
    FROM {schema}.schedule AS s JOIN given ON given.name = s.name AND given.definition = s.definition
    WHERE s.affirmed_at IS NULL OR s.affirmed_at < clock_timestamp() - %(often)s::float8 * interval '1 second'
    FOR NO KEY UPDATE OF s SKIP LOCKED
), affirmed AS (
    UPDATE {schema}.schedule SET affirmed_at = clock_timestamp() WHERE name = ANY (ARRAY(SELECT name FROM ours))
)
SELECT given.name
FROM given LEFT JOIN {schema}.schedule AS s ON s.name = given.name
WHERE s.name IS NULL
   OR s.definition IS NULL
   OR (s.definition <> given.definition
       AND (given.definition <> ALL (s.superseded) OR s.affirmed_at IS NULL
            OR s.affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second'))

-- name: schedule_define
-- What the code says, over what code said before. Of processes that start together one writes; the rule is that of schedule_affirm.
-- What an operator paused stays paused. Where the timing stays the same the ticks go on as they were; else they begin now.
INSERT INTO {schema}.schedule AS s (
    name, cron, every, tz, missed, grace, overlap, queue, task, args, kwargs, priority, max_attempts, timeout, retry, headers,
    expires_in, definition, affirmed_at)
VALUES (%(name)s::text, %(cron)s::text, %(every)s::float8, %(tz)s::text, %(missed)s::text, %(grace)s::float8, %(overlap)s::bool,
        %(queue)s::text, %(task)s::text, %(args)s::json, %(kwargs)s::json, %(priority)s::int2, %(max_attempts)s::int4,
        %(timeout)s::float8, %(retry)s::json, %(headers)s::json, %(expires_in)s::float8, %(definition)s::text,
        clock_timestamp())
ON CONFLICT (name) DO UPDATE
SET cron = excluded.cron, every = excluded.every, tz = excluded.tz, missed = excluded.missed, grace = excluded.grace,
    overlap = excluded.overlap, queue = excluded.queue, task = excluded.task, args = excluded.args, kwargs = excluded.kwargs,
    priority = excluded.priority, max_attempts = excluded.max_attempts, timeout = excluded.timeout, retry = excluded.retry,
    headers = excluded.headers, expires_in = excluded.expires_in, definition = excluded.definition,
    affirmed_at = excluded.affirmed_at, version = s.version + 1,
    superseded = CASE WHEN s.definition IS NULL THEN s.superseded
                 ELSE (array_remove(s.superseded, excluded.definition) || s.definition)[greatest(1, cardinality(s.superseded) - 30):]
                 END,
    starts_at = CASE WHEN s.every IS DISTINCT FROM excluded.every THEN excluded.starts_at ELSE s.starts_at END,
    ticked_to = CASE WHEN (s.cron, s.every, s.tz) IS DISTINCT FROM (excluded.cron, excluded.every, excluded.tz)
                THEN excluded.ticked_to ELSE s.ticked_to END,
    next_at = excluded.next_at
WHERE s.definition IS NULL
   OR (s.definition <> excluded.definition
       AND (excluded.definition <> ALL (s.superseded) OR s.affirmed_at IS NULL
            OR s.affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second'))
RETURNING s.name

-- name: schedule_forget
-- What no code has said for so long. It has not ticked since then; only a pause would have been kept in it.
DELETE FROM {schema}.schedule
WHERE definition IS NOT NULL AND affirmed_at < clock_timestamp() - %(after)s::float8 * interval '1 second'
RETURNING name

-- name: schedule_add
-- A schedule made at run time, or made anew under its name. The same once more changes nothing, so that an application may say it at
-- every start. One that comes from code is left alone.
INSERT INTO {schema}.schedule AS s (
    name, cron, every, tz, missed, grace, overlap, queue, task, args, kwargs, priority, max_attempts, timeout, retry, headers,
    expires_in)
VALUES (%(name)s::text, %(cron)s::text, %(every)s::float8, %(tz)s::text, %(missed)s::text, %(grace)s::float8, %(overlap)s::bool,
        %(queue)s::text, %(task)s::text, %(args)s::json, %(kwargs)s::json, %(priority)s::int2, %(max_attempts)s::int4,
        %(timeout)s::float8, %(retry)s::json, %(headers)s::json, %(expires_in)s::float8)
ON CONFLICT (name) DO UPDATE
SET cron = excluded.cron, every = excluded.every, tz = excluded.tz, missed = excluded.missed, grace = excluded.grace,
    overlap = excluded.overlap, queue = excluded.queue, task = excluded.task, args = excluded.args, kwargs = excluded.kwargs,
    priority = excluded.priority, max_attempts = excluded.max_attempts, timeout = excluded.timeout, retry = excluded.retry,
    headers = excluded.headers, expires_in = excluded.expires_in, version = s.version + 1,
    starts_at = CASE WHEN s.every IS DISTINCT FROM excluded.every THEN excluded.starts_at ELSE s.starts_at END,
    ticked_to = CASE WHEN (s.cron, s.every, s.tz) IS DISTINCT FROM (excluded.cron, excluded.every, excluded.tz)
                THEN excluded.ticked_to ELSE s.ticked_to END,
    next_at = excluded.next_at
WHERE s.definition IS NULL
  AND (s.cron, s.every, s.tz, s.missed, s.grace, s.overlap, s.queue, s.task, s.args::text, s.kwargs::text, s.priority,
       s.max_attempts, s.timeout, s.retry::text, s.headers::text, s.expires_in)
      IS DISTINCT FROM
      (excluded.cron, excluded.every, excluded.tz, excluded.missed, excluded.grace, excluded.overlap, excluded.queue,
       excluded.task, excluded.args::text, excluded.kwargs::text, excluded.priority, excluded.max_attempts, excluded.timeout,
       excluded.retry::text, excluded.headers::text, excluded.expires_in)
RETURNING s.name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(notice)s::text) END

-- name: schedule_lock
-- What may be changed of a schedule, locked until the end of the transaction: the next statement then sees what was done before.
SELECT cron, every, tz, missed, grace, overlap
FROM {schema}.schedule
WHERE name = %(name)s::text
FOR NO KEY UPDATE

-- name: schedule_change
UPDATE {schema}.schedule AS s
SET starts_at = CASE WHEN s.every IS DISTINCT FROM %(every)s::float8 THEN clock_timestamp() ELSE s.starts_at END,
    ticked_to = CASE WHEN (s.cron, s.every, s.tz) IS DISTINCT FROM (%(cron)s::text, %(every)s::float8, %(tz)s::text)
                THEN clock_timestamp() ELSE s.ticked_to END,
    cron = %(cron)s::text, every = %(every)s::float8, tz = %(tz)s::text, missed = %(missed)s::text, grace = %(grace)s::float8,
    overlap = %(overlap)s::bool, version = s.version + 1, next_at = clock_timestamp()
WHERE s.name = %(name)s::text
RETURNING CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(notice)s::text) END

-- name: schedule_pause
UPDATE {schema}.schedule
SET version = version + CASE WHEN paused_at IS NULL THEN 1 ELSE 0 END, paused_at = coalesce(paused_at, clock_timestamp())
WHERE name = %(name)s::text
RETURNING name

-- name: schedule_resume
-- The ticks of the pause do not come: it goes on from now. greatest(): the clock may have been set back.
UPDATE {schema}.schedule
SET ticked_to = CASE WHEN paused_at IS NULL THEN ticked_to ELSE greatest(ticked_to, clock_timestamp()) END,
    version = version + CASE WHEN paused_at IS NULL THEN 0 ELSE 1 END, paused_at = NULL, next_at = clock_timestamp()
WHERE name = %(name)s::text
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(notice)s::text) END

-- name: schedule_run
-- One job now, beside the ticks. After schedule_lock: only so this statement sees the job that a tick made meanwhile.
-- version: a tick that was planned before this does not know the new job.
WITH new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, max_attempts, timeout, retry, headers, created_at,
        expires_at)
    SELECT placed.id, queue, task, args, kwargs, priority, placed.id, max_attempts, timeout, retry,
           (coalesce(headers::jsonb, '{}') || jsonb_build_object('schedule', name, 'scheduled_for',
               to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')))::json,
           clock_timestamp(),
           CASE WHEN s.expires_in IS NOT NULL
                THEN clock_timestamp() + greatest(least(s.expires_in, 1e9), 0) * interval '1 second' END
    FROM (SELECT nextval('{schema}.job_id_seq') AS id) AS placed, {schema}.schedule AS s
    WHERE name = %(name)s::text
      AND (overlap OR NOT EXISTS (SELECT 1 FROM {schema}.job AS j WHERE j.id = s.last_job_id AND j.queue = s.last_queue))
    RETURNING id, queue
)
UPDATE {schema}.schedule AS s
SET last_job_id = new.id, last_queue = new.queue, version = s.version + 1
FROM new
WHERE s.name = %(name)s::text
RETURNING new.id, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, new.queue) END

-- name: schedule_remove
-- Not what a living process would write again.
DELETE FROM {schema}.schedule
WHERE name = %(name)s::text
  AND (definition IS NULL OR affirmed_at IS NULL
       OR affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second')
RETURNING name

-- name: schedule_list
-- Payloads are left out, for roles that may not read them.
SELECT name, task, queue, cron, every, tz, missed, grace, overlap, priority,
       CASE WHEN paused_at IS NOT NULL THEN 'paused'
            WHEN definition IS NOT NULL
                 AND (affirmed_at IS NULL OR affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second')
            THEN 'not in code' ELSE 'ticking' END AS state,
       definition IS NOT NULL,
       CASE WHEN starts_at >= '0001-01-02' AND starts_at < '9999-12-30' THEN starts_at END,
       CASE WHEN ticked_to >= '0001-01-02' AND ticked_to < '9999-12-30' THEN ticked_to END,
       CASE WHEN paused_at >= '0001-01-02' AND paused_at < '9999-12-30' THEN paused_at END,
       CASE WHEN last_at >= '0001-01-02' AND last_at < '9999-12-30' THEN last_at END,
       last_job_id, clock_timestamp()
FROM {schema}.schedule
WHERE %(names)b::text[] IS NULL OR name = ANY (%(names)b::text[])
ORDER BY name

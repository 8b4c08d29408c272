-- Pauses are kept in the row of the queue, which every claim reads anyway. An upsert, so that a queue without a row has none
-- to lock; ON CONFLICT sees the newest row, so that of two pauses at once neither is lost.

-- name: queue_pause
-- The whole queue. seconds, until: when the pause ends, either or neither; the last call decides. The moment of the first
-- one stays, unless that pause is over.
INSERT INTO {schema}.queue AS q (name, paused_at, paused_until)
SELECT %(queue)s::text, at, coalesce(%(until)s::timestamptz, at + %(seconds)s::float8 * interval '1 second')
FROM (SELECT clock_timestamp() AS at) AS moment
ON CONFLICT (name) DO UPDATE
SET paused_at = CASE WHEN coalesce(q.paused_until > excluded.paused_at, true) THEN coalesce(q.paused_at, excluded.paused_at)
                     ELSE excluded.paused_at END,
    paused_until = excluded.paused_until
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL AND paused_until IS NOT NULL
                     THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END

-- name: queue_pause_task
-- One task of it. Pauses that are over go.
INSERT INTO {schema}.queue AS q (name, paused_tasks)
SELECT %(queue)s::text, jsonb_build_object(%(task)s::text, jsonb_build_object(
           'at', extract(epoch FROM at),
           'until', coalesce(extract(epoch FROM %(until)s::timestamptz),
                             extract(epoch FROM at) + %(seconds)s::float8::numeric)))
FROM (SELECT clock_timestamp() AS at) AS moment
ON CONFLICT (name) DO UPDATE
SET paused_tasks = coalesce((
        SELECT jsonb_object_agg(task, term)
        FROM jsonb_each(CASE WHEN jsonb_typeof(q.paused_tasks) = 'object' THEN q.paused_tasks END) AS paused(task, term)
        WHERE CASE WHEN jsonb_typeof(term -> 'until') = 'number'
                   THEN (term ->> 'until')::numeric > extract(epoch FROM clock_timestamp()) ELSE true END), '{}')
    || excluded.paused_tasks
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL AND (paused_tasks -> %(task)s::text -> 'until') <> 'null'
                     THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END

-- name: queue_resume
UPDATE {schema}.queue SET paused_at = NULL, paused_until = NULL
WHERE name = %(queue)s::text AND paused_at IS NOT NULL
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(queue)s::text) END

-- name: queue_resume_task
UPDATE {schema}.queue SET paused_tasks = nullif(paused_tasks - %(task)s::text, '{}')
WHERE name = %(queue)s::text AND jsonb_typeof(paused_tasks) = 'object' AND paused_tasks ? %(task)s::text
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(queue)s::text) END

-- name: pause_list
-- Pauses in force, of queues (task NULL) and of tasks. least(): a number written by hand may be beyond every year.
SELECT name, NULL, paused_at, CASE WHEN paused_until < '9999-12-30' THEN paused_until END
FROM {schema}.queue
WHERE paused_at IS NOT NULL AND coalesce(paused_until > clock_timestamp(), true)
UNION ALL
SELECT name, task,
       CASE WHEN jsonb_typeof(term -> 'at') = 'number'
            THEN to_timestamp(greatest(least((term ->> 'at')::numeric, 253370764800), 0)::float8) END,
       CASE WHEN jsonb_typeof(term -> 'until') = 'number'
            THEN to_timestamp(greatest(least((term ->> 'until')::numeric, 253370764800), 0)::float8) END
FROM {schema}.queue
CROSS JOIN LATERAL jsonb_each(CASE WHEN jsonb_typeof(paused_tasks) = 'object' THEN paused_tasks END) AS paused(task, term)
WHERE CASE WHEN jsonb_typeof(term -> 'until') = 'number'
           THEN (term ->> 'until')::numeric > extract(epoch FROM clock_timestamp()) ELSE true END
ORDER BY 1, 2

-- Priority ageing. A place in line comes from a sequence, so one number of it says who was in line at a moment: ageing_mark
-- is the number of the tick before, and all that stands before it has waited for at least the time between two ticks.
-- Nothing is stored with a job, and nothing is compared row by row. At a tick each of those jobs moves up one step, from the
-- highest priority downwards, so that none is moved twice; ageing_level is where this has got to, NULL when the tick is
-- done.

-- name: queue_set_ageing
INSERT INTO {schema}.queue (name, ageing) VALUES (%(queue)s::text, %(ageing)s::float8)
ON CONFLICT (name) DO UPDATE
SET ageing = excluded.ageing, ageing_mark = NULL, ageing_next = NULL, ageing_level = NULL, aged_at = NULL
RETURNING name, CASE WHEN %(channel)s::text IS NOT NULL AND ageing IS NOT NULL
                     THEN pg_notify(%(channel)s::text, 'due ' || %(queue)s::text) END

-- name: ageing_list
SELECT name, ageing FROM {schema}.queue WHERE ageing IS NOT NULL

-- name: ageing_tick
-- Begins a tick, if it is time for one; by whom does not matter.
-- SKIP LOCKED: of many workers one does it, and the others do not wait.
-- top: the highest priority in line or running; nothing moves beyond it. What stands alone, or is served first already, is
--   never rewritten: without this every waiting job would climb to the top for nothing. The ranges are explained at
--   job_claim.
WITH due AS MATERIALIZED (
    SELECT name
    FROM {schema}.queue
    WHERE name = %(queue)s::text AND ageing IS NOT NULL AND ageing_level IS NULL
      AND (aged_at IS NULL OR NOT isfinite(aged_at)
           OR aged_at <= clock_timestamp() - least(ageing, 1e9) * interval '1 second')
    FOR NO KEY UPDATE SKIP LOCKED
), top AS MATERIALIZED (
    SELECT priority
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND position IS NOT NULL AND priority >= -32768 AND priority <= 32767
    ORDER BY priority DESC, position
    LIMIT 1
)
UPDATE {schema}.queue AS q
SET ageing_mark = q.ageing_next, ageing_next = nextval('{schema}.job_id_seq'), aged_at = clock_timestamp(),
    ageing_level = CASE WHEN q.ageing_next IS NOT NULL THEN (SELECT priority - 1 FROM top WHERE priority > -32768) END
FROM due
WHERE q.name = due.name
RETURNING q.ageing_level

-- name: job_age
-- One batch of a tick. The lock on the queue's row is the turn: two workers never move the same job in one tick, and a crash
-- leaves the tick where it was.
-- line, found: from level to level, looking at the first of each: the highest one that still has such a job. One scan over
--   all levels would read everything that came after the mark. old reads the rows again under their locks: a job that is
--   claimed or moved at this moment is left out.
WITH RECURSIVE turn AS MATERIALIZED (
    SELECT ageing_mark AS mark, ageing_level AS level
    FROM {schema}.queue
    WHERE name = %(queue)s::text AND ageing_level IS NOT NULL AND ageing_mark IS NOT NULL
    FOR NO KEY UPDATE SKIP LOCKED
), line AS (
    SELECT j.priority, j.position, turn.mark
    FROM turn
    CROSS JOIN LATERAL (
        SELECT priority, position
        FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
          AND position IS NOT NULL AND lease_id IS NULL AND run_at IS NULL
          AND priority >= -32768 AND priority <= turn.level
        ORDER BY priority DESC, position
        LIMIT 1
    ) AS j
    UNION ALL
    SELECT j.priority, j.position, line.mark
    FROM line
    CROSS JOIN LATERAL (
        SELECT priority, position
        FROM {schema}.job
        WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
          AND position IS NOT NULL AND lease_id IS NULL AND run_at IS NULL
          AND priority >= -32768 AND priority < line.priority
        ORDER BY priority DESC, position
        LIMIT 1
    ) AS j
    WHERE line.position > line.mark
), found AS MATERIALIZED (
    SELECT mark, priority AS level FROM line WHERE position <= mark
), old AS MATERIALIZED (
    SELECT id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND position IS NOT NULL AND priority >= (SELECT level FROM found) AND priority <= (SELECT level FROM found)
      AND position <= (SELECT mark FROM found) AND lease_id IS NULL AND run_at IS NULL
    ORDER BY priority DESC, position
    LIMIT %(limit)s::int8
    FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE {schema}.job
    SET priority = priority + 1
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM old))
    RETURNING id
), went_on AS (
    UPDATE {schema}.queue
    SET ageing_level = CASE WHEN (SELECT count(*) FROM old) = %(limit)s::int8 THEN (SELECT level FROM found)
                            ELSE (SELECT level - 1 FROM found WHERE level > -32768) END
    WHERE name IN (SELECT %(queue)s::text FROM turn)
    RETURNING ageing_level
)
SELECT (SELECT array_agg(id) FROM moved), (SELECT ageing_level FROM went_on)

-- Admission: who of a lane stands in line. Whoever adds a job to a lane, or takes one out, leaves a row in `admission` in the
-- same transaction; a worker takes the rows, and in a transaction of its own gives places in line to as many jobs of the lane as
-- its width allows. Blocked jobs have no position and so do not stand in the claim index.

-- name: admission_begin
-- READ COMMITTED, whatever the role's default: the statement after the lock must see what was committed before the lock came.
BEGIN ISOLATION LEVEL READ COMMITTED

-- name: admission_take
-- after: the last row that was taken: an old snapshot keeps the dead rows before it alive, and reading them again at every turn
--   would make admission slower and slower. A pass from the start finds what committed late.
-- The ranges that are always true are explained at job_claim.
-- tried: one admission of a lane at a time. Who does not get the lock leaves the row where it is and does not wait: the other one
--   may be a worker that was frozen in the middle, and behind it every worker would stand still. The lock is that of the
--   transaction: nothing is left behind in the session.
-- ctid: the rows are locked, so they stay where they are; by their ids, all rows of the queue would be read to find them.
-- relaxed: what a crash forgets of an admission, its rows in this table included, is done again.
-- idle_in_transaction_session_timeout, for this transaction: a worker that is frozen now, or cut off, gives its lanes back.
WITH picked AS MATERIALIZED (
    SELECT ctid AS place, id, lane,
           hashtextextended(lane, hashtextextended(%(queue)s::text, hashtextextended('{schema}.lane', 0))) AS hash
    FROM {schema}.admission
    WHERE queue = %(queue)s::text AND queue >= %(queue)s::text AND queue <= %(queue)s::text
      AND id > %(after)s::int8 AND (due_at IS NULL OR due_at <= (SELECT clock_timestamp()))
    ORDER BY id
    LIMIT %(limit)s::int8
    FOR UPDATE SKIP LOCKED
), tried AS MATERIALIZED (
    SELECT hash, pg_try_advisory_xact_lock(hash) AS ours FROM (SELECT DISTINCT hash FROM picked) AS hashes
), gone AS (
    DELETE FROM {schema}.admission
    WHERE queue = %(queue)s::text AND ctid = ANY (ARRAY(SELECT place FROM picked JOIN tried USING (hash) WHERE ours))
)
SELECT array_agg(DISTINCT lane) FILTER (WHERE ours), max(id), count(*), count(*) FILTER (WHERE NOT ours),
       set_config('synchronous_commit', 'off', true), set_config('idle_in_transaction_session_timeout', '5s', true)
FROM picked JOIN tried USING (hash)

-- name: lane_admit
-- A statement of its own, after the lock: its snapshot sees every admission that held the lock before.
-- taken: counted from the rows, so that a slot cannot leak.
-- free: of an ordering key there is one, whatever a row written by hand says: a second one would break the unique index, and fail
--   the admission of all other lanes with it. No width of a job closes its lane for ever; that of an operator does.
-- most: so many of one lane at a time. A wide lane with all of its jobs at once may take longer than a worker waits for an
--   answer, and would be begun again and again.
-- locked: what somebody else holds in an open transaction (a cancellation) is left alone, and looked at again in a second;
--   nothing overtakes it in its lane meanwhile, since it is not replaced by the next one.
-- bucket, filled: as in job_claim_limited. SKIP LOCKED: an operator's open transaction may hold the row of a lane; that lane is
--   looked at again in a second, and the others go on. Of lanes without a rate no row is read for it.
-- spent: a token for each job that is admitted, in the same statement.
-- dry: the lanes with a rate. due: where jobs wait for a token and for nothing else, when it is worth looking again: as
--   limit.wait_for_token has it, and a moment, or the look would come a rounding too early. A row with that time is left in `admission`: one a lane (wakes_at), however many
--   jobs came meanwhile. unheard: there is none yet, or it is later than it need be, since the rate or the clock was changed.
WITH room AS MATERIALIZED (
    SELECT given.lane, l.width, l.rate IS NOT NULL AS rated,
           (SELECT count(*) FROM {schema}.job AS a WHERE a.lane = given.lane AND a.queue = %(queue)s::text AND a.admitted) AS taken
    FROM unnest(%(lanes)b::text[]) AS given(lane)
    LEFT JOIN {schema}.lane AS l ON l.lane = given.lane AND l.queue = %(queue)s::text
    WHERE l.parked_at IS NULL
), bucket AS MATERIALIZED (
    SELECT lane, greatest(least(rate, 1e9), 1e-9) AS rate, greatest(coalesce(burst, 1), 1) AS burst, tokens, refilled_at, wakes_at
    FROM {schema}.lane
    WHERE queue = %(queue)s::text AND lane = ANY (ARRAY(SELECT lane FROM room WHERE rated)) AND rate IS NOT NULL
    FOR NO KEY UPDATE SKIP LOCKED
), filled AS MATERIALIZED (
    SELECT lane, rate, burst, wakes_at, at, refilled_at > at AS early,
           CASE WHEN isfinite(refilled_at) AND tokens IS NOT NULL
                THEN greatest(least(tokens + rate * greatest(extract(epoch FROM at - refilled_at)::float8, 0), burst), 0)
                ELSE burst END AS tokens
    FROM bucket, (SELECT clock_timestamp() AS at) AS moment
), open AS MATERIALIZED (
    SELECT room.lane, room.rated,
           CASE WHEN rated THEN coalesce((SELECT floor(tokens) FROM filled WHERE filled.lane = room.lane), 0)::int8 END AS tokens,
           CASE WHEN room.lane >= 'o' AND room.lane < 'p' THEN 1
                ELSE coalesce(room.width, greatest(head.lane_width, 1)) END - room.taken AS free
    FROM room
    CROSS JOIN LATERAL (
        SELECT first.lane_width
        FROM {schema}.job AS first
        WHERE first.lane = room.lane AND first.queue = %(queue)s::text AND first.admitted IS NULL AND first.run_at IS NULL
        ORDER BY first.lane_rank, first.id
        LIMIT 1
    ) AS head
), wanted AS MATERIALIZED (
    SELECT open.lane, least(open.free, open.tokens) AS free, next.id, next.number
    FROM open
    CROSS JOIN LATERAL (
        SELECT j.id, row_number() OVER (ORDER BY j.lane_rank, j.id) AS number
        FROM {schema}.job AS j
        WHERE j.lane = open.lane AND j.queue = %(queue)s::text AND j.admitted IS NULL AND j.run_at IS NULL
        ORDER BY j.lane_rank, j.id
        LIMIT greatest(0, least(open.free, open.tokens, %(most)s::int8))
    ) AS next
), locked AS MATERIALIZED (
    SELECT id
    FROM {schema}.job
    WHERE queue = %(queue)s::text AND id = ANY (ARRAY(SELECT id FROM wanted)) AND lane IS NOT NULL AND admitted IS NULL
    ORDER BY id
    FOR NO KEY UPDATE SKIP LOCKED
), placed AS MATERIALIZED (
    SELECT id, nextval('{schema}.job_id_seq') AS position
    FROM (SELECT wanted.id FROM wanted JOIN locked ON locked.id = wanted.id ORDER BY wanted.number, wanted.id) AS sorted
), moved AS (
    UPDATE {schema}.job AS j
    SET admitted = true, position = placed.position
    FROM placed
    WHERE j.queue = %(queue)s::text AND j.id = ANY (ARRAY(SELECT id FROM placed)) AND j.id = placed.id
    RETURNING j.id, j.lane
), dry AS MATERIALIZED (
    SELECT lane, at, early, left_over, jobs, due, wakes_at,
           due IS NOT NULL AND NOT coalesce(wakes_at > at AND wakes_at <= due + interval '1 second', false) AS unheard
    FROM (SELECT filled.*, counted.jobs, filled.tokens - counted.jobs AS left_over,
                 CASE WHEN filled.tokens - counted.jobs < 1 AND open.free > counted.jobs AND counted.wanted >= open.tokens
                      THEN at + interval '2 microseconds' + interval '1 second' * least(1e9, greatest(
                               (1 + counted.jobs - filled.tokens) / rate,
                               least((burst + counted.jobs - filled.tokens) / rate / 2, 0.02))) END AS due
          FROM filled JOIN open ON open.lane = filled.lane
          CROSS JOIN LATERAL (SELECT (SELECT count(*) FROM moved WHERE moved.lane = filled.lane) AS jobs,
                                     (SELECT count(*) FROM wanted WHERE wanted.lane = filled.lane) AS wanted) AS counted
         ) AS spending
), spent AS (
    UPDATE {schema}.lane AS l
    SET tokens = dry.left_over, refilled_at = dry.at, wakes_at = CASE WHEN dry.unheard THEN dry.due ELSE dry.wakes_at END
    FROM dry
    WHERE l.queue = %(queue)s::text AND l.lane = ANY (ARRAY(SELECT lane FROM dry)) AND l.lane = dry.lane
      AND (dry.jobs > 0 OR dry.early OR dry.unheard)
), again AS (
    INSERT INTO {schema}.admission (queue, lane, due_at)
    SELECT DISTINCT %(queue)s::text, lane, clock_timestamp() + interval '1 second'
    FROM wanted
    WHERE id <> ALL (ARRAY(SELECT id FROM locked))
    UNION ALL
    SELECT %(queue)s::text, lane, NULL FROM wanted WHERE number = %(most)s::int8 AND free > number
    UNION ALL
    SELECT %(queue)s::text, lane, due FROM dry WHERE unheard
    UNION ALL
    SELECT %(queue)s::text, lane, clock_timestamp() + interval '1 second' FROM open
    WHERE rated AND lane <> ALL (ARRAY(SELECT lane FROM filled))
    RETURNING due_at
)
SELECT count(*), EXISTS (SELECT 1 FROM again WHERE due_at IS NULL),
       (SELECT extract(epoch FROM min(due) - clock_timestamp())::float8 FROM dry),
       CASE WHEN count(*) > %(room)s::int8 AND %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(queue)s::text) END
FROM moved

-- name: admission_commit
COMMIT

-- name: lane_repair
-- What no transaction has left a row for: lanes whose admitted job was deleted by hand. The recursive walk jumps from lane to
-- lane along the index. What waits for a token has its row.
WITH RECURSIVE waiting AS (
    (SELECT lane FROM {schema}.job
     WHERE queue = %(queue)s::text AND lane IS NOT NULL AND admitted IS NULL AND run_at IS NULL AND lane >= %(begin)s::text
     ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT j.lane FROM {schema}.job AS j
            WHERE j.queue = %(queue)s::text AND j.admitted IS NULL AND j.run_at IS NULL AND j.lane > waiting.lane
            ORDER BY j.lane LIMIT 1)
    FROM waiting WHERE waiting.lane IS NOT NULL
), looked_at AS MATERIALIZED (
    SELECT lane FROM waiting WHERE lane IS NOT NULL LIMIT %(limit)s::int8
), stalled AS (
    SELECT looked_at.lane
    FROM looked_at
    LEFT JOIN {schema}.lane AS l ON l.lane = looked_at.lane AND l.queue = %(queue)s::text
    WHERE l.parked_at IS NULL AND NOT coalesce(l.wakes_at > clock_timestamp() AND l.refilled_at <= clock_timestamp(), false)
      AND (SELECT j.id FROM {schema}.job AS j
           WHERE j.lane = looked_at.lane AND j.queue = %(queue)s::text AND j.admitted LIMIT 1) IS NULL
), again AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT %(queue)s::text, lane FROM stalled
)
SELECT max(lane), count(*), (SELECT count(*) FROM stalled) FROM looked_at

-- name: lane_list
-- Lanes of which something was said, and those with jobs, with how many are admitted and how many wait; each count stops at
-- `most`.
WITH RECURSIVE known AS (
    (SELECT lane FROM {schema}.job
     WHERE queue = %(queue)s::text AND lane IS NOT NULL AND admitted IS NULL AND run_at IS NULL
     ORDER BY lane LIMIT 1)
    UNION ALL
    SELECT (SELECT j.lane FROM {schema}.job AS j
            WHERE j.queue = %(queue)s::text AND j.admitted IS NULL AND j.run_at IS NULL AND j.lane > known.lane
            ORDER BY j.lane LIMIT 1)
    FROM known WHERE known.lane IS NOT NULL
), named AS (
    SELECT lane FROM (SELECT lane FROM known WHERE lane IS NOT NULL LIMIT %(limit)s::int8) AS those
    UNION
    SELECT lane FROM {schema}.lane
    WHERE queue = %(queue)s::text AND (width IS NOT NULL OR parked_at IS NOT NULL OR rate IS NOT NULL)
)
SELECT named.lane, l.width, l.rate, l.burst, l.parked_at, l.parked_by,
       (SELECT count(*) FROM {schema}.job AS j WHERE j.lane = named.lane AND j.queue = %(queue)s::text AND j.admitted),
       (SELECT count(*) FROM (
            SELECT 1 FROM {schema}.job AS j WHERE j.lane = named.lane AND j.queue = %(queue)s::text
               AND j.admitted IS NULL AND j.run_at IS NULL LIMIT %(most)s::int8) AS counted)
FROM named
LEFT JOIN {schema}.lane AS l ON l.lane = named.lane AND l.queue = %(queue)s::text
ORDER BY l.parked_at NULLS LAST, named.lane
LIMIT %(limit)s::int8

-- name: lane_set
-- A width for one lane, instead of that of its jobs, and a rate; NULL takes it back. The bucket goes on as in limit_set. The row
-- in `admission` lets a wider or faster one take effect.
WITH said AS (
    INSERT INTO {schema}.lane AS l (lane, queue, width, rate, burst)
    VALUES (%(lane)s::text, %(queue)s::text, %(width)s::int4, %(rate)s::float8, %(burst)s::int4)
    ON CONFLICT (lane, queue) DO UPDATE
    SET width = excluded.width, rate = excluded.rate, burst = excluded.burst, wakes_at = NULL,
        tokens = CASE WHEN l.rate IS NOT NULL AND excluded.rate IS NOT NULL THEN l.tokens END,
        refilled_at = CASE WHEN l.rate IS NOT NULL AND excluded.rate IS NOT NULL THEN l.refilled_at END
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) VALUES (%(queue)s::text, %(lane)s::text)
)
SELECT CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'key ' || %(queue)s::text) END

-- name: lane_resume
-- An operator has decided: the lane goes on. The row stays; a lane may be parked again.
WITH resumed AS (
    UPDATE {schema}.lane SET parked_at = NULL, parked_by = NULL
    WHERE lane = %(lane)s::text AND queue = %(queue)s::text AND parked_at IS NOT NULL
    RETURNING lane
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT %(queue)s::text, lane FROM resumed
)
SELECT lane, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, 'key ' || %(queue)s::text) END
FROM resumed

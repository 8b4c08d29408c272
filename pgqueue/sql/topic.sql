-- Whoever changes a topic's subscriptions, replays or looks for late messages holds its row until the end of the transaction.
-- Publishes do not.

-- name: topic_begin
INSERT INTO {schema}.topic (name) VALUES (%(topic)s::text) ON CONFLICT (name) DO NOTHING

-- name: topic_lock
-- Only what no snapshot is needed for: that of this statement may be older than the row that it waited for.
SELECT holds
FROM {schema}.topic
WHERE name = %(topic)s::text
FOR NO KEY UPDATE

-- name: topic_patience
-- For this transaction: who changes subscriptions in a long one of his own must not keep workers from starting.
SELECT set_config('lock_timeout', '2s', true)

-- name: topic_take
-- The same for whoever comes by: somebody else's turn is not waited for, and who is frozen in the middle of his gives it back, as
-- at admission_take. relaxed: what a crash forgets of a look or a replay is done again.
SELECT holds, set_config('synchronous_commit', 'off', true), set_config('idle_in_transaction_session_timeout', '5s', true)
FROM {schema}.topic
WHERE name = %(topic)s::text
FOR NO KEY UPDATE SKIP LOCKED

-- name: topic_adopt
-- What came with a dump counts as looked at, and as visible: transaction ids of another cluster say nothing here.
WITH adopted AS (
    UPDATE {schema}.subscription
    SET reading = CASE WHEN reading IS NOT NULL THEN '1:1:' END, done = NULL
    WHERE topic = %(topic)s::text
)
UPDATE {schema}.topic
SET seen = '1:1:',
    settled = greatest(settled, (SELECT coalesce(max(id), 0) FROM {schema}.message
                                 WHERE topic = %(topic)s::text
                                   AND xid >= pg_snapshot_xmax(pg_current_snapshot())::text::int8))
WHERE name = %(topic)s::text

-- name: topic_agenda
-- Topics with a replay under way, and those that were not looked at or rolled for long enough. Late messages are looked for often
--   only in the first hour after subscriptions have changed: those that come later were open for longer than that.
-- Messages are not asked for: that would lock every table of every topic. Where no topic keeps any, an empty table is asked.
-- The others that keep messages come with due = false: who hears of none looks rarely.
SELECT name, replays, rolls, due
FROM (SELECT *, replays OR (holds AND rolls)
                OR (holds AND looked_at < clock_timestamp() - %(often)s::float8 * interval '1 second'
                    AND changed_at > clock_timestamp() - interval '1 hour') AS due
      FROM (SELECT t.name, t.holds, t.looked_at, t.changed_at,
                   EXISTS (SELECT 1 FROM {schema}.subscription AS s WHERE s.topic = t.name AND s.reading IS NOT NULL) AS replays,
                   t.rolled_at < clock_timestamp() - %(roll)s::float8 * interval '1 second' AS rolls
            FROM {schema}.topic AS t) AS t) AS t
WHERE due OR holds
ORDER BY name

-- name: topic_keep
-- How many messages are kept, for how many seconds; neither: none.
INSERT INTO {schema}.topic AS t (name, keep_count, keep_age, holds)
VALUES (%(topic)s::text, %(count)s::int8, %(age)s::float8, %(count)s::int8 IS NOT NULL OR %(age)s::float8 IS NOT NULL)
ON CONFLICT (name) DO UPDATE
SET keep_count = excluded.keep_count, keep_age = excluded.keep_age, holds = t.holds OR excluded.holds,
    changed_at = clock_timestamp()
RETURNING CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(notice)s::text) END

-- name: topic_roll
SELECT {schema}.topic_roll(%(topic)s::text)

-- name: topic_list
-- Messages are counted up to `most`.
SELECT t.name, t.keep_count, t.keep_age,
       (SELECT count(*) FROM {schema}.subscription AS s WHERE s.topic = t.name AND s.gone_at IS NULL),
       (SELECT count(*) FROM (SELECT 1 FROM {schema}.message AS m WHERE m.topic = t.name LIMIT %(most)s::int8) AS counted),
       oldest.id, (SELECT max(m.id) FROM {schema}.message AS m WHERE m.topic = t.name), oldest.published_at
FROM {schema}.topic AS t
LEFT JOIN LATERAL (
    SELECT m.id, m.published_at FROM {schema}.message AS m WHERE m.topic = t.name ORDER BY m.id LIMIT 1) AS oldest ON true
WHERE %(topic)s::text IS NULL OR t.name = %(topic)s::text
ORDER BY t.name

-- name: clock
SELECT clock_timestamp()

-- name: topic_forget
-- A day after their end: subscriptions, and topics that nobody subscribes to and that keep nothing.
WITH gone AS (
    DELETE FROM {schema}.subscription WHERE gone_at < clock_timestamp() - interval '1 day'
)
DELETE FROM {schema}.topic AS t
WHERE NOT holds AND keep_count IS NULL AND keep_age IS NULL AND changed_at < clock_timestamp() - interval '1 day'
  AND NOT EXISTS (SELECT 1 FROM {schema}.subscription AS s WHERE s.topic = t.name)

-- name: subscription_list
-- Payloads (headers) are left out, for roles that may not read them.
SELECT s.topic, s.name, s.task, s.queue, s.priority, s.max_attempts, s.ordered,
       CASE WHEN s.reading IS NULL THEN 'live' WHEN (cardinality(s.switches) & 1) = 1 THEN 'replaying' ELSE 'held' END,
       CASE WHEN s.definition IS NULL THEN 'run time'
            WHEN s.affirmed_at IS NULL OR s.affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second'
            THEN 'not in code' ELSE 'code' END,
       CASE WHEN s.reading IS NOT NULL THEN s.replayed_to END, s.created_at
FROM {schema}.subscription AS s
WHERE s.gone_at IS NULL
  AND (%(topic)s::text IS NULL OR s.topic = %(topic)s::text) AND (%(name)s::text IS NULL OR s.name = %(name)s::text)
ORDER BY s.topic, s.name

-- name: subscription_replaying
-- The one that is furthest behind, and whether it is held back.
SELECT name, (cardinality(switches) & 1) = 0
FROM {schema}.subscription
WHERE topic = %(topic)s::text AND reading IS NOT NULL
ORDER BY replayed_to, name
LIMIT 1

-- name: subscription_alter
-- What is said anew of one that is there. Code (definition not NULL) wins over what code said before, by the rules of
-- schedule_define; what is said at run time stays until the code says something new.
UPDATE {schema}.subscription AS s
SET queue = %(queue)s::text, task = %(task)s::text, priority = %(priority)s::int2, max_attempts = %(max_attempts)s::int4,
    timeout = %(timeout)s::float8, retry = %(retry)s::json, headers = %(headers)s::json, expires_in = %(expires_in)s::float8,
    ordered = %(ordered)s::bool, park = %(park)s::bool,
    definition = coalesce(%(definition)s::text, s.definition),
    affirmed_at = CASE WHEN %(definition)s::text IS NULL THEN s.affirmed_at ELSE clock_timestamp() END,
    superseded = CASE WHEN %(definition)s::text IS NULL OR s.definition IS NULL THEN s.superseded
                 ELSE (array_remove(s.superseded, %(definition)s::text) || s.definition)[greatest(1, cardinality(s.superseded) - 30):]
                 END
WHERE s.topic = %(topic)s::text AND s.name = %(name)s::text AND s.gone_at IS NULL
  AND CASE WHEN %(definition)s::text IS NULL
           THEN (s.queue, s.task, s.priority, s.max_attempts, s.timeout, s.retry::text, s.headers::text, s.expires_in, s.ordered,
                 s.park)
                IS DISTINCT FROM
                (%(queue)s::text, %(task)s::text, %(priority)s::int2, %(max_attempts)s::int4, %(timeout)s::float8,
                 %(retry)s::json::text, %(headers)s::json::text, %(expires_in)s::float8, %(ordered)s::bool, %(park)s::bool)
           ELSE s.definition IS NULL
                OR (s.definition <> %(definition)s::text
                    AND (%(definition)s::text <> ALL (s.superseded) OR s.affirmed_at IS NULL
                         OR s.affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second')) END
RETURNING s.name

-- name: subscription_affirm
-- Says which of these definitions must be written, as schedule_affirm does, and affirms the others.
WITH given AS MATERIALIZED (
    SELECT topic, name, definition
    FROM unnest(%(topics)b::text[], %(names)b::text[], %(definitions)b::text[]) AS given(topic, name, definition)
), ours AS MATERIALIZED (
    SELECT s.topic, s.name
    FROM {schema}.subscription AS s JOIN given ON given.topic = s.topic AND given.name = s.name AND given.definition = s.definition
    WHERE s.gone_at IS NULL
      AND (s.affirmed_at IS NULL OR s.affirmed_at < clock_timestamp() - %(often)s::float8 * interval '1 second')
    FOR NO KEY UPDATE OF s SKIP LOCKED
), affirmed AS (
    UPDATE {schema}.subscription SET affirmed_at = clock_timestamp() WHERE (topic, name) IN (SELECT topic, name FROM ours)
)
SELECT given.topic, given.name
FROM given LEFT JOIN {schema}.subscription AS s ON s.topic = given.topic AND s.name = given.name AND s.gone_at IS NULL
WHERE s.name IS NULL
   OR s.definition IS NULL
   OR (s.definition <> given.definition
       AND (given.definition <> ALL (s.superseded) OR s.affirmed_at IS NULL
            OR s.affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second'))

-- name: subscription_add
-- A new one, or one that comes back on the row that it left. The caller holds the topic's row, and has just looked for late
-- messages: what that look saw is replayed, or passed over; what it did not see, later looks find.
-- held: an ordered one with something to replay gets no new messages until that is through.
WITH raised AS (
    UPDATE {schema}.topic SET version = version + 1, changed_at = clock_timestamp()
    WHERE name = %(topic)s::text
    RETURNING version, seen
)
INSERT INTO {schema}.subscription AS s (
    topic, name, queue, task, priority, max_attempts, timeout, retry, headers, expires_in, ordered, park, switches, reading,
    start_at, replayed_to, definition, affirmed_at)
SELECT %(topic)s::text, %(name)s::text, %(queue)s::text, %(task)s::text, %(priority)s::int2, %(max_attempts)s::int4,
       %(timeout)s::float8, %(retry)s::json, %(headers)s::json, %(expires_in)s::float8, %(ordered)s::bool, %(park)s::bool,
       CASE WHEN %(after)s::int8 IS NOT NULL AND %(ordered)s::bool THEN '{}' ELSE ARRAY[version] END,
       CASE WHEN %(after)s::int8 IS NOT NULL THEN seen END, %(start_at)s::timestamptz, %(after)s::int8,
       %(definition)s::text, CASE WHEN %(definition)s::text IS NOT NULL THEN clock_timestamp() END
FROM raised
ON CONFLICT (topic, name) DO UPDATE
SET queue = excluded.queue, task = excluded.task, priority = excluded.priority, max_attempts = excluded.max_attempts,
    timeout = excluded.timeout, retry = excluded.retry, headers = excluded.headers, expires_in = excluded.expires_in,
    ordered = excluded.ordered, park = excluded.park, switches = s.switches || excluded.switches, reading = excluded.reading,
    done = NULL, start_at = excluded.start_at, replayed_to = excluded.replayed_to, definition = excluded.definition,
    superseded = '{}', affirmed_at = excluded.affirmed_at, created_at = excluded.created_at, gone_at = NULL
WHERE s.gone_at IS NOT NULL
RETURNING s.name, CASE WHEN %(channel)s::text IS NOT NULL AND reading IS NOT NULL
                       THEN pg_notify(%(channel)s::text, %(notice)s::text) END

-- name: subscription_replay
-- From there once more. An ordered one gets no new messages until that is through.
WITH raised AS (
    UPDATE {schema}.topic SET version = version + 1, changed_at = clock_timestamp()
    WHERE name = %(topic)s::text
    RETURNING version, seen
)
UPDATE {schema}.subscription AS s
SET reading = raised.seen, done = NULL, start_at = %(start_at)s::timestamptz, replayed_to = %(after)s::int8,
    switches = CASE WHEN s.ordered AND (cardinality(s.switches) & 1) = 1
               THEN (s.switches || raised.version)[greatest(1, cardinality(s.switches) - 38):] ELSE s.switches END
FROM raised
WHERE s.topic = %(topic)s::text AND s.name = %(name)s::text AND s.gone_at IS NULL
RETURNING s.name, CASE WHEN %(channel)s::text IS NOT NULL THEN pg_notify(%(channel)s::text, %(notice)s::text) END

-- name: subscription_live
-- Nothing is to be replayed any more; from now on publishes make its jobs.
WITH raised AS (
    UPDATE {schema}.topic SET version = version + 1, changed_at = clock_timestamp()
    WHERE name = %(topic)s::text
    RETURNING version
)
UPDATE {schema}.subscription AS s
SET reading = NULL, done = NULL, start_at = NULL, replayed_to = NULL,
    switches = CASE WHEN (cardinality(s.switches) & 1) = 0 THEN s.switches || raised.version ELSE s.switches END
FROM raised
WHERE s.topic = %(topic)s::text AND s.name = %(name)s::text AND s.gone_at IS NULL
RETURNING s.name

-- name: subscription_end
-- What a publish made stays, and runs. Not what a living process would write again.
WITH raised AS (
    UPDATE {schema}.topic SET version = version + 1, changed_at = clock_timestamp()
    WHERE name = %(topic)s::text
    RETURNING version
)
UPDATE {schema}.subscription AS s
SET gone_at = clock_timestamp(), reading = NULL, done = NULL, start_at = NULL, replayed_to = NULL,
    switches = CASE WHEN (cardinality(s.switches) & 1) = 1
               THEN (s.switches || raised.version)[greatest(1, cardinality(s.switches) - 38):] ELSE s.switches END
FROM raised
WHERE s.topic = %(topic)s::text AND s.name = %(name)s::text AND s.gone_at IS NULL
  AND (s.definition IS NULL OR s.affirmed_at IS NULL
       OR s.affirmed_at < clock_timestamp() - %(gone)s::float8 * interval '1 second')
RETURNING s.name

-- Who has made a message's job is told by numbers. A publish reads the topic's version and its subscriptions in one snapshot, and
-- leaves the version in the message; every change of subscriptions raises it. The `switches` of a subscription are the versions
-- at which publishes began and ceased to make its jobs: width_bucket counts those up to the message's, so an odd number says that
-- the publish made the job. All others are made by the looks below, each of which holds the lock of the topic's row, and begins
-- where the one before it ended: with the snapshot in `seen`. So each message is looked at once, when it is visible, however
-- late its transaction commits.

-- name: message_publish
-- A job for each subscription and, where the topic keeps them, the message: one statement, or version and subscriptions would be
--   those of two snapshots. Nothing is locked.
-- given: the JSON is read once, not once per group. The subqueries with nextval are not flattened, so ids follow the input.
-- heard, `switches`: an even number of them: gone, or held back until its replay is through.
-- woken, told: as at job_enqueue_keyed, once per queue.
WITH moment AS MATERIALIZED (
    SELECT clock_timestamp() AS at
), about AS MATERIALIZED (
    SELECT version, segment, keep_count IS NOT NULL OR keep_age IS NOT NULL AS keeps
    FROM {schema}.topic
    WHERE name = %(topic)s::text
), given AS MATERIALIZED (
    SELECT number, args::json, kwargs::json, key, CASE WHEN keeps THEN nextval('{schema}.message_id_seq') END AS message_id
    FROM about, unnest(%(args)b::text[], %(kwargs)b::text[], %(keys)b::text[]) WITH ORDINALITY AS given(args, kwargs, key, number)
), kept AS (
    INSERT INTO {schema}.message (id, topic, segment, version, xid, key, args, kwargs, headers, published_at)
    SELECT message_id, %(topic)s::text, segment, version, pg_current_xact_id()::text::int8, key, args, kwargs,
           %(headers)s::json, at
    FROM given, about, moment
    WHERE message_id IS NOT NULL
), heard AS MATERIALIZED (
    SELECT name, queue, task, priority, max_attempts, timeout, retry, headers, expires_in, ordered, park
    FROM {schema}.subscription
    WHERE topic = %(topic)s::text AND (cardinality(switches) & 1) = 1
), placed AS MATERIALIZED (
    SELECT nextval('{schema}.job_id_seq') AS id, sorted.*
    FROM (SELECT given.args, given.kwargs, given.message_id, heard.*,
                 CASE WHEN heard.ordered THEN 'o' || given.key END AS lane
          FROM given CROSS JOIN heard
          ORDER BY given.number, heard.name) AS sorted
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, max_attempts, timeout, retry, headers, created_at, lane, lane_width,
        park, expires_at)
    SELECT id, queue, task, args, kwargs, priority, CASE WHEN lane IS NULL THEN id END, max_attempts, timeout, retry,
           CASE WHEN headers IS NULL AND message_id IS NULL THEN %(told)s::json
                ELSE (coalesce(headers::jsonb, '{}') || %(told)s::jsonb
                      || CASE WHEN message_id IS NULL THEN '{}' ELSE jsonb_build_object('message_id', message_id) END)::json END,
           at, lane, CASE WHEN lane IS NOT NULL THEN 1 END, CASE WHEN lane IS NOT NULL THEN park END,
           CASE WHEN expires_in IS NOT NULL THEN at + greatest(least(expires_in, 1e9), 0) * interval '1 second' END
    FROM placed, moment
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM placed WHERE lane IS NOT NULL
)
SELECT (SELECT count(*) FROM placed),
       (SELECT array_agg(message_id ORDER BY number) FROM given WHERE message_id IS NOT NULL),
       (SELECT count(pg_notify(%(channel)s::text, CASE WHEN keyed THEN 'key ' ELSE '' END || queue))
        FROM (SELECT DISTINCT queue, lane IS NOT NULL AS keyed FROM placed WHERE %(channel)s::text IS NOT NULL) AS queues)

-- name: message_deliver
-- The jobs of one group for these messages, in the order of their ids. The caller holds the topic's row.
WITH sorted AS MATERIALIZED (
    SELECT nextval('{schema}.job_id_seq') AS id, m.*
    FROM (SELECT id AS message_id, key, args, kwargs, headers AS said
          FROM {schema}.message
          WHERE topic = %(topic)s::text AND id = ANY (%(ids)b::int8[])
          ORDER BY id) AS m
), placed AS MATERIALIZED (
    SELECT sorted.*, s.*, CASE WHEN s.ordered THEN 'o' || sorted.key END AS lane
    FROM sorted
    CROSS JOIN (SELECT queue, task, priority, max_attempts, timeout, retry, headers, expires_in, ordered, park,
                       clock_timestamp() AS at
                FROM {schema}.subscription
                WHERE topic = %(topic)s::text AND name = %(name)s::text) AS s
), new AS (
    INSERT INTO {schema}.job (
        id, queue, task, args, kwargs, priority, position, max_attempts, timeout, retry, headers, created_at, lane, lane_width,
        park, expires_at)
    SELECT id, queue, task, args, kwargs, priority, CASE WHEN lane IS NULL THEN id END, max_attempts, timeout, retry,
           (coalesce(headers::jsonb, '{}') || coalesce(said::jsonb, '{}')
            || jsonb_build_object('topic', %(topic)s::text, 'message_id', message_id))::json,
           at, lane, CASE WHEN lane IS NOT NULL THEN 1 END, CASE WHEN lane IS NOT NULL THEN park END,
           CASE WHEN expires_in IS NOT NULL THEN at + greatest(least(expires_in, 1e9), 0) * interval '1 second' END
    FROM placed
    ORDER BY id
), woken AS (
    INSERT INTO {schema}.admission (queue, lane) SELECT DISTINCT queue, lane FROM placed WHERE lane IS NOT NULL
)
SELECT (SELECT count(*) FROM placed),
       (SELECT count(pg_notify(%(channel)s::text, CASE WHEN keyed THEN 'key ' ELSE '' END || queue))
        FROM (SELECT DISTINCT queue, lane IS NOT NULL AS keyed FROM placed WHERE %(channel)s::text IS NOT NULL) AS queues)

-- name: message_late
-- Messages that became visible since the last look, and whose publish did not see a subscription that is there now. First the
--   snapshot of this look, and whether the last one lies in the future of this cluster, as after the restore of a dump of another
--   one; then the ids, group by group.
-- now: in its own snapshot a transaction is over, in everybody else's it is not. What it has published itself is left to the
--   look after its commit, and so it stands in the list of the open ones.
-- fresh: two scans of the index, each from where it has to begin; what every publish saw of the topic's version is in the index.
--   The ranges are true of whatever can be found; without them the planner, which does not know the ends, expects a third of all
--   messages, or more, and reads the table.
-- settled: what a dump has brought from another cluster was looked at there.
WITH mine AS MATERIALIZED (
    SELECT version, settled, seen::pg_snapshot AS seen, pg_current_snapshot() AS snapshot, pg_current_xact_id() AS own
    FROM {schema}.topic
    WHERE name = %(topic)s::text
), now AS MATERIALIZED (
    SELECT least(pg_snapshot_xmin(snapshot), own)::text || ':' || pg_snapshot_xmax(snapshot)::text || ':'
           || coalesce((SELECT string_agg(open::text, ',' ORDER BY open)
                        FROM (SELECT pg_snapshot_xip(snapshot) AS open UNION SELECT own) AS all_open
                        WHERE open < pg_snapshot_xmax(snapshot)), '') AS text
    FROM mine
), fresh AS MATERIALIZED (
    SELECT m.id, m.version
    FROM {schema}.message AS m
    WHERE m.topic = %(topic)s::text AND m.xid >= (SELECT pg_snapshot_xmax(seen)::text::int8 FROM mine)
      AND m.xid < (SELECT pg_snapshot_xmax(snapshot)::text::int8 FROM mine) AND m.version < (SELECT version FROM mine)
      AND m.id > (SELECT settled FROM mine) AND m.xid <> (SELECT own::text::int8 FROM mine)
    UNION ALL
    SELECT m.id, m.version
    FROM {schema}.message AS m
    WHERE m.topic = %(topic)s::text AND m.xid = ANY (ARRAY(SELECT pg_snapshot_xip(seen)::text::int8 FROM mine))
      AND m.xid >= (SELECT pg_snapshot_xmin(seen)::text::int8 FROM mine)
      AND m.xid < (SELECT pg_snapshot_xmax(seen)::text::int8 FROM mine) AND m.version < (SELECT version FROM mine)
      AND m.id > (SELECT settled FROM mine) AND m.xid <> (SELECT own::text::int8 FROM mine)
)
SELECT now.text, NULL, NULL, (SELECT pg_snapshot_xmax(seen) > pg_snapshot_xmax(snapshot) FROM mine) FROM now
UNION ALL
SELECT NULL, s.name, array_agg(fresh.id ORDER BY fresh.id), NULL
FROM {schema}.subscription AS s JOIN fresh ON (width_bucket(fresh.version, s.switches) & 1) = 0
WHERE s.topic = %(topic)s::text AND (cardinality(s.switches) & 1) = 1
GROUP BY s.name

-- name: message_saw
-- The look is over: the next one begins with its snapshot.
UPDATE {schema}.topic SET seen = %(now)s::text, looked_at = clock_timestamp() WHERE name = %(topic)s::text

-- name: message_find
-- Whether this message is kept, and between which ones it would be.
SELECT EXISTS (SELECT 1 FROM {schema}.message WHERE topic = %(topic)s::text AND id = %(id)s::int8),
       (SELECT min(id) FROM {schema}.message WHERE topic = %(topic)s::text)

-- name: replay_next
-- The next messages of a replay, how far that goes, and whether it is the end. What is read are the messages that `reading` sees:
--   they are all there, and no more come, so the last id is all that is to be remembered.
-- looked: so many at most, or a statement that finds little among very many would take longer than it may. last: always true;
--   with it the planner expects few, as at message_late, and reads in the order of the index instead of sorting them all. A limit
--   that it does not know it takes for a tenth, so it does not sort the few that it expects either, as PostgreSQL 14 did.
-- done: in a second stretch, without those of the first, and without those whose publish made the job itself.
WITH s AS MATERIALIZED (
    SELECT reading::pg_snapshot AS reading, done::pg_snapshot AS done, start_at, replayed_to, switches, settled,
           9223372036854775807 AS last
    FROM {schema}.subscription AS s JOIN {schema}.topic AS t ON t.name = s.topic
    WHERE s.topic = %(topic)s::text AND s.name = %(name)s::text
), looked AS MATERIALIZED (
    SELECT id, xid, version, published_at
    FROM {schema}.message
    WHERE topic = %(topic)s::text AND id > (SELECT replayed_to FROM s) AND id <= (SELECT last FROM s)
    ORDER BY id
    LIMIT (SELECT %(look)s::int8)
), wanted AS MATERIALIZED (
    SELECT looked.id
    FROM looked, s
    WHERE (looked.id <= settled OR pg_visible_in_snapshot(looked.xid::text::xid8, reading))
      AND (done IS NULL OR (looked.id > settled AND NOT pg_visible_in_snapshot(looked.xid::text::xid8, done)
                            AND (width_bucket(looked.version, switches) & 1) = 0))
      AND (start_at IS NULL OR published_at >= start_at)
    ORDER BY looked.id
    LIMIT %(limit)s::int8
)
SELECT array_agg(id ORDER BY id),
       CASE WHEN count(*) = %(limit)s::int8 THEN max(id) ELSE (SELECT max(id) FROM looked) END,
       count(*) < %(limit)s::int8 AND (SELECT count(*) FROM looked) < %(look)s::int8
FROM wanted

-- name: replay_moved
UPDATE {schema}.subscription SET replayed_to = %(to)s::int8 WHERE topic = %(topic)s::text AND name = %(name)s::text

-- name: replay_fresh
-- What came while an ordered subscription was held back, up to the last look of the topic: what that did not see, later looks find.
WITH s AS MATERIALIZED (
    SELECT reading::pg_snapshot AS done, seen::pg_snapshot AS seen, switches, settled
    FROM {schema}.subscription AS s JOIN {schema}.topic AS t ON t.name = s.topic
    WHERE s.topic = %(topic)s::text AND s.name = %(name)s::text
), fresh AS MATERIALIZED (
    SELECT id, version, xid FROM {schema}.message
    WHERE topic = %(topic)s::text AND xid >= (SELECT pg_snapshot_xmax(done)::text::int8 FROM s)
      AND xid < (SELECT pg_snapshot_xmax(seen)::text::int8 FROM s)
    UNION ALL
    SELECT id, version, xid FROM {schema}.message
    WHERE topic = %(topic)s::text AND xid = ANY (ARRAY(SELECT pg_snapshot_xip(done)::text::int8 FROM s))
      AND xid >= (SELECT pg_snapshot_xmin(done)::text::int8 FROM s)
      AND xid < (SELECT pg_snapshot_xmax(done)::text::int8 FROM s)
)
SELECT fresh.id
FROM fresh, s
WHERE fresh.id > settled AND pg_visible_in_snapshot(fresh.xid::text::xid8, seen) AND (width_bucket(fresh.version, switches) & 1) = 0
ORDER BY fresh.id
LIMIT %(limit)s::int8

-- name: replay_renew
-- One more stretch: from the snapshot that was replayed to that of the last look.
UPDATE {schema}.subscription AS s
SET done = s.reading, reading = t.seen, start_at = NULL, replayed_to = %(to)s::int8
FROM {schema}.topic AS t
WHERE t.name = s.topic AND s.topic = %(topic)s::text AND s.name = %(name)s::text

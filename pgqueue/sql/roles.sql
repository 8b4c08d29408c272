-- What `pgqueue migrate --roles` runs, as the owner of the schema; not among the statements of the queue. The one place where
-- grants are written: a revision that adds a table, a sequence or a function adds its grants here.
-- {worker}, {producer} and {reader} are the quoted names of the roles, {schema} that of the schema.

-- name: roles_check
-- What would be missing: the right to make roles that are not there, and the ownership of what is granted. Without ownership
-- a GRANT may do nothing, and only warn.
SELECT current_user::text,
       (SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user),
       ARRAY(SELECT wanted FROM unnest(CAST(%(roles)s AS text[])) AS wanted
             WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted)),
       ARRAY(SELECT name FROM (
                SELECT 'schema' AS name, nspowner AS owner FROM pg_namespace WHERE nspname = %(schema)s
                UNION ALL
                SELECT c.relname::text, c.relowner FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = %(schema)s AND c.relname = ANY (CAST(%(objects)s AS text[]))
                UNION ALL
                SELECT p.proname::text, p.proowner FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
                WHERE n.nspname = %(schema)s AND p.proname = ANY (CAST(%(objects)s AS text[]))) AS owned
             WHERE NOT pg_has_role(owner, 'USAGE'))

-- name: role_create
-- The exception: roles belong to the whole server, and a migration of another database may make the same one at this moment.
DO $do$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{name}') THEN
        CREATE ROLE {role} NOLOGIN;
    END IF;
EXCEPTION WHEN duplicate_object OR unique_violation THEN
    NULL;
END $do$

-- name: roles_revoke
-- First nothing, then exactly what follows: what an earlier release or a --with-payloads gave does not linger. Both in one
-- transaction, so nobody sees the state between. Revoking a table's rights revokes those of its columns.
REVOKE ALL ON SCHEMA {schema} FROM {worker}, {producer}, {reader};
REVOKE ALL ON {schema}.job, {schema}.lease, {schema}.worker, {schema}.dead_letter, {schema}.archive, {schema}.queue,
    {schema}.admission, {schema}.lane, {schema}.schedule, {schema}.result, {schema}.kept_task, {schema}.progress,
    {schema}.unique_window, {schema}.topic, {schema}.subscription, {schema}.message, {schema}.schema_version
    FROM {worker}, {producer}, {reader};
REVOKE ALL ON SEQUENCE {schema}.job_id_seq, {schema}.lease_tie_seq, {schema}.message_id_seq FROM {worker}, {producer}, {reader};
REVOKE ALL ON FUNCTION {schema}.archive_roll(interval), {schema}.payload_merge(json, json, boolean),
    {schema}.unique_follow(text, boolean), {schema}.unique_expire(text, text[], boolean), {schema}.topic_roll(text)
    FROM {worker}, {producer}, {reader}

-- name: roles_grant
-- worker: the worker process and the operator's commands. UPDATE on dead_letter: what is redriven is locked first. The archive is
--   only written to, but for how a job ended, which one may wait for. queue: pause is an upsert, nothing is deleted there.
-- producer: enqueues, and sees the id of what it enqueued, and of what has the unique key already. What changes a waiting job
--   (replace, merge, supersede) takes the worker's rights. Not among its columns: attempt, lost, lease_id, cancel_requested and
--   errors, which say that somebody ran the job. Results and progress are for those who enqueue. A publish reads who subscribes,
--   and writes the message.
-- reader: everything but payloads, which are args, kwargs and headers, and what may repeat them: errors and the reasons.
GRANT USAGE ON SCHEMA {schema} TO {worker}, {producer}, {reader};
GRANT SELECT ON {schema}.schema_version TO {worker}, {reader};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.job, {schema}.lease, {schema}.worker, {schema}.dead_letter TO {worker};
GRANT INSERT ON {schema}.archive TO {worker};
GRANT SELECT, INSERT, UPDATE ON {schema}.queue, {schema}.lane TO {worker};
GRANT SELECT (id, queue, state, reason, finished_at) ON {schema}.archive TO {worker};
GRANT SELECT, INSERT, UPDATE, DELETE ON {schema}.admission, {schema}.schedule, {schema}.result, {schema}.kept_task,
    {schema}.progress, {schema}.unique_window, {schema}.topic, {schema}.subscription TO {worker};
GRANT SELECT, INSERT ON {schema}.message TO {worker};
GRANT USAGE ON SEQUENCE {schema}.job_id_seq, {schema}.lease_tie_seq, {schema}.message_id_seq TO {worker};
GRANT EXECUTE ON FUNCTION {schema}.archive_roll(interval), {schema}.payload_merge(json, json, boolean),
    {schema}.unique_follow(text, boolean), {schema}.topic_roll(text) TO {worker};
GRANT EXECUTE ON FUNCTION {schema}.unique_expire(text, text[], boolean) TO {worker}, {producer};
GRANT INSERT (id, queue, task, args, kwargs, priority, position, run_at, max_attempts, timeout, retry, headers, created_at,
    unique_key, lane, lane_rank, lane_width, park, expires_at),
    SELECT (id, queue, unique_key, next_key, expires_at) ON {schema}.job TO {producer};
GRANT SELECT, INSERT, UPDATE ON {schema}.unique_window TO {producer};
GRANT INSERT (queue, lane) ON {schema}.admission TO {producer};
GRANT SELECT ON {schema}.topic, {schema}.subscription TO {producer};
GRANT INSERT ON {schema}.message TO {producer};
GRANT USAGE ON SEQUENCE {schema}.job_id_seq, {schema}.message_id_seq TO {producer};
GRANT SELECT ON {schema}.result, {schema}.progress TO {producer};
GRANT SELECT ON {schema}.lease, {schema}.worker, {schema}.queue, {schema}.admission, {schema}.lane, {schema}.kept_task,
    {schema}.progress, {schema}.unique_window, {schema}.topic TO {reader};
GRANT SELECT (id, queue, state, finished_at, expires_at) ON {schema}.result TO {reader};
GRANT SELECT (id, queue, task, priority, position, run_at, attempt, max_attempts, lost, lease_id, cancel_requested, timeout,
    retry, created_at, unique_key, lane, lane_rank, lane_width, admitted, park, expires_at, next_key, next_mode, next_at)
    ON {schema}.job TO {reader};
GRANT SELECT (id, queue, task, priority, attempt, max_attempts, lost, timeout, retry, created_at, died_at,
    unique_key, lane, lane_rank, lane_width, park)
    ON {schema}.dead_letter TO {reader};
GRANT SELECT (id, queue, task, priority, attempt, lost, state, created_at, finished_at) ON {schema}.archive TO {reader};
GRANT SELECT (name, cron, every, tz, missed, grace, overlap, queue, task, priority, max_attempts, timeout, retry, definition,
    superseded, affirmed_at, version, starts_at, ticked_to, next_at, paused_at, last_at, last_job_id, last_queue,
    expires_in)
    ON {schema}.schedule TO {reader};
GRANT SELECT (topic, name, queue, task, priority, max_attempts, timeout, retry, expires_in, ordered, park, switches, reading, done,
    start_at, replayed_to, definition, superseded, affirmed_at, created_at, gone_at) ON {schema}.subscription TO {reader};
GRANT SELECT (id, topic, segment, version, xid, key, published_at) ON {schema}.message TO {reader}

-- name: payloads_grant
GRANT SELECT ON {schema}.job, {schema}.dead_letter, {schema}.archive, {schema}.schedule, {schema}.result, {schema}.subscription,
    {schema}.message TO {reader}

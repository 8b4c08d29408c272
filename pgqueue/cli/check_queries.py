"""What `pgqueue doctor` asks the catalogs. Only the last one touches a table of ours."""

from __future__ import annotations

from typing import Final

from psycopg.sql import SQL

SERVER: Final = SQL("""
    SELECT current_setting('server_version'), current_setting('server_version_num'), pg_is_in_recovery(),
           current_setting('transaction_read_only')::bool, current_setting('max_connections'),
           (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)
""")

# What a worker and an operator need, less what this role has.
RIGHTS: Final = SQL("""
    SELECT kind, name, wanted
    FROM pg_namespace AS n
    CROSS JOIN (VALUES
        ('schema', NULL, 'USAGE'),
        ('table', 'schema_version', 'SELECT'),
        ('table', 'job', 'SELECT'), ('table', 'job', 'INSERT'), ('table', 'job', 'UPDATE'), ('table', 'job', 'DELETE'),
        ('table', 'lease', 'SELECT'), ('table', 'lease', 'INSERT'), ('table', 'lease', 'UPDATE'),
        ('table', 'lease', 'DELETE'),
        ('table', 'worker', 'SELECT'), ('table', 'worker', 'INSERT'), ('table', 'worker', 'UPDATE'),
        ('table', 'worker', 'DELETE'),
        ('table', 'dead_letter', 'SELECT'), ('table', 'dead_letter', 'INSERT'), ('table', 'dead_letter', 'UPDATE'),
        ('table', 'dead_letter', 'DELETE'),
        ('table', 'archive', 'INSERT'),
        ('table', 'queue', 'SELECT'),
        ('table', 'result', 'SELECT'), ('table', 'result', 'INSERT'), ('table', 'result', 'UPDATE'),
        ('table', 'result', 'DELETE'),
        ('table', 'kept_task', 'SELECT'), ('table', 'kept_task', 'INSERT'), ('table', 'kept_task', 'UPDATE'),
        ('table', 'kept_task', 'DELETE'),
        ('table', 'progress', 'SELECT'), ('table', 'progress', 'INSERT'), ('table', 'progress', 'UPDATE'),
        ('table', 'progress', 'DELETE'),
        ('table', 'topic', 'SELECT'), ('table', 'topic', 'INSERT'), ('table', 'topic', 'UPDATE'),
        ('table', 'topic', 'DELETE'),
        ('table', 'subscription', 'SELECT'), ('table', 'subscription', 'INSERT'), ('table', 'subscription', 'UPDATE'),
        ('table', 'subscription', 'DELETE'),
        ('table', 'message', 'SELECT'), ('table', 'message', 'INSERT'),
        ('sequence', 'job_id_seq', 'USAGE'), ('sequence', 'lease_tie_seq', 'USAGE'),
        ('table', 'unique_window', 'SELECT'), ('table', 'unique_window', 'INSERT'), ('table', 'unique_window', 'UPDATE'),
        ('table', 'unique_window', 'DELETE'),
        ('sequence', 'message_id_seq', 'USAGE'),
        ('function', 'archive_roll', 'EXECUTE'), ('function', 'topic_roll', 'EXECUTE'),
        ('function', 'payload_merge', 'EXECUTE'), ('function', 'unique_follow', 'EXECUTE'),
        ('function', 'unique_expire', 'EXECUTE')
    ) AS need (kind, name, wanted)
    LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = need.name AND kind IN ('table', 'sequence')
    LEFT JOIN pg_proc AS p ON p.pronamespace = n.oid AND p.proname = need.name AND kind = 'function'
    WHERE n.nspname = %s
      AND NOT coalesce(CASE kind WHEN 'schema' THEN has_schema_privilege(n.oid, wanted)
                                 WHEN 'table' THEN has_table_privilege(c.oid, wanted)
                                 WHEN 'sequence' THEN has_sequence_privilege(c.oid, wanted)
                                 ELSE has_function_privilege(p.oid, wanted) END, false)
""")

# row_security_active() is about the current role: false for owners and those who bypass it.
ROW_SECURITY: Final = SQL("""
    SELECT c.relname::text
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relrowsecurity AND row_security_active(c.oid)
    ORDER BY 1
""")

# Sessions of other roles show their age only to members of pg_read_all_stats.
OLD_TRANSACTIONS: Final = SQL("""
    SELECT kind, extract(epoch FROM clock_timestamp() - since)::float8
    FROM (SELECT 'transaction' AS kind, min(xact_start) AS since FROM pg_stat_activity
          WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid() AND backend_type = 'client backend'
          UNION ALL
          SELECT 'prepared transaction', min(prepared) FROM pg_prepared_xacts) AS ages
    ORDER BY since NULLS LAST
    LIMIT 1
""")

CLOCK: Final = SQL("SELECT extract(epoch FROM clock_timestamp())::float8")

DEAD_ROWS: Final = SQL("""
    SELECT relname::text, n_dead_tup, n_live_tup FROM pg_stat_user_tables
    WHERE schemaname = %s AND relname IN ('job', 'lease')
""")

# Five seconds: a worker that serves the queue takes them back within one or two.
EXPIRED_LEASES: Final = SQL("""
    SELECT queue, count(*) FROM {schema}.lease
    WHERE expires_at < clock_timestamp() - interval '5 seconds'
    GROUP BY queue ORDER BY queue LIMIT 10
""")

"""Topics, their subscriptions, and the messages that topics keep.

Revision ID: 0012
Revises: 0011
"""

from __future__ import annotations

from alembic import context, op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None
# An older worker runs the jobs that a publish makes like all others. It neither replays nor trims.
oldest_worker = "0004"

UPGRADE = (
    # version: counts the changes of the topic's subscriptions. Every publish reads it in the same snapshot as these, so that
    # a message says which subscriptions its publish saw.
    # segment: where messages go now. holds: there may be messages, or tables for them.
    # seen: a snapshot; messages that it does not see were not looked at yet, for subscriptions that their publish did not
    # see.
    # settled: messages up to there come from another cluster, by a restored dump; their transaction ids say nothing here.
    # sizes: how many messages a closed segment has, at least.
    """
    CREATE TABLE {schema}.topic (
        name text COLLATE "C" NOT NULL,
        number bigint GENERATED ALWAYS AS IDENTITY,
        version bigint NOT NULL DEFAULT 0,
        segment bigint NOT NULL DEFAULT 1,
        keep_count bigint,
        keep_age double precision,
        holds boolean NOT NULL DEFAULT false,
        seen text NOT NULL DEFAULT '1:1:',
        settled bigint NOT NULL DEFAULT 0,
        sizes jsonb NOT NULL DEFAULT '{}',
        looked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        rolled_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        CONSTRAINT topic_pkey PRIMARY KEY (name),
        CONSTRAINT topic_seen_check CHECK (seen::pg_snapshot IS NOT NULL)
    ) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0)
    """,
    # name: of the group. What is written of a job is stored here: who publishes need not know the task.
    # switches: versions of the topic, ascending, at which publishes began (odd places) and ceased (even places) to make its
    # jobs.
    # reading: while there is something to replay, the snapshot whose messages are replayed; done: the one of the stretch
    # before, whose messages are left out; replayed_to: the last message that was looked at. Text, since it is a type that
    # tools do not know. definition, superseded, affirmed_at: as for schedules.
    # gone_at: unsubscribed. The row stays for a day: a late message of a publish that still made its job is known by it.
    """
    CREATE TABLE {schema}.subscription (
        topic text COLLATE "C" NOT NULL,
        name text COLLATE "C" NOT NULL,
        queue text COLLATE "C" NOT NULL,
        task text NOT NULL,
        priority smallint NOT NULL DEFAULT 0,
        max_attempts integer NOT NULL DEFAULT 20,
        timeout double precision,
        retry json,
        headers json,
        expires_in double precision,
        ordered boolean NOT NULL DEFAULT false,
        park boolean,
        switches bigint[] NOT NULL DEFAULT '{}',
        reading text,
        done text,
        start_at timestamptz,
        replayed_to bigint,
        definition text,
        superseded text[] NOT NULL DEFAULT '{}',
        affirmed_at timestamptz,
        created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
        gone_at timestamptz,
        CONSTRAINT subscription_pkey PRIMARY KEY (topic, name),
        CONSTRAINT subscription_reading_check CHECK (reading::pg_snapshot IS NOT NULL OR reading IS NULL),
        CONSTRAINT subscription_done_check CHECK (done::pg_snapshot IS NOT NULL OR done IS NULL)
    ) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0)
    """,
    "CREATE SEQUENCE {schema}.message_id_seq AS bigint",
    # By topic, and below that by segment, so that messages of one topic are trimmed by dropping a table, whatever the others
    # keep. Not by ranges of ids: topics share the ids, so nobody knows beforehand how many of them are one topic's. The
    # default partitions are the safety net: a publish must never fail because nobody made a partition.
    # version: of the topic, as the publish saw it; xid: of its transaction, pg_current_xact_id() as a number.
    """
    CREATE TABLE {schema}.message (
        id bigint NOT NULL,
        topic text COLLATE "C" NOT NULL,
        segment bigint NOT NULL,
        version bigint NOT NULL,
        xid bigint NOT NULL,
        key text COLLATE "C",
        args json,
        kwargs json,
        headers json,
        published_at timestamptz NOT NULL,
        CONSTRAINT message_pkey PRIMARY KEY (id, topic, segment)
    ) PARTITION BY LIST (topic)
    """,
    # Where a look goes on: behind the newest transaction that the look before it saw.
    "CREATE INDEX message_xid ON {schema}.message (xid, version)",
    "CREATE TABLE {schema}.message_rest PARTITION OF {schema}.message DEFAULT",
    # Makes the tables of a topic that keeps messages, begins the next segment when a quarter of what is kept is in this one,
    # and drops the segments that nobody keeps any more. SECURITY DEFINER, lock_timeout: as in archive_roll.
    # A table is dropped under the lock that keeps publishes out, and only if no replay has to read it yet and no late
    # message in it is still to be looked at: trimming never makes a subscription miss anything.
    # With an older snapshot what has committed while a lock was waited for would not be seen, and dropped unread: nothing is
    # done then, and left to the next worker.
    # The result counts tables made and dropped, and rows moved and deleted.
    """
    CREATE FUNCTION {schema}.topic_roll(topic_name text) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $body$
    DECLARE
        t {schema}.topic%ROWTYPE;
        base text;
        rest text;
        leaf text;
        keeps boolean;
        oldest timestamptz;
        quarter bigint;
        full_at timestamptz;
        here bigint;
        later bigint := 0;
        next_segment bigint;
        lowest bigint;
        part bigint;
        needed boolean;
        changed integer := 0;
        moved integer;
        unread CONSTANT text := $sql$
            SELECT EXISTS (
                SELECT FROM {schema}.%I AS m, {schema}.topic AS t
                WHERE t.name = $1 AND m.topic = $1
                  AND (m.xid >= pg_snapshot_xmax(t.seen::pg_snapshot)::text::int8
                       OR m.xid = ANY (ARRAY(SELECT pg_snapshot_xip(t.seen::pg_snapshot)::text::int8)))
                  AND m.xid < pg_snapshot_xmax(pg_current_snapshot())::text::int8
                  AND m.version < t.version AND m.id > t.settled
            ) OR EXISTS (
                SELECT FROM {schema}.subscription AS s
                WHERE s.topic = $1 AND s.reading IS NOT NULL
                  AND s.replayed_to < (SELECT max(m.id) FROM {schema}.%1$I AS m WHERE m.topic = $1))
        $sql$;
    BEGIN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RETURN 0;
        END IF;
        SELECT * INTO t FROM {schema}.topic WHERE name = topic_name FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN 0;
        END IF;
        UPDATE {schema}.topic SET rolled_at = clock_timestamp() WHERE name = topic_name;
        keeps := t.keep_count IS NOT NULL OR t.keep_age IS NOT NULL;
        base := 'message_' || t.number;
        rest := base || '_rest';
        IF to_regclass(format('{schema}.%I', base)) IS NULL AND keeps THEN
            BEGIN
                leaf := base || '_' || t.segment;
                EXECUTE format('CREATE TABLE {schema}.%I (LIKE {schema}.message INCLUDING DEFAULTS)'
                               ' PARTITION BY LIST (segment)', base);
                EXECUTE format('CREATE TABLE {schema}.%I PARTITION OF {schema}.%I DEFAULT', rest, base);
                EXECUTE format('CREATE TABLE {schema}.%I PARTITION OF {schema}.%I FOR VALUES IN (%s)',
                               leaf, base, t.segment);
                -- what was published before all this could be made
                LOCK TABLE {schema}.message_rest IN ACCESS EXCLUSIVE MODE;
                EXECUTE format(
                    'WITH moved AS (DELETE FROM {schema}.message_rest WHERE topic = $1 RETURNING *)'
                    ' INSERT INTO {schema}.%I SELECT * FROM moved', base) USING topic_name;
                EXECUTE format('ALTER TABLE {schema}.message ATTACH PARTITION {schema}.%I FOR VALUES IN (%L)',
                               base, topic_name);
                changed := changed + 3;
            EXCEPTION WHEN lock_not_available THEN
                RETURN changed;
            END;
        END IF;
        IF to_regclass(format('{schema}.%I', base)) IS NULL THEN
            EXECUTE format(unread, 'message_rest') INTO needed USING topic_name;
            IF NOT keeps AND NOT needed THEN
                DELETE FROM {schema}.message_rest WHERE ctid = ANY (ARRAY(
                    SELECT ctid FROM {schema}.message_rest WHERE topic = topic_name LIMIT 20000));
                GET DIAGNOSTICS changed = ROW_COUNT;
                UPDATE {schema}.topic SET holds = changed = 20000 WHERE name = topic_name;
            END IF;
            RETURN changed;
        END IF;
        oldest := CASE WHEN NOT keeps THEN 'infinity' ELSE clock_timestamp() - t.keep_age * interval '1 second' END;

        -- the next segment
        leaf := base || '_' || t.segment;
        quarter := greatest(1, least(coalesce(t.keep_count / 4, 1000000), 1000000));
        here := 0;
        full_at := NULL;
        IF to_regclass(format('{schema}.%I', leaf)) IS NOT NULL THEN
            EXECUTE format('SELECT count(*) FROM (SELECT FROM {schema}.%I LIMIT $1) AS counted', leaf)
                INTO here USING coalesce(t.keep_count, quarter);
            EXECUTE format('SELECT published_at FROM {schema}.%I ORDER BY id LIMIT 1', leaf) INTO full_at;
        END IF;
        IF keeps AND (to_regclass(format('{schema}.%I', leaf)) IS NULL OR here >= quarter
                      OR full_at < clock_timestamp() - t.keep_age / 4 * interval '1 second') THEN
            next_segment := t.segment;
            FOR attempt IN 1..10 LOOP
                next_segment := next_segment + 1;
                leaf := base || '_' || next_segment;
                BEGIN
                    EXECUTE format('CREATE TABLE {schema}.%I (LIKE {schema}.message INCLUDING DEFAULTS)', leaf);
                    EXECUTE format('ALTER TABLE {schema}.%I ATTACH PARTITION {schema}.%I FOR VALUES IN (%s)',
                                   base, leaf, next_segment);
                    UPDATE {schema}.topic
                    SET segment = next_segment, sizes = sizes || jsonb_build_object(t.segment::text, here)
                    WHERE name = topic_name;
                    t.sizes := t.sizes || jsonb_build_object(t.segment::text, here);
                    t.segment := next_segment;
                    here := 0;
                    changed := changed + 1;
                    EXIT;
                EXCEPTION
                    WHEN check_violation THEN
                        NULL; -- the default partition holds rows of that segment
                    WHEN lock_not_available THEN
                        EXIT;
                END;
            END LOOP;
        END IF;

        -- what is kept no more, newest first: `later` are the messages behind
        later := here;
        lowest := t.segment;
        FOR part IN
            SELECT substring(c.relname FROM '[0-9]+$')::bigint
            FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE i.inhparent = format('{schema}.%I', base)::regclass AND c.relname ~ '^message_[0-9]+_[0-9]+$'
            ORDER BY 1 DESC
        LOOP
            CONTINUE WHEN keeps AND part = t.segment;
            leaf := base || '_' || part;
            EXECUTE format('SELECT published_at FROM {schema}.%I ORDER BY id DESC LIMIT 1', leaf) INTO full_at;
            IF keeps AND NOT coalesce(later >= t.keep_count, false) AND NOT coalesce(full_at < oldest, full_at IS NULL) THEN
                later := later + coalesce((t.sizes ->> part::text)::bigint, 0);
                lowest := part;
                CONTINUE;
            END IF;
            EXECUTE format(unread, leaf) INTO needed USING topic_name;
            CONTINUE WHEN needed;
            BEGIN
                EXECUTE format('LOCK TABLE {schema}.%I IN ACCESS EXCLUSIVE MODE', base);
                -- once more: a publish may have ended while the lock was waited for
                EXECUTE format(unread, leaf) INTO needed USING topic_name;
                EXECUTE format('SELECT published_at FROM {schema}.%I ORDER BY id DESC LIMIT 1', leaf) INTO full_at;
                CONTINUE WHEN needed OR keeps AND NOT coalesce(later >= t.keep_count, false)
                              AND NOT coalesce(full_at < oldest, full_at IS NULL);
                EXECUTE format('DROP TABLE {schema}.%I', leaf);
                UPDATE {schema}.topic SET sizes = sizes - part::text WHERE name = topic_name;
                changed := changed + 1;
            EXCEPTION
                WHEN dependent_objects_still_exist THEN
                    NULL; -- somebody built a view on this one
                WHEN lock_not_available THEN
                    EXIT;
            END;
        END LOOP;

        -- what lies in the default partition: nearly always nothing
        EXECUTE format(unread, rest) INTO needed USING topic_name;
        IF NOT needed THEN
            EXECUTE format('DELETE FROM {schema}.%I WHERE ctid = ANY (ARRAY(SELECT ctid FROM {schema}.%1$I'
                           ' WHERE published_at < $1 OR segment < $2 AND $3 LIMIT 20000))', rest)
                USING oldest, lowest, coalesce(later >= t.keep_count, false);
            GET DIAGNOSTICS moved = ROW_COUNT;
            changed := changed + moved;
        END IF;
        IF NOT keeps AND NOT needed THEN
            BEGIN
                LOCK TABLE {schema}.message IN ACCESS EXCLUSIVE MODE;
                EXECUTE format('SELECT EXISTS (SELECT FROM {schema}.%I)', base) INTO needed;
                IF NOT needed THEN
                    EXECUTE format('DROP TABLE {schema}.%I', base);
                    UPDATE {schema}.topic SET holds = false, sizes = '{}', segment = t.segment + 1 WHERE name = topic_name;
                    changed := changed + 1;
                END IF;
            EXCEPTION WHEN lock_not_available OR dependent_objects_still_exist THEN
                NULL;
            END;
        END IF;
        RETURN changed;
    END
    $body$
    """,
    "REVOKE ALL ON FUNCTION {schema}.topic_roll(text) FROM PUBLIC",
)

DOWNGRADE = (
    "DROP FUNCTION {schema}.topic_roll(text)",
    "DROP TABLE {schema}.message",
    "DROP SEQUENCE {schema}.message_id_seq",
    "DROP TABLE {schema}.subscription",
    "DROP TABLE {schema}.topic",
)


def _run(statements: tuple[str, ...]) -> None:
    schema = context.get_context().opts["pgqueue_schema"]
    for statement in statements:
        op.execute(statement.replace("{schema}", f'"{schema}"'))


def upgrade() -> None:
    _run(UPGRADE)


def downgrade() -> None:
    _run(DOWNGRADE)

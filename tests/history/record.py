"""What is recorded of a run, where, and how it is read back.

Two witnesses write into one table, numbered by one sequence. Triggers on the tables of the queue write what became of each
row, in the transaction that did it; handlers write what they did, on connections of their own. A number is drawn under the
lock of the row that it speaks of, or before the next step is taken, so the numbers of one job are in the order of causes.
Both survive crashes of the server together: a crash that forgets a step forgets all that came after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import psycopg

TABLES = """
CREATE SCHEMA history;
CREATE SEQUENCE history.seq;
CREATE TABLE history.event (
    seq bigint NOT NULL DEFAULT nextval('history.seq'), at timestamptz NOT NULL DEFAULT clock_timestamp(),
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(), job_id bigint NOT NULL, key bigint, what text NOT NULL, was bigint,
    token bigint, attempt int, most int, lost int, pid int, run bigint, note text
);
-- A record that is written again because its first answer was lost stays one record.
CREATE UNIQUE INDEX event_once ON history.event (job_id, token, what, run) WHERE run IS NOT NULL;
CREATE TABLE history.intent (key bigint PRIMARY KEY, job_id bigint NOT NULL, kind text NOT NULL);
CREATE TABLE history.effect (job_id bigint PRIMARY KEY, fence bigint NOT NULL) WITH (fillfactor = 50);
CREATE TABLE history.lease (
    seq bigint NOT NULL DEFAULT nextval('history.seq'), token bigint NOT NULL, expires_at timestamptz NOT NULL
);

CREATE FUNCTION history.watch_job() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    it pgqueue.job := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO history.event (job_id, key, what, was, token, attempt, most, lost, note)
    VALUES (it.id, (it.args ->> 0)::bigint, lower(TG_OP), CASE WHEN TG_OP <> 'INSERT' THEN OLD.lease_id END,
            CASE WHEN TG_OP <> 'DELETE' THEN NEW.lease_id END, it.attempt, it.max_attempts, it.lost,
            it.errors -> -1 ->> 'type');
    RETURN NULL;
END $$;
CREATE TRIGGER watch_new AFTER INSERT OR DELETE ON pgqueue.job FOR EACH ROW EXECUTE FUNCTION history.watch_job();
CREATE TRIGGER watch_owner AFTER UPDATE ON pgqueue.job FOR EACH ROW
    WHEN ((OLD.lease_id, OLD.attempt, OLD.lost) IS DISTINCT FROM (NEW.lease_id, NEW.attempt, NEW.lost))
    EXECUTE FUNCTION history.watch_job();

CREATE FUNCTION history.watch_archive() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO history.event (job_id, key, what, attempt, lost, note)
    VALUES (NEW.id, (NEW.args ->> 0)::bigint, 'archived', NEW.attempt, NEW.lost, NEW.state);
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT ON pgqueue.archive FOR EACH ROW EXECUTE FUNCTION history.watch_archive();

CREATE FUNCTION history.watch_dead() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    it pgqueue.dead_letter := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO history.event (job_id, key, what, attempt, most, lost, note)
    VALUES (it.id, (it.args ->> 0)::bigint, CASE WHEN TG_OP = 'DELETE' THEN 'redriven' ELSE 'dead' END, it.attempt,
            it.max_attempts, it.lost, it.errors -> -1 ->> 'type');
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT OR DELETE ON pgqueue.dead_letter FOR EACH ROW EXECUTE FUNCTION history.watch_dead();

CREATE FUNCTION history.watch_lease() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO history.lease (token, expires_at) VALUES (NEW.id, NEW.expires_at);
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT OR UPDATE ON pgqueue.lease FOR EACH ROW EXECUTE FUNCTION history.watch_lease();
"""

RECORD = """
WITH fenced AS (
    INSERT INTO history.effect AS e (job_id, fence) VALUES (%(job)s, %(token)s)
    ON CONFLICT (job_id) DO UPDATE SET fence = excluded.fence WHERE e.fence <= excluded.fence
    RETURNING 1
)
INSERT INTO history.event (seq, job_id, key, what, token, attempt, pid, run, note)
-- From a subquery: the number must be drawn after the row of the effect is locked.
SELECT nextval('history.seq'), %(job)s, %(key)s, %(what)s, %(token)s, %(attempt)s, %(pid)s, %(run)s,
       CASE WHEN accepted = 1 THEN 'accepted' ELSE 'refused' END
FROM (SELECT count(*) AS accepted FROM fenced) AS effect
ON CONFLICT DO NOTHING
"""
"""One step of a handler, together with its fenced business effect: the fence is the largest token that has got here."""

ASKED = "INSERT INTO history.event (job_id, what) VALUES (%s, 'asked')"
"""Somebody is about to cancel this job."""


class Event(NamedTuple):
    """One line of a job's history.

    `what`, from the triggers: insert, update (its owner or its attempts changed, from `was` to `token`), delete, archived
    (`note`: the state), dead, redriven; from handlers: start, end, fail, snooze (`note`: accepted or refused, `run`: a
    number of its own for each call of a handler); asked: a cancellation. `most` is the maximum of attempts.
    """

    seq: int
    at: datetime
    xid: int
    job_id: int
    key: int | None
    what: str
    was: int | None = None
    token: int | None = None
    attempt: int | None = None
    most: int | None = None
    lost: int | None = None
    pid: int | None = None
    run: int | None = None
    note: str | None = None

    def __str__(self) -> str:
        shown = ("was", "token", "attempt", "most", "lost", "pid", "note")
        facts = [f"{name}={getattr(self, name)}" for name in shown if getattr(self, name) is not None]
        return f"{self.seq:>8} {self.at:%H:%M:%S.%f} {self.what:<8} {' '.join(facts)}"


class Intent(NamedTuple):
    """The business row that committed together with a job."""

    job_id: int
    kind: str


Leases = dict[int, list[tuple[int, datetime]]]
"""By token: the numbered ends that this lease was given, in their order."""


def stories(connection: psycopg.Connection[Any]) -> Iterator[tuple[int, list[Event]]]:
    """The events of one job after the other, each in order."""
    with connection.transaction(), connection.cursor(name="events") as cursor:
        cursor.itersize = 10_000
        cursor.execute(
            "SELECT seq, at, xid::text::bigint, job_id, key, what, was, token, attempt, most, lost, pid, run, note"
            " FROM history.event ORDER BY job_id, seq"
        )
        for job_id, events in groupby(map(Event._make, cursor), attrgetter("job_id")):
            yield job_id, list(events)


def intents(connection: psycopg.Connection[Any]) -> dict[int, Intent]:
    """Every business row, by its key."""
    found = connection.execute("SELECT key, job_id, kind FROM history.intent").fetchall()
    return {key: Intent(job_id, kind) for key, job_id, kind in found}


def leases(connection: psycopg.Connection[Any]) -> Leases:
    """What every lease was given."""
    ends: Leases = {}
    for seq, token, expires_at in connection.execute("SELECT seq, token, expires_at FROM history.lease ORDER BY seq"):
        ends.setdefault(token, []).append((seq, expires_at))
    return ends


def counts(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """How many jobs lie where."""
    tables = {"live": "job", "archived": "archive", "dead": "dead_letter"}
    found = {}
    for name, table in tables.items():
        row = connection.execute(f"SELECT count(*) FROM pgqueue.{table}".encode()).fetchone()
        found[name] = int(row[0]) if row else 0
    return found

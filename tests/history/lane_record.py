"""What is recorded of keys: who of a lane holds a slot, who owns it, and whether the lane is parked.

Records are numbered like those of `record`, under the lock of the row that they speak of. An admission also records the
snapshot of its statement: what it could see, and what not. A snapshot and the numbers of transactions say exactly which
records had been committed when an admission was decided; no clock is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import psycopg

LANE_TABLES = """
CREATE TABLE history.lane (
    seq bigint NOT NULL DEFAULT nextval('history.seq'), xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    lane text NOT NULL, what text NOT NULL, job_id bigint, width int, admitted boolean, waits boolean, token bigint,
    park boolean, snapshot text
);

CREATE FUNCTION history.watch_lane() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    it pgqueue.job := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO history.lane (lane, what, job_id, width, admitted, waits, token, park, snapshot)
    VALUES (it.lane, lower(TG_OP), it.id, it.lane_width, it.admitted, it.run_at IS NULL,
            CASE WHEN TG_OP <> 'DELETE' THEN it.lease_id END, it.park, current_setting('history.snapshot', true));
    RETURN NULL;
END $$;
CREATE TRIGGER watch_lane AFTER INSERT ON pgqueue.job FOR EACH ROW WHEN (NEW.lane IS NOT NULL)
    EXECUTE FUNCTION history.watch_lane();
CREATE TRIGGER watch_lane_end AFTER DELETE ON pgqueue.job FOR EACH ROW WHEN (OLD.lane IS NOT NULL)
    EXECUTE FUNCTION history.watch_lane();
-- The condition is evaluated inside the statement, and so sees its snapshot; a trigger's body has one of its own.
CREATE TRIGGER watch_lane_change AFTER UPDATE ON pgqueue.job FOR EACH ROW
    WHEN (NEW.lane IS NOT NULL
          AND (OLD.admitted, OLD.run_at IS NULL, OLD.lease_id)
              IS DISTINCT FROM (NEW.admitted, NEW.run_at IS NULL, NEW.lease_id)
          AND set_config('history.snapshot', pg_current_snapshot()::text, true) IS NOT NULL)
    EXECUTE FUNCTION history.watch_lane();

CREATE FUNCTION history.watch_parking() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO history.lane (lane, what, job_id)
    VALUES (NEW.lane, CASE WHEN NEW.parked_at IS NULL THEN 'resumed' ELSE 'parked' END, NEW.parked_by);
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT ON pgqueue.lane FOR EACH ROW WHEN (NEW.parked_at IS NOT NULL)
    EXECUTE FUNCTION history.watch_parking();
CREATE TRIGGER watch_again AFTER UPDATE ON pgqueue.lane FOR EACH ROW WHEN (OLD.parked_at IS DISTINCT FROM NEW.parked_at)
    EXECUTE FUNCTION history.watch_parking();

CREATE FUNCTION history.watch_dead_lane() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    it pgqueue.dead_letter := CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
BEGIN
    INSERT INTO history.lane (lane, what, job_id, park)
    VALUES (it.lane, CASE WHEN TG_OP = 'DELETE' THEN 'redriven' ELSE 'dead' END, it.id, it.park);
    RETURN NULL;
END $$;
CREATE TRIGGER watch_dead_lane AFTER INSERT ON pgqueue.dead_letter FOR EACH ROW WHEN (NEW.lane IS NOT NULL)
    EXECUTE FUNCTION history.watch_dead_lane();
CREATE TRIGGER watch_redriven_lane AFTER DELETE ON pgqueue.dead_letter FOR EACH ROW WHEN (OLD.lane IS NOT NULL)
    EXECUTE FUNCTION history.watch_dead_lane();
"""

UNPARKING = "INSERT INTO history.lane (lane, what) VALUES (%s, 'unparking')"
"""Somebody is about to let this lane go on."""


class LaneEvent(NamedTuple):
    """One line of a lane's history.

    `what`, of a job: insert, update, delete, dead, redriven; of the lane: parked (by the dead letter `job_id`), resumed,
    unparking (an operator is about to say so). `admitted`: the job holds a slot. `waits`: it does not wait for a time.
    `token`: who owns it. `width`: how many may be admitted. `snapshot`: what the statement saw, for updates.
    """

    seq: int
    xid: int
    lane: str
    what: str
    job_id: int | None = None
    width: int | None = None
    admitted: bool | None = None
    waits: bool | None = None
    token: int | None = None
    park: bool | None = None
    snapshot: str | None = None

    def __str__(self) -> str:
        shown = ("job_id", "admitted", "waits", "token", "snapshot")
        facts = [f"{name}={getattr(self, name)}" for name in shown if getattr(self, name) is not None]
        return f"{self.seq:>8} {self.what:<9} xid={self.xid} {' '.join(facts)}"


class Snapshot:
    """What a statement saw: every transaction that had committed when it began."""

    def __init__(self, text: str) -> None:
        low, high, running = text.split(":")
        self.low, self.high = int(low), int(high)
        self.running = frozenset(map(int, filter(None, running.split(","))))

    def sees(self, xid: int) -> bool:
        """Whether this transaction, which has committed at last, had done so by then."""
        return xid < self.high and xid not in self.running


def lanes(connection: psycopg.Connection[Any]) -> Iterator[tuple[str, list[LaneEvent]]]:
    """The events of one lane after the other, each in order."""
    with connection.transaction(), connection.cursor(name="lanes") as cursor:
        cursor.itersize = 10_000
        cursor.execute(
            "SELECT seq, xid::text::bigint, lane, what, job_id, width, admitted, waits, token, park, snapshot"
            ' FROM history.lane ORDER BY lane COLLATE "C", seq'
        )
        for lane, events in groupby(map(LaneEvent._make, cursor), attrgetter("lane")):
            yield lane, list(events)

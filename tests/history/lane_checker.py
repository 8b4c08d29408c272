"""The rules of keys, over what is recorded of each lane: pure functions, as in `checker`.

Two views of one history. In the order of the numbers, which are drawn under the locks of rows, slots are taken and given
back; and every admission is looked at through its own snapshot: the state of each job of the lane is that of its last record
whose transaction the snapshot sees. The first view finds two admissions that did not see each other, the second one an
admission that did not wait for a commit, or passed over a job that it could see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.history.checker import Checked, Rule, Violation
from tests.history.lane_record import LaneEvent, Snapshot

SHOWN = 40
"""Events of a lane that are shown with a violation: the last ones before it."""


def check_lanes(stories: Iterable[tuple[str, Sequence[LaneEvent]]]) -> Checked:
    """Every violation of the rules of keys, and how much of what was seen."""
    checked = Checked()
    for lane, events in stories:
        walk = _Lane(lane, events)
        walk.walk()
        checked.violations += walk.violations
        checked.seen.update(walk.seen)
    return checked


class _Lane:
    """One lane's way through its events."""

    def __init__(self, lane: str, events: Sequence[LaneEvent]) -> None:
        self.lane = lane
        self.ordered = lane.startswith("o")
        self.events = events
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.records: dict[int, list[LaneEvent]] = {}
        self.parkings: list[LaneEvent] = []
        self.admitted: set[int] = set()
        self.owners: dict[int, int] = {}
        self.last_token = 0
        self.asked = 0
        self._number = 0

    def walk(self) -> None:
        """Event by event."""
        steps = {"insert": self._change, "update": self._change, "delete": self._change, "dead": self._dead}
        steps |= {"parked": self._parked, "resumed": self._resumed, "unparking": self._unparking}
        for number, event in enumerate(self.events):
            self._number = number
            step = steps.get(event.what)
            if step is not None:
                step(event)

    def _broken(self, rule: Rule, event: LaneEvent, detail: str) -> None:
        shown = tuple(self.events[max(0, self._number + 1 - SHOWN) : self._number + 1])
        self.violations.append(Violation(rule, f"{detail}, in lane {self.lane!r}", event.job_id, shown, self.lane))

    def _beside(self, event: LaneEvent, what: str) -> list[LaneEvent]:
        """What the same transaction did to the same job."""
        return [o for o in self.events if (o.xid, o.what, o.job_id) == (event.xid, what, event.job_id)]

    # Jobs.

    def _change(self, event: LaneEvent) -> None:
        job_id = event.job_id or 0
        ends = event.what == "delete"
        if event.admitted and not ends:
            if job_id not in self.admitted:
                self._admission(event, job_id)
        elif job_id in self.admitted:
            if self.ordered and not ends:
                self._broken(Rule.IN_ORDER, event, f"job {job_id} loses its slot, and is not at its end")
            self.admitted.discard(job_id)
        self._owner(event, job_id)
        self.records.setdefault(job_id, []).append(event)

    def _admission(self, event: LaneEvent, job_id: int) -> None:
        self.seen["admission in order" if self.ordered else "admission within a limit"] += 1
        rule = Rule.ONE_AT_A_TIME if self.ordered else Rule.WITHIN_LIMIT
        width = 1 if self.ordered else event.width or 1
        self.admitted.add(job_id)
        if len(self.admitted) > width:
            self._broken(rule, event, f"{len(self.admitted)} jobs are admitted, {sorted(self.admitted)}, of {width}")
        snapshot = Snapshot(event.snapshot or "0:0:")
        held = {job_id}
        for other, records in list(self.records.items()):
            known = [record for record in records if snapshot.sees(record.xid)]
            own = [record for record in records if record.xid == event.xid]
            if own and own[-1].admitted:
                held.add(other)
            if not known or other == job_id:
                continue
            if known[-1].what == "delete":
                if known[-1] is records[-1]:
                    del self.records[other]
                continue
            if known[-1].admitted:
                held.add(other)
            if self.ordered and other < job_id and (known[-1].waits or _has_begun(known)):
                self._broken(Rule.IN_ORDER, event, f"job {job_id} is admitted, and the older job {other} is live")
        if len(held) > width:
            self._broken(rule, event, f"job {job_id} is admitted, and {sorted(held)} were, of {width}")
        self._admitted_while_parked(event, snapshot)

    def _owner(self, event: LaneEvent, job_id: int) -> None:
        """Of an ordering key: one owner after the other, and each with a larger token than the one before."""
        token, before = event.token, self.owners.get(job_id)
        if token == before:
            return
        self.owners.pop(job_id, None)
        if token is None:
            return
        if self.ordered and self.owners:
            self._broken(Rule.ONE_AT_A_TIME, event, f"job {job_id} is claimed, and {sorted(self.owners)} are owned")
        if self.ordered and token <= self.last_token:
            self._broken(Rule.ONE_AT_A_TIME, event, f"token {token} follows {self.last_token}")
        if not event.admitted:
            self._broken(Rule.WITHIN_LIMIT, event, f"job {job_id} is claimed without a slot")
        self.owners[job_id] = token
        self.last_token = max(self.last_token, token)

    # Parking.

    def _dead(self, event: LaneEvent) -> None:
        if event.park and not self._beside(event, "parked"):
            self._broken(Rule.PARKED, event, f"job {event.job_id} dies and does not park")

    def _parked(self, event: LaneEvent) -> None:
        self.seen["parked"] += 1
        if not any(dead.park for dead in self._beside(event, "dead")):
            self._broken(Rule.PARKED, event, f"parked by job {event.job_id}, which has not died")
        self.parkings.append(event)

    def _resumed(self, event: LaneEvent) -> None:
        by = self.parkings[-1].job_id if self.parkings else None
        redriven = any((o.xid, o.what, o.job_id) == (event.xid, "redriven", by) for o in self.events)
        if not redriven and not self.asked:
            self._broken(Rule.PARKED, event, "it goes on, and nobody has said so")
        self.seen["resumed by redrive" if redriven else "unparked"] += 1
        self.parkings.append(event)

    def _unparking(self, event: LaneEvent) -> None:
        self.asked += 1

    def _admitted_while_parked(self, event: LaneEvent, snapshot: Snapshot) -> None:
        known = [parking for parking in self.parkings if snapshot.sees(parking.xid)]
        if known and known[-1].what == "parked":
            self._broken(Rule.PARKED, event, f"job {event.job_id} is admitted while the lane is parked")


def _has_begun(records: Sequence[LaneEvent]) -> bool:
    """Whether a job has had its slot since it was enqueued or redriven. From then on it keeps its place, also while it waits
    for the time of a retry; one that was enqueued for later has none before it is due."""
    for record in reversed(records):
        if record.admitted:
            return True
        if record.what == "insert":
            return False
    return False

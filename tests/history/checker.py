"""The checker: pure functions over what a run recorded. Every answer is a list of violations; none means that no promise was
seen broken. It walks through each job's history once and keeps the state that the promises allow."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.history.lane_record import LaneEvent
from tests.history.record import Event, Intent, Leases

EXCUSED = ("RecordLost", "RuntimeError")
"""Errors of a handler that are not its own: it could not record what it did, or its process was ending."""


class Rule(enum.StrEnum):
    """The promises."""

    NOT_LOST = "a committed job is live, archived or dead-lettered, and in one place only"
    NOT_INVENTED = "a job whose transaction did not commit never existed"
    ONE_OWNER = "a job has one owner at a time"
    OWNER_SETTLES = "only the owner of a job settles it, after it has run it"
    LEASE_HELD = "an owner is not dispossessed before its lease has ended"
    TOKEN_GROWS = "a later claim has a larger token, and only the latest passes the fence"
    RUNS_GRANTED = "every run belongs to a claim, and a claim is run once"
    ATTEMPTS = "attempts are counted, and never more than the maximum"
    ASKED = "only what somebody asked to cancel is cancelled"
    ONE_AT_A_TIME = "of one ordering key one job holds the slot, and its owners follow one another"
    IN_ORDER = "a job of an ordering key is admitted only when no older one that was visible is live"
    WITHIN_LIMIT = "a concurrency key never has more admitted jobs than its limit"
    PARKED = "a lane is parked by a dead letter of its own, and goes on when somebody has decided"
    LIVES_ON = "every part of every worker works again when the faults have ended"


class Verdict(enum.StrEnum):
    """What a producer was told of its transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise, with the history of the job, or of the lane, that shows it (None: of no single one)."""

    rule: Rule
    detail: str
    job_id: int | None = None
    events: tuple[Event | LaneEvent, ...] = ()
    lane: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.rule.name}: {self.detail} (the rule: {self.rule})"]
        if self.job_id is not None or self.lane is not None:
            whose = f"job {self.job_id}" if self.lane is None else f"lane {self.lane!r}"
            lines += [f"  history of {whose}:", *(f"    {event}" for event in self.events)]
        return "\n".join(lines)


FORGETTABLE = timedelta(seconds=5)
"""How long before a crash of the server a claim may have been made that it forgets: claims do not wait for the disk. The
server's own bound is three times wal_writer_delay, 0.6 s; more, for a busy machine."""
JobRule = Callable[[Sequence[Event]], Iterable[Violation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that a run has recorded. `counts`: how many jobs lie in the tables `live`, `archived` and `dead` at the end, when
    `drained` says that nothing should be live. `crashes`: when the server has lost its memory. `rules`: further ones, each
    given the events of one job after the other."""

    stories: Iterable[tuple[int, list[Event]]]
    intents: Mapping[int, Intent]
    verdicts: Mapping[int, Verdict]
    leases: Leases
    counts: Mapping[str, int]
    drained: bool = True
    crashes: Sequence[datetime] = ()
    rules: Sequence[JobRule] = ()


@dataclass(slots=True)
class Checked:
    """The violations, and how much of what was seen."""

    violations: list[Violation] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


def check(history: History) -> Checked:
    """Every violation of a history."""
    checked = Checked()
    places: Counter[str] = Counter()
    owners: dict[int, int] = {}
    for job_id, events in history.stories:
        job = _Walk(job_id, events, history.leases, history.crashes)
        job.walk()
        checked.violations += job.violations
        checked.violations += _origin(job, history, owners)
        checked.seen.update(job.seen)
        places[job.place] += 1
        if history.drained and job.place == "live":
            checked.violations.append(job.violation(Rule.LIVES_ON, "it is live when all work should have ended"))
        for rule in history.rules:
            checked.violations += rule(events)
    checked.violations += _accounts(history, owners, places)
    return checked


def _origin(job: _Walk, history: History, owners: dict[int, int]) -> list[Violation]:
    """Where a job came from: the one business transaction that committed it."""
    key = next((event.key for event in job.events if event.key is not None), None)
    intent = None if key is None else history.intents.get(key)
    if key is None or intent is None:
        told = history.verdicts.get(key, "never made") if key is not None else "never made"
        return [job.violation(Rule.NOT_INVENTED, f"it exists, and its business transaction was {told}")]
    if intent.job_id != job.job_id or key in owners:
        return [job.violation(Rule.NOT_INVENTED, f"key {key} belongs to job {intent.job_id}")]
    owners[key] = job.job_id
    return []


def _accounts(history: History, owners: Mapping[int, int], places: Mapping[str, int]) -> list[Violation]:
    found = []
    for key, intent in history.intents.items():
        if key not in owners:
            found.append(Violation(Rule.NOT_LOST, f"{intent.kind} job {intent.job_id} of key {key} was never there"))
        if history.verdicts.get(key) is Verdict.ROLLED_BACK:
            found.append(Violation(Rule.NOT_INVENTED, f"key {key} was rolled back, and its business row is there"))
    for key, verdict in history.verdicts.items():
        if verdict is Verdict.COMMITTED and key not in history.intents:
            found.append(Violation(Rule.NOT_LOST, f"key {key} was committed, and its business row is gone"))
    enqueued, lie = len(history.intents), sum(history.counts.values())
    if enqueued != lie or any(places.get(place, 0) != number for place, number in history.counts.items()):
        detail = f"{enqueued} enqueued, the tables hold {dict(history.counts)}, the histories end in {dict(places)}"
        found.append(Violation(Rule.NOT_LOST, detail))
    return found


class _Walk:
    """One job's way through its events."""

    def __init__(self, job_id: int, events: Sequence[Event], leases: Leases, crashes: Sequence[datetime]) -> None:
        self.job_id = job_id
        self.events = events
        self.leases = leases
        self.crashes = crashes
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.place = "nowhere"
        self.owner: int | None = None
        self.attempt = self.lost = 0
        self.asked = False
        self.claims: dict[int, int | None] = {}
        self.runs: dict[int, int | None] = {}
        self.fence = 0
        self.said: set[tuple[int | None, str]] = set()

    def violation(self, rule: Rule, detail: str) -> Violation:
        """One that this job's history shows."""
        return Violation(rule, detail, self.job_id, tuple(self.events))

    def walk(self) -> None:
        """Event by event."""
        steps = {
            "insert": self._insert,
            "update": self._update,
            "delete": self._delete,
            "asked": self._ask,
            **dict.fromkeys(("archived", "dead", "redriven"), self._nothing),  # read together with the row's own event
        }
        for event in self.events:
            self.seen[event.what] += 1
            steps.get(event.what, self._record)(event)

    def _broken(self, rule: Rule, detail: str) -> None:
        self.violations.append(self.violation(rule, detail))

    def _must(self, condition: bool, rule: Rule, detail: str) -> None:
        if not condition:
            self._broken(rule, detail)

    def _nothing(self, event: Event) -> None: ...

    def _ask(self, event: Event) -> None:
        self.asked = True

    # What the triggers saw.

    def _beside(self, event: Event, *kinds: str) -> list[Event]:
        """What the same transaction did to this job elsewhere."""
        return [other for other in self.events if other.xid == event.xid and other.what in kinds]

    def _insert(self, event: Event) -> None:
        before = {"nowhere": True, "dead": bool(self._beside(event, "redriven"))}.get(self.place, False)
        self._must(before, Rule.NOT_LOST, f"a row appears while the job is {self.place}")
        self._must(not event.attempt and event.token is None, Rule.ATTEMPTS, "a new row has been claimed already")
        self.place, self.owner, self.attempt, self.lost = "live", None, event.attempt or 0, event.lost or 0

    def _update(self, event: Event) -> None:
        self._must(self.place == "live", Rule.NOT_LOST, f"a row changes while the job is {self.place}")
        self._must(event.was == self.owner, Rule.ONE_OWNER, f"token {self.owner} owned it, then {event.was} did")
        if event.was is None and event.token is not None:
            self._claim(event, event.token)
        elif event.was is not None and event.token is None:
            self._back(event, event.was)
        elif event.was != event.token:
            self._broken(Rule.ONE_OWNER, f"token {event.token} takes it while {event.was} owns it")
        else:
            self._broken(Rule.ATTEMPTS, "its counts change while its owner does not")
        self.owner, self.attempt, self.lost = event.token, event.attempt or 0, event.lost or 0

    def _claim(self, event: Event, token: int) -> None:
        self.seen["claim"] += 1
        self._must(
            token > max(self.claims, default=0), Rule.TOKEN_GROWS, f"token {token} is not larger than those before"
        )
        self._must(event.attempt == self.attempt + 1, Rule.ATTEMPTS, f"attempt {event.attempt} follows {self.attempt}")
        within = (event.attempt or 0) <= (event.most or 0)
        self._must(within, Rule.ATTEMPTS, f"attempt {event.attempt} of at most {event.most}")
        self._must(event.lost == self.lost, Rule.ATTEMPTS, "a claim changes the number of lost attempts")
        self.claims[token] = event.attempt

    def _back(self, event: Event, token: int) -> None:
        """Back into the queue: rescued, to be retried, or given back."""
        change = (event.attempt or 0) - self.attempt, (event.lost or 0) - self.lost
        if change == (0, 1):
            self.seen["rescue"] += 1
            self._ended_lease(event, token)
            over = self.attempt >= (event.most or 0)
            self._must(not over, Rule.ATTEMPTS, f"rescued after attempt {self.attempt} of {event.most}")
        elif change == (0, 0):
            self.seen["retry"] += 1
            self._failed_by(token, event.note)
        elif change == (-1, 0):
            self.seen["given back"] += 1
        else:
            self._broken(Rule.ATTEMPTS, f"attempts change by {change[0]} and losses by {change[1]}")

    def _delete(self, event: Event) -> None:
        self._must(event.was == self.owner, Rule.ONE_OWNER, f"token {self.owner} owned it, then {event.was} did")
        fates = self._beside(event, "archived", "dead")
        if len(fates) != 1:
            self._broken(Rule.NOT_LOST, f"its row goes, and {len(fates)} places take it up")
        for fate in fates:
            self.seen[f"{fate.what} {fate.note}" if fate.what == "archived" else "dead letter"] += 1
            if fate.what == "dead":
                self._bury(event, fate)
            else:
                self._archive(event, fate)
        self.place = fates[0].what if fates else "nowhere"
        self.owner = None

    def _archive(self, event: Event, fate: Event) -> None:
        lost = (fate.lost or 0) - self.lost
        if fate.note == "completed":
            ended = event.was is not None and (event.was, "end") in self.said
            lacking = f"its owner, token {event.was}, has not ended" if event.was is not None else "nobody owned it"
            self._must(ended, Rule.OWNER_SETTLES, f"completed, and {lacking}")
        elif fate.note == "cancelled":
            self._must(self.asked, Rule.ASKED, "cancelled, and nobody asked for it")
        else:
            self._broken(Rule.OWNER_SETTLES, f"archived as {fate.note}, which no task wants")
        if lost and event.was is not None:
            self._ended_lease(event, event.was)
        self._must(fate.attempt == self.attempt, Rule.ATTEMPTS, f"archived with attempt {fate.attempt}")

    def _bury(self, event: Event, fate: Event) -> None:
        if event.was is None:
            self._broken(Rule.OWNER_SETTLES, "dead-lettered while nobody owned it")
            return
        self._must(fate.attempt == self.attempt, Rule.ATTEMPTS, f"dead-lettered with attempt {fate.attempt}")
        used = self.attempt >= (fate.most or 0)
        self._must(used, Rule.ATTEMPTS, f"dead-lettered after attempt {self.attempt} of {fate.most}")
        if (fate.lost or 0) > self.lost:
            self._ended_lease(event, event.was)
        else:
            self._failed_by(event.was, fate.note)

    def _failed_by(self, token: int, error: str | None) -> None:
        kind = (error or "nothing").rsplit(".", 1)[-1]
        if kind in ("NotYet", "NoLonger"):
            told = (token, "fail") in self.said
            self._must(told, Rule.OWNER_SETTLES, f"settled as failed, and its owner, token {token}, has not failed")
        elif kind not in EXCUSED:
            self._broken(Rule.OWNER_SETTLES, f"settled as failed with {error}, which no task raises")

    def _ended_lease(self, event: Event, token: int) -> None:
        ends = [expires_at for seq, expires_at in self.leases.get(token, ()) if seq < event.seq]
        if ends and ends[-1] > event.at:
            left = (ends[-1] - event.at).total_seconds()
            self._broken(Rule.LEASE_HELD, f"taken from token {token} {left:.3f} s before the end of its lease")

    # What the handlers said.

    def _record(self, event: Event) -> None:
        token, run = event.token or 0, event.run or 0
        if token not in self.claims:
            known = self._forgotten(event, token)
            self.seen["run of a forgotten claim"] += known and event.what == "start"
            self._must(known, Rule.RUNS_GRANTED, f"a run under token {token}, which no claim has given")
        granted = self.claims.get(token, event.attempt)
        self._must(granted == event.attempt, Rule.ATTEMPTS, f"attempt {event.attempt} runs, {granted} was claimed")
        first = self.runs.setdefault(token, run)
        self._must(first == run, Rule.RUNS_GRANTED, f"token {token} is run a second time")
        if event.what != "start":
            self._must((token, "start") in self.said, Rule.RUNS_GRANTED, f"a run under {token} ends without a start")
        if event.note == "accepted":
            late = token < self.fence
            self._must(not late, Rule.TOKEN_GROWS, f"the fence lets token {token} pass after {self.fence}")
            self.fence = max(self.fence, token)
        else:
            self.seen["refused"] += 1
            self._must(self.owner != token, Rule.TOKEN_GROWS, f"the fence keeps out the owner, token {token}")
        self.said.add((token, event.what))

    def _forgotten(self, event: Event, token: int) -> bool:
        """Whether the server may have forgotten this claim in a crash, before its worker has come to the job."""
        claimed = datetime.fromtimestamp((token >> 9) / 1e6, UTC)  # tokens are made of the server's clock
        return any(
            claimed - timedelta(seconds=1) <= crash <= min(claimed + FORGETTABLE, event.at) for crash in self.crashes
        )

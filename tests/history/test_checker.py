"""The checker itself, on histories made by hand: a good one passes, and each broken promise is named."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.history.checker import Checked, History, Rule, Verdict, Violation, check
from tests.history.nemesis import SECONDS, schedule
from tests.history.record import Event, Intent
from tests.history.soak import Sample, grown

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
JOB, KEY, MOST = 7, 1, 3
INTENTS = {KEY: Intent(JOB, "quick")}
NOT_YET = "tests.history.app.NotYet"


class Tale:
    """One job's history: every step is one event, or those of one transaction, a second after the last."""

    def __init__(self, *, inserted: bool = True) -> None:
        self.events: list[Event] = []
        self.leases: dict[int, list[tuple[int, datetime]]] = {}
        self.counts = {"live": 0, "archived": 0, "dead": 0}
        self._xid = 0
        if inserted:
            self.step("insert", attempt=0, lost=0)

    def step(self, what: str, *, together: bool = False, **facts: Any) -> Tale:
        self._xid += not together
        seq = len(self.events) + 1
        self.events.append(
            Event(seq, NOON + timedelta(seconds=self._xid), self._xid, JOB, KEY, what, **{"most": MOST, **facts})
        )
        return self

    def claim(self, token: int, attempt: int = 1, lost: int = 0, lease: float = 1.5) -> Tale:
        self.step("update", token=token, attempt=attempt, lost=lost)
        self.leases[token] = [(len(self.events), self.events[-1].at + timedelta(seconds=lease))]
        return self

    def says(self, what: str, token: int, attempt: int = 1, note: str = "accepted", run: int = 0) -> Tale:
        return self.step(what, token=token, attempt=attempt, note=note, run=run or token, pid=1)

    def run(self, token: int, attempt: int = 1, end: str = "end") -> Tale:
        return self.says("start", token, attempt).says(end, token, attempt)

    def back(self, token: int, attempt: int = 1, lost: int = 0, error: str | None = NOT_YET) -> Tale:
        return self.step("update", was=token, attempt=attempt, lost=lost, note=error)

    def archived(self, token: int | None, attempt: int = 1, lost: int = 0, state: str = "completed") -> Tale:
        self.counts["archived"] += 1
        self.step("delete", was=token, attempt=attempt, lost=lost)
        return self.step("archived", together=True, attempt=attempt, lost=lost, note=state)

    def dead(self, token: int | None, attempt: int = MOST, before: int = 0, lost: int = 0) -> Tale:
        self.counts["dead"] += 1
        self.step("delete", was=token, attempt=attempt, lost=before)
        return self.step("dead", together=True, attempt=attempt, lost=lost, note=NOT_YET)

    def checked(self, **facts: Any) -> Checked:
        over = any(self.counts.values()) or not self.events
        defaults = {
            "stories": [(JOB, self.events)] if self.events else [],
            "intents": INTENTS,
            "verdicts": {KEY: Verdict.COMMITTED},
            "leases": self.leases,
            "counts": self.counts if over else {"live": 1},
            "drained": over,
        }
        return check(History(**{**defaults, **facts}))


def good() -> Tale:
    """Lost once, failed once, done; a frozen worker comes back between, and is refused."""
    tale = Tale().claim(10).says("start", 10).back(10, lost=1, error="WorkerLost")
    tale.claim(20, 2, lost=1).says("start", 20, 2).says("end", 10, note="refused").says("fail", 20, 2)
    return tale.back(20, 2, lost=1).claim(30, 3, lost=1).run(30, 3).archived(30, 3, lost=1)


def dead() -> Tale:
    """Three attempts, all failed."""
    tale = Tale()
    for attempt in (1, 2, 3):
        tale.claim(10 * attempt, attempt).run(10 * attempt, attempt, "fail")
        if attempt < MOST:
            tale.back(10 * attempt, attempt)
    return tale.dead(30)


def rules(checked: Checked) -> list[Rule]:
    return [rule for rule in Rule if any(violation.rule is rule for violation in checked.violations)]


def test_a_life_with_a_loss_a_failure_and_a_refused_late_comer_breaks_nothing() -> None:
    checked = good().checked()
    assert checked.violations == []
    assert (checked.seen["claim"], checked.seen["rescue"], checked.seen["retry"], checked.seen["refused"]) == (
        3,
        1,
        1,
        1,
    )


def test_dead_letters_that_are_redriven_may_use_all_their_attempts_anew() -> None:
    tale = dead()
    assert tale.checked().violations == []
    tale.step("insert", attempt=0, lost=0).step("redriven", together=True)
    tale.counts["dead"] = 0
    assert tale.claim(40).run(40).archived(40).checked().violations == []


def test_a_claim_that_a_crash_forgot_may_run_but_not_one_made_long_before_or_after() -> None:
    crash = NOON + timedelta(seconds=2)
    for before, broken in ((0.5, []), (60, [Rule.RUNS_GRANTED]), (-1.5, [Rule.RUNS_GRANTED])):
        claimed = int((crash - timedelta(seconds=before)).timestamp() * 1e6) << 9
        later = claimed + 2**40
        tale = Tale().step("asked").run(claimed).claim(later).run(later).archived(later)
        assert rules(tale.checked(crashes=[crash])) == broken


def test_a_snoozed_job_gets_its_attempt_back_and_a_cancelled_one_was_asked_for() -> None:
    tale = Tale().claim(10).run(10, end="snooze").back(10, attempt=0)
    assert tale.step("asked").archived(None, 0, state="cancelled").checked().violations == []


def test_a_transaction_of_unknown_outcome_is_judged_by_its_business_row() -> None:
    unknown = {KEY: Verdict.UNKNOWN}
    assert good().checked(verdicts=unknown).violations == []
    assert Tale(inserted=False).checked(verdicts=unknown, intents={}).violations == []
    assert rules(Tale(inserted=False).checked(verdicts=unknown)) == [Rule.NOT_LOST]


def test_further_rules_see_the_events_of_each_job() -> None:
    seen: list[int] = []

    def rule(events: Sequence[Event]) -> list[Violation]:
        seen.append(len(events))
        return [Violation(Rule.ONE_OWNER, "of this rule", JOB)]

    assert rules(good().checked(rules=[rule])) == [Rule.ONE_OWNER]
    assert seen == [len(good().events)]


BROKEN: list[tuple[str, Tale, *tuple[Rule, ...]]] = [
    ("never there", Tale(inserted=False), Rule.NOT_LOST),
    (
        "deleted, and taken up nowhere",
        Tale().claim(10).run(10).step("delete", was=10, attempt=1, lost=0),
        Rule.NOT_LOST,
    ),
    (
        "archived and dead-lettered at once",
        Tale().claim(10).run(10).archived(10).step("dead", together=True, attempt=1, lost=0),
        Rule.NOT_LOST,
        Rule.OWNER_SETTLES,
        Rule.ATTEMPTS,
    ),
    ("back after its archival", good().step("insert", attempt=0, lost=0), Rule.NOT_LOST, Rule.LIVES_ON),
    ("two owners", Tale().claim(10).step("update", was=10, token=20, attempt=2, lost=0), Rule.ONE_OWNER),
    ("another owner than the last", Tale().claim(10).step("update", was=11, attempt=1, lost=1), Rule.ONE_OWNER),
    ("completed before its run", Tale().claim(10).archived(10).run(10), Rule.OWNER_SETTLES),
    (
        "completed by the one before",
        Tale()
        .claim(10)
        .says("start", 10)
        .back(10, lost=1)
        .claim(20, 2, lost=1)
        .says("end", 10)
        .archived(20, 2, lost=1),
        Rule.OWNER_SETTLES,
    ),
    (
        "completed by the one before, while nobody owned it",
        Tale().claim(10).run(10).back(10, lost=1).archived(None, 1, lost=1),
        Rule.OWNER_SETTLES,
    ),
    (
        "retried by the one before",
        Tale().claim(10).says("start", 10).back(10, lost=1).claim(20, 2, 1).says("fail", 10).back(20, 2, lost=1),
        Rule.OWNER_SETTLES,
    ),
    (
        "failed with what no task raises",
        Tale().claim(10).run(10, end="fail").back(10, error="ValueError"),
        Rule.OWNER_SETTLES,
    ),
    (
        "dead-lettered without a failure",
        Tale().claim(10, 3).says("start", 10, 3).dead(10),
        Rule.OWNER_SETTLES,
        Rule.ATTEMPTS,
    ),
    ("taken before the end of its lease", Tale().claim(10, lease=9.0).back(10, lost=1), Rule.LEASE_HELD),
    ("a smaller token", Tale().claim(10).run(10, end="fail").back(10).claim(9, 2), Rule.TOKEN_GROWS),
    ("an owner refused", Tale().claim(10).says("start", 10, note="refused"), Rule.TOKEN_GROWS),
    (
        "a late one accepted",
        Tale().claim(10).says("start", 10).back(10, lost=1).claim(20, 2, 1).says("start", 20, 2).says("end", 10),
        Rule.TOKEN_GROWS,
    ),
    ("a run without a claim", Tale().says("start", 10), Rule.RUNS_GRANTED),
    ("a claim run twice", Tale().claim(10).says("start", 10).says("start", 10, run=99), Rule.RUNS_GRANTED),
    ("an end without a start", Tale().claim(10).says("end", 10), Rule.RUNS_GRANTED),
    ("an attempt that is not counted", Tale().claim(10, attempt=0), Rule.ATTEMPTS),
    (
        "an attempt too many",
        Tale()
        .claim(1, 1, 0, 0)
        .back(1, 1, 1)
        .claim(2, 2, 1, 0)
        .back(2, 2, 2)
        .claim(3, 3, 2, 0)
        .back(3, 3, 3)
        .claim(4, 4, 3),
        Rule.ATTEMPTS,
    ),
    ("dead-lettered too early", Tale().claim(10).run(10, end="fail").dead(10, 1), Rule.ATTEMPTS),
    (
        "counts that change in place",
        Tale().claim(10).step("update", was=10, token=10, attempt=2, lost=0),
        Rule.ATTEMPTS,
    ),
    ("a run of another attempt", Tale().claim(10).says("start", 10, attempt=2), Rule.ATTEMPTS),
    ("cancelled unasked", Tale().archived(None, 0, state="cancelled"), Rule.ASKED),
]


@pytest.mark.parametrize("broken", BROKEN, ids=[broken[0] for broken in BROKEN])
def test_a_broken_promise_is_named_with_the_history_that_shows_it(broken: tuple[str, Tale, *tuple[Rule, ...]]) -> None:
    _, tale, *expected = broken
    checked = tale.checked()
    assert rules(checked) == expected
    for violation in checked.violations:
        shown = str(violation).splitlines()[1:]
        assert len(shown) == (len(tale.events) + 1 if violation.job_id == JOB else 0)


def test_what_is_live_when_everything_should_have_drained_is_named() -> None:
    assert rules(Tale().checked(drained=True)) == [Rule.LIVES_ON]


def test_a_job_whose_transaction_was_rolled_back_must_not_exist() -> None:
    checked = good().checked(intents={}, verdicts={KEY: Verdict.ROLLED_BACK})
    assert Rule.NOT_INVENTED in rules(checked)
    assert "rolled back" in str(checked.violations[0])


def test_a_business_row_must_not_survive_a_rollback_nor_a_commit_lose_it() -> None:
    assert rules(good().checked(verdicts={KEY: Verdict.ROLLED_BACK})) == [Rule.NOT_INVENTED]
    gone = Tale(inserted=False).checked(intents={})
    assert rules(gone) == [Rule.NOT_LOST]


def test_two_jobs_for_one_business_row_are_one_too_many() -> None:
    tale = good()
    other = [event._replace(job_id=8) for event in tale.events]
    found = tale.checked(stories=[(JOB, tale.events), (8, other)], counts={"live": 0, "archived": 2, "dead": 0})
    assert Rule.NOT_INVENTED in rules(found)


def test_the_tables_must_hold_what_the_histories_say() -> None:
    assert rules(good().checked(counts={"live": 0, "archived": 0, "dead": 1})) == [Rule.NOT_LOST]


def test_the_same_seed_makes_the_same_schedule_and_sixty_seconds_hold_every_strike() -> None:
    assert schedule(3, 60, SECONDS) == schedule(3, 60, SECONDS) != schedule(4, 60, SECONDS)
    for seed in range(20):
        strikes = schedule(seed, 60, SECONDS)
        assert {strike.name for strike in strikes} == set(SECONDS)
        assert strikes[-1].at + strikes[-1].seconds <= 60


def test_what_grows_in_the_last_third_of_a_soak_is_named() -> None:
    flat = [Sample("sessions", 20.0)] * 30 + [Sample("memory", 5e7 + n * 1e4) for n in range(30)]
    assert grown(flat) == []
    [complaint] = grown([*flat, *(Sample("dead rows", n * 1e4) for n in range(30))])
    assert complaint.startswith("dead rows grow")

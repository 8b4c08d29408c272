"""Schedules: writing what the code says, the ticks, and what operators do with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pgqueue import cron as crons
from pgqueue.errors import ConfigurationError, UnknownSchedule
from pgqueue.ops import Op, Rows, Step, Texts
from pgqueue.schedule import Definition, Rhythm, rhythm

NOTICE = "schedules changed"
"""What a listener hears when a schedule was added, changed or resumed."""
AFFIRM_EVERY = 20.0
GONE = 60.0
"""Seconds without a process that says the same, after which a definition has no advocate any more."""
FORGET = 30 * 86400.0
BATCH = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule as an operator sees it.

    `state`: ticking, paused, or "not in code": it comes from code, but no worker whose code has it was seen for a minute,
    so it does not tick. `next_at` is None unless it ticks. `last_at` is the tick that last made a job, `last_job_id` the
    last job.
    """

    name: str
    task: str
    queue: str
    cron: str | None
    every: float | None
    tz: str
    missed: str
    grace: float
    overlap: bool
    priority: int
    state: str
    in_code: bool
    paused_at: datetime | None
    next_at: datetime | None
    last_at: datetime | None
    last_job_id: int | None


class Ticked(NamedTuple):
    """What came of the due ticks of one schedule: the jobs, the last tick among them, and how late that was, in seconds.

    `missed` ticks were left out by the policy (at most cron.MOST_TICKS are counted), `overlapping` ones since a job lived.
    """

    name: str
    task: str
    ids: list[int]
    tick: datetime | None
    late: float
    missed: int
    overlapping: int


@dataclass(slots=True)
class Round:
    """A look at what is due. `passed`: what somebody else ticked, changed or holds. `failed`: what cannot be read, and why.

    `next_in`: seconds until the next look is worth it; None when nothing is to be waited for.
    """

    next_in: float | None = None
    ticked: list[Ticked] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class _Due(NamedTuple):
    """A row of schedule_due."""

    name: str
    task: str
    cron: str | None
    every: float | None
    tz: str
    missed: str
    grace: float
    overlap: bool
    version: int
    starts_at: datetime | None
    ticked_to: datetime | None
    now: datetime

    def plan(self) -> crons.Plan:
        """ValueError or OverflowError where the row, written by hand or by a later release, cannot be understood here."""
        if self.starts_at is None or self.ticked_to is None:
            raise ConfigurationError("its times are beyond the years of Python")
        timing = _timing(self.cron, self.every, self.tz, self.starts_at)
        missed = crons.validate_missed(self.missed)
        return crons.plan(timing, _utc(self.ticked_to), _utc(self.now), missed=missed, grace=self.grace)


def tick(names: Sequence[str], *, left_out: Sequence[str] = (), channel: str | None = None) -> Op[Round]:
    """Make the jobs of the ticks that are due, of schedules made at run time and of those of the code that are named.

    One statement when nothing is due. Each schedule is a statement, and so a transaction, of its own.
    """
    chosen = {"names": Texts(names), "left_out": Texts(left_out)}
    rows = yield Step("schedule_next", chosen)
    found = Round(next_in=rows[0][0] if rows else None)
    if found.next_in is None or found.next_in > 0:
        return found
    found.next_in = 0.0
    for row in (yield Step("schedule_due", {**chosen, "limit": BATCH})):
        due = _Due(*row)
        try:
            plan = due.plan()
        except (ValueError, OverflowError) as error:  # ConfigurationError among them
            found.failed[due.name] = str(error)
            continue
        wanted = plan.ticks if due.overlap else plan.ticks[-1:]
        rows = yield Step("schedule_tick", _marks(due, plan, wanted, channel))
        if rows:
            found.ticked.append(_ticked(due, plan, wanted, rows[0][0]))
        else:
            found.passed.append(due.name)
    return found


def define(definitions: Mapping[str, Definition]) -> Op[list[str]]:
    """Write what the code says, where it says something new; returns the names that were written."""
    prints = {name: definition.fingerprint() for name, definition in definitions.items()}
    params = {"names": Texts(prints), "definitions": Texts(prints.values()), "often": AFFIRM_EVERY / 2, "gone": GONE}
    written = []
    for (name,) in (yield Step("schedule_affirm", params)):
        step = Step("schedule_define", {**definitions[name].params(), "definition": prints[name], "gone": GONE})
        written += [row[0] for row in (yield step)]
    return written


def forget() -> Op[list[str]]:
    """Delete what no code has said for thirty days; returns the names."""
    rows = yield Step("schedule_forget", {"after": FORGET})
    return [row[0] for row in rows]


def schedules(names: Sequence[str] | None = None) -> Op[list[Schedule]]:
    """All schedules by name, or those."""
    rows = yield Step("schedule_list", {"names": None if names is None else Texts(names), "gone": GONE})
    return [_schedule(row) for row in rows]


def add(definition: Definition, *, channel: str | None) -> Op[bool]:
    """A schedule made at run time, or made anew; False when it is there already. ConfigurationError for one of the code."""
    rows = yield Step("schedule_add", {**definition.params(), "channel": channel, "notice": NOTICE})
    if rows:
        return True
    [found] = yield from _found(definition.name)
    if found.in_code:
        raise ConfigurationError(
            f"schedule {definition.name!r} comes from code: change it there, or its timing with change_schedule"
        )
    return False


def change(name: str, changes: Mapping[str, Any], *, channel: str | None) -> Op[None]:
    """Other timing or policies. In one transaction."""
    rows = yield from _one(Step("schedule_lock", {"name": name}))
    old = dict(zip(Rhythm.__dataclass_fields__, rows[0], strict=True))
    new = dict(changes)
    if new.get("cron") is not None:
        new.setdefault("every", None)
    if new.get("every") is not None:
        new = {"cron": None, "tz": "UTC", **new}
    changed = rhythm(**{**old, **new})
    params = {part: getattr(changed, part) for part in Rhythm.__dataclass_fields__}
    yield Step("schedule_change", {"name": name, **params, "channel": channel, "notice": NOTICE})


def pause(name: str) -> Op[None]:
    """No ticks until it is resumed."""
    yield from _one(Step("schedule_pause", {"name": name}))


def resume(name: str, *, channel: str | None) -> Op[None]:
    """Tick again, from now on."""
    yield from _one(Step("schedule_resume", {"name": name, "channel": channel, "notice": NOTICE}))


def run(name: str, *, channel: str | None) -> Op[int | None]:
    """One job now; None when overlap is unwanted and the last one lives. In one transaction."""
    yield from _one(Step("schedule_lock", {"name": name}))
    rows = yield Step("schedule_run", {"name": name, "channel": channel})
    return int(rows[0][0]) if rows else None


def remove(name: str) -> Op[None]:
    """Delete it; ConfigurationError while live code has it."""
    rows = yield Step("schedule_remove", {"name": name, "gone": GONE})
    if not rows:
        yield from _found(name)
        raise ConfigurationError(
            f"schedule {name!r} is in the code of live workers, which would write it again: pause it"
        )


def _one(step: Step) -> Op[Rows]:
    """The answer of a statement about one schedule; UnknownSchedule names near matches."""
    rows = yield step
    if not rows:
        yield from _found(step.params["name"])
    return rows


def _found(name: str) -> Op[list[Schedule]]:
    found = yield from schedules([name])
    if not found:
        known = [schedule.name for schedule in (yield from schedules())]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; similar: {', '.join(near)}" if near else f"; known are {', '.join(known[:10])}" if known else ""
        raise UnknownSchedule(f"there is no schedule {name!r}{hint}")
    return found


def _marks(due: _Due, plan: crons.Plan, wanted: Sequence[datetime], channel: str | None) -> dict[str, Any]:
    return {
        "name": due.name,
        "version": due.version,
        "seen": due.ticked_to,
        "ticks": Texts(tick.isoformat() for tick in wanted),
        "ticked_to": plan.ticked_to,
        "next_at": plan.next_at,
        "channel": channel,
    }


def _ticked(due: _Due, plan: crons.Plan, wanted: Sequence[datetime], ids: list[int]) -> Ticked:
    last = wanted[-1] if ids else None
    return Ticked(
        name=due.name,
        task=due.task,
        ids=ids,
        tick=last,
        late=0.0 if last is None else (due.now - last).total_seconds(),
        missed=plan.skipped,
        overlapping=len(plan.ticks) - len(ids),
    )


def _schedule(row: Sequence[Any]) -> Schedule:
    *facts, state, in_code, starts_at, ticked_to, paused_at, last_at, last_job_id, now = row
    names = ("name", "task", "queue", *Rhythm.__dataclass_fields__, "priority")
    schedule = Schedule(
        **dict(zip(names, facts, strict=True)),
        state=state,
        in_code=in_code,
        paused_at=paused_at,
        next_at=None,
        last_at=last_at,
        last_job_id=last_job_id,
    )
    if state != "ticking" or starts_at is None or ticked_to is None:
        return schedule
    try:
        timing = _timing(schedule.cron, schedule.every, schedule.tz, starts_at)
    except ConfigurationError:
        return schedule
    return replace(schedule, next_at=timing.after(max(_utc(ticked_to), _utc(now))))


def _timing(cron: str | None, every: float | None, tz: str, starts_at: datetime) -> crons.Timing:
    if cron is not None and every is None:
        return crons.Cron(cron, tz)
    return crons.timing(cron, every, "UTC" if cron is None else tz, _utc(starts_at))


def _utc(time: datetime) -> datetime:
    return time.astimezone(UTC)

"""Which measurements there are, with their targets. A measurement's name is what `--only` takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pgqueue.bench import bare, claimers, drain, enqueue, growth, latency, life_cycle, snapshot
from pgqueue.bench.app import ASYNC, PLAIN
from pgqueue.bench.values import Case, Comparison, Key, Metrics

OURS, FLOOR = "pgqueue", "floor"
SINGLE, BULK = "one by one, durable", "in bulk of 100,000"
RATES = (20, 500)
PLAIN_ONE = "plain, 1 process, archive"
PLAIN_NO_ARCHIVE = "plain, 1 process, no archive"
PLAIN_LIMITED = "plain, 1 process, archive, within limits"
RAW_LOOP = "claim and complete, batches of 100, no archive"
BULKS = (10, 1000, 100_000)
APART = max(claimers.NUMBERS)


def _case(measurement: str, variant: str, run: Callable[..., Metrics], *args: object, **options: object) -> Case:
    system = str(options.pop("system", OURS))
    rounds = options.pop("rounds", None)
    curve = bool(options.pop("curve", False))
    bound = lambda stage: run(stage, *args, **options)  # noqa: E731 - the stage comes first, the rest is fixed here
    return Case(
        measurement=measurement,
        system=system,
        variant=variant,
        run=bound,
        rounds=rounds if isinstance(rounds, int) else None,
        curve=curve,
    )


def _enqueue() -> list[Case]:
    case = partial(_case, "enqueue")
    return [
        case(SINGLE, enqueue.one_by_one),
        case(SINGLE, enqueue.bare_insert, system=FLOOR),
        case("one by one in a transaction", enqueue.in_transaction),
        *(case(f"in bulk of {size:,}", enqueue.bulk, size) for size in BULKS),
        case(BULK, enqueue.bare_copy, BULKS[-1], system=FLOOR),
    ]


def _life_cycle() -> list[Case]:
    case = partial(_case, "life-cycle")
    return [
        *(case(f"batches of {batch}, archive", life_cycle.life_cycle, batch) for batch in life_cycle.BATCHES),
        case("batches of 100, no archive", life_cycle.life_cycle, 100, archive=False),
        case("three bare statements, batches of 100", bare.bare_life_cycle, 100, system=FLOOR),
    ]


def _drain() -> list[Case]:
    case = partial(_case, "drain")
    return [
        case(PLAIN_ONE, drain.drain, PLAIN),
        case(PLAIN_NO_ARCHIVE, drain.drain, PLAIN, archive=False),
        case(PLAIN_LIMITED, drain.drain, PLAIN, limited=True),
        case(RAW_LOOP, life_cycle.claim_and_complete, 100, system=FLOOR),
        case("claim and complete, batches of 1000, no archive", life_cycle.claim_and_complete, 1000, system=FLOOR),
        case("plain, 2 processes, archive", drain.drain, PLAIN, processes=2),
        case("async, 1 process, archive", drain.drain, ASYNC),
        case("async, 2 processes, archive", drain.drain, ASYNC, processes=2),
    ]


def _latency() -> list[Case]:
    return [
        _case("latency", f"{rate}/s", run, rate, system=system)
        for rate in RATES
        for system, run in ((OURS, latency.latency), (FLOOR, latency.floor))
    ]


def _snapshot() -> list[Case]:
    case = partial(_case, "snapshot")
    return [
        case("life cycle, batches of 100, snapshot held", snapshot.life_cycle_under_snapshot),
        case("life cycle, batches of 100, none held", snapshot.life_cycle_under_snapshot, held=False, rounds=1),
        case("worker drain, snapshot held", drain.drain_under_snapshot),
        case("worker drain, none held", drain.drain_under_snapshot, held=False, rounds=1),
    ]


def _growth() -> list[Case]:
    curves = [_case("growth", curve.name, growth.measure, curve, rounds=1, curve=True) for curve in growth.CURVES]
    many = [_case("claimers", f"{number} claimers", claimers.claimers, number) for number in claimers.NUMBERS]
    alone = _case("claimers", f"{APART} claimers, a queue each", claimers.claimers, APART, apart=True, system=FLOOR)
    return [*curves, *many, alone]


def cases() -> list[Case]:
    """All cases of pgqueue itself."""
    return [
        *_enqueue(),
        *_life_cycle(),
        *_drain(),
        _case("steady", f"{latency.STEADY_RATE}/s in batches of {latency.STEADY_BATCH}", latency.steady),
        *_latency(),
        _case("idle", "one worker, one queue", latency.idle, rounds=1),
        *_snapshot(),
        _case("hint", "claims behind dead rows", snapshot.hint, rounds=1),
        _case("statements", "a worker that drains", drain.drain_counting_statements, rounds=1),
        *_growth(),
        _case("retries", "10 % fail once, 1 % for good", drain.retries),
        _case("footprint", "archive", life_cycle.footprint, archive=True),
        _case("footprint", "no archive", life_cycle.footprint, archive=False),
    ]


def comparisons() -> list[Comparison]:
    """The targets that need no peer."""
    return [*_rates(), *_waiting(), *_flatness()]


def _rates() -> list[Comparison]:
    def key(measurement: str, variant: str, system: str = OURS) -> Key:
        return _key(measurement, variant, "jobs/s", system)

    bare, ours = key("enqueue", SINGLE, FLOOR), key("enqueue", SINGLE)
    worker, loop = key("drain", PLAIN_NO_ARCHIVE), key("drain", RAW_LOOP, FLOOR)
    many, few = key("claimers", "64 claimers"), key("claimers", "4 claimers")
    apart = key("claimers", f"{APART} claimers, a queue each", FLOOR)
    return [
        _target("enqueue: pgqueue's time / a bare INSERT's", bare, ours, 1.3, 1.1, at_most=True),
        _target("bulk enqueue / a bare COPY", key("enqueue", BULK), key("enqueue", BULK, FLOOR), 0.8, 0.9),
        _target("drain without archive / the raw loop", worker, loop, 0.6, 0.8),
        _target(
            "drain within limits that do not bind / without",
            key("drain", PLAIN_LIMITED),
            key("drain", PLAIN_ONE),
            0.8,
            0.9,
        ),
        _target("64 claimers / 4", many, few, 0.7, 0.9),
        _target("64 claimers on one queue / on a queue each", many, apart, 0.0, 0.9),
    ]


def _waiting() -> list[Comparison]:
    ours, floor = _key("latency", "20/s", "p50 ms"), _key("latency", "20/s", "p50 ms", FLOOR)
    statements = _key("idle", "one worker, one queue", "statements/s")
    processor = _key("idle", "one worker, one queue", "% of a core")
    return [
        _target("latency at 20/s, p50 / the floor's", ours, floor, 0.0, 1.5, at_most=True),
        _target("latency at 20/s, p99 / p50", _key("latency", "20/s", "p99 / p50"), None, 5.0, 5.0, at_most=True),
        _target("idle, statements/s", statements, None, 1.0, 0.3, at_most=True),
        _target("idle, % of a core", processor, None, 0.5, 0.5, at_most=True),
        _target("HOT claims, %", _key("footprint", "archive", "HOT %"), None, 95.0, 99.0),
    ]


def _flatness() -> list[Comparison]:
    """That cost follows work, not history."""
    targets = []
    for part in ("life cycle, batches of 100", "worker drain"):
        key = _key("snapshot", f"{part}, snapshot held", "last / first tenth")
        targets.append(_target(f"old snapshot, {part}: last tenth / first", key, None, 0.9, 1.0))
    for curve in growth.CURVES:
        if curve.name != "payload bytes":
            key = _key("growth", curve.name, growth.FAR_OVER_NEAR)
            targets.append(_target(f"claim cost, {curve.name}: far / near", key, None, 1.3, 1.1, at_most=True))
    return targets


def _key(measurement: str, variant: str, metric: str, system: str = OURS) -> Key:
    return Key(measurement, system, variant, metric)


def _target(label: str, over: Key, under: Key | None, must: float, goal: float, *, at_most: bool = False) -> Comparison:
    return Comparison(label=label, over=over, under=under, must=must, goal=goal, at_most=at_most)


def measurements(all_cases: Sequence[Case]) -> list[str]:
    """Their names, in order."""
    return list(dict.fromkeys(case.measurement for case in all_cases))

"""What is measured of the peers, and the targets that compare pgqueue with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

from benchmarks.peers import redis_list, redis_streams
from benchmarks.peers.base import Peer, Session
from pgqueue.bench import drain, latency, suite
from pgqueue.bench.errors import Miscount
from pgqueue.bench.life_cycle import number_of_jobs
from pgqueue.bench.stage import Stage
from pgqueue.bench.values import Case, Comparison, Key, Metrics

RATE = "jobs/s"
WORKER = "one worker process"
UNDER_SNAPSHOT = "worker drain, snapshot held"
BATCH = 100
FSYNCS = {"everysec": "AOF every second", "always": "AOF always"}


def cases(peers: Sequence[Peer]) -> list[Case]:
    """All cases of these peers."""
    found: list[Case] = []
    for peer in peers:
        found += _common(peer)
        if isinstance(peer, redis_streams.RedisStreams) and peer.single:
            found += _life_cycles(peer, redis_streams.life_cycle)
        if isinstance(peer, redis_list.RedisList):
            found += _life_cycles(peer, redis_list.life_cycle)
    return found


def _life_cycles(peer: Peer, run: Callable[[str, int, int], Metrics]) -> list[Case]:
    return [
        Case(
            measurement="life-cycle",
            system=peer.name,
            variant=f"batches of {BATCH}, {words}",
            run=_cycle(run, fsync),
        )
        for fsync, words in FSYNCS.items()
    ]


def _cycle(run: Callable[[str, int, int], Metrics], fsync: str) -> Callable[[Stage], Metrics]:
    return lambda stage: run(fsync, number_of_jobs(stage, BATCH), BATCH)


def _latency(peer: Peer, rate: float) -> Callable[[Stage], Metrics]:
    return lambda stage: waits(peer, stage, rate)


def _common(peer: Peer) -> list[Case]:
    def case(measurement: str, variant: str, run: Callable[[Stage], Metrics], rounds: int | None = None) -> Case:
        return Case(measurement=measurement, system=peer.name, variant=variant, run=run, rounds=rounds)

    found = [case("drain", WORKER, lambda stage: drained(peer, stage))]
    found.append(case("enqueue", "in bulk", lambda stage: bulk(peer, stage)))
    if peer.on_postgres:
        found.append(case("snapshot", UNDER_SNAPSHOT, lambda stage: drained(peer, stage, held=True)))
    if peer.single:
        found.append(case("enqueue", suite.SINGLE, lambda stage: one_by_one(peer, stage)))
        found.append(case("idle", WORKER, lambda stage: idle(peer, stage), rounds=1))
        found += [case("latency", f"{rate}/s", _latency(peer, rate)) for rate in suite.RATES]
    return found


def drained(peer: Peer, stage: Stage, *, held: bool = False) -> Metrics:
    """One worker process on jobs that were enqueued before."""
    number = stage.jobs(peer.drain_jobs * (2 if held else 1))
    with peer.open(stage) as session:
        session.enqueue_many(number)
        stage.settle()
        with _snapshot(session) if held else nullcontext():
            rate, tenths = drain.timed(session.words(), session.environment(), number, session.empty)
    return {RATE: rate, **({"last / first tenth": tenths[-1] / tenths[0]} if held else {})}


def _snapshot(session: Session) -> AbstractContextManager[None]:
    return drain.old_snapshot(session.postgres_url or "")


def bulk(peer: Peer, stage: Stage) -> Metrics:
    """Its fastest documented way to enqueue many jobs."""
    number = stage.jobs(peer.drain_jobs)
    with peer.open(stage) as session:
        stage.settle()
        began = perf_counter()
        session.enqueue_many(number)
        return {RATE: number / (perf_counter() - began)}


def one_by_one(peer: Peer, stage: Stage) -> Metrics:
    """Job by job from one producer."""
    number = stage.jobs(3000)
    with peer.open(stage) as session:
        session.enqueue_one(0)
        if session.empty():
            raise Miscount("a job was enqueued and is not there")
        began = perf_counter()
        session.enqueue_each(number)
        return {RATE: number / (perf_counter() - began)}


def waits(peer: Peer, stage: Stage, rate: float) -> Metrics:
    """From the return of the enqueue call to the start of the handler."""
    with peer.open(stage) as session:
        return latency.measured(
            session.words(), session.environment(), session.enqueue_one, rate=rate, seconds=stage.seconds
        )


def idle(peer: Peer, stage: Stage) -> Metrics:
    """A worker with nothing to do."""
    with peer.open(stage) as session:
        url = session.postgres_url
        if url is not None:
            latency.count_from_now(url)
        session.enqueue_one(0)
        return latency.watch_idle(session.words(), session.environment(), url, session.empty)


def comparisons(peers: Sequence[Peer]) -> list[Comparison]:
    """The targets against peers."""
    single = Key("enqueue", suite.OURS, suite.SINGLE, RATE)
    bulked = Key("enqueue", suite.OURS, suite.BULK, RATE)
    cycle = Key("life-cycle", suite.OURS, f"batches of {BATCH}, archive", RATE)
    work = Key("drain", suite.OURS, suite.PLAIN_ONE, RATE)
    targets = [
        _target("life cycle / Redis Streams, AOF every second", cycle, _streams("everysec"), 1.2, 1.5),
        _target("life cycle / Redis Streams, AOF always", cycle, _streams("always"), 2.5, 3.0),
        _target("drain / pgqueuer", work, _drain("pgqueuer"), 3.0, 5.0),
        _target("drain / dramatiq", work, _drain("dramatiq"), 6.0, 12.0),
        _target("drain / graphile-worker", work, _drain("graphile-worker"), 1.0, 1.5),
        _target("drain / bare Redis Streams consumer, AOF always", work, _drain("redis-streams"), 0.0, 1.0),
        _target("enqueue one by one / pgqueuer", single, Key("enqueue", "pgqueuer", suite.SINGLE, RATE), 1.5, 1.5),
        _target("bulk enqueue / graphile-worker", bulked, Key("enqueue", "graphile-worker", "in bulk", RATE), 1.5, 2.0),
    ]
    for peer in peers:
        if peer.on_postgres and peer.single:
            theirs = Key("latency", peer.name, "20/s", "p50 ms")
            ours = Key("latency", suite.OURS, "20/s", "p50 ms")
            targets.append(_target(f"latency at 20/s, p50 / {peer.name}", ours, theirs, 1.0, 1.0, at_most=True))
    return targets


def _streams(fsync: str) -> Key:
    return Key("life-cycle", "redis-streams", f"batches of {BATCH}, {FSYNCS[fsync]}", RATE)


def _drain(system: str) -> Key:
    return Key("drain", system, WORKER, RATE)


def _target(label: str, over: Key, under: Key, must: float, goal: float, *, at_most: bool = False) -> Comparison:
    return Comparison(label=label, over=over, under=under, must=must, goal=goal, at_most=at_most)

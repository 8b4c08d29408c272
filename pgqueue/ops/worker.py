"""A worker's own row, and the heartbeat of its leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import orjson

from pgqueue.ops import Int8s, Op, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a worker's row says of it. `name` is only a label: the id is new at every start of a process."""

    name: str
    hostname: str
    pid: int
    version: str
    queues: list[str]
    concurrency: int
    lease: float


def register(identity: Identity) -> Op[int]:
    """A new worker row; returns its id."""
    rows = yield Step("worker_register", asdict(identity))
    return int(rows[0][0])


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCircuit:
    """A task whose jobs, in this queue, a worker does not claim for now, since its attempts keep failing.

    `reason` is the class of the exception. `failures` attempts in a row failed; the circuit is open for `seconds`, and a
    single job is tried `pause` seconds after the last one.
    """

    queue: str
    task: str
    reason: str
    failures: int
    seconds: float
    pause: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a beat says of the worker: attempts completed since its start, by queue, and what it holds back now."""

    completed: Mapping[str, int] = field(default_factory=dict)
    circuits: Sequence[OpenCircuit] = ()


def beat(worker_id: int, identity: Identity, report: Report) -> Op[None]:
    """The worker lives; a row that was pruned comes back."""
    circuits = [asdict(circuit) for circuit in report.circuits]
    params = {
        "worker_id": worker_id,
        **asdict(identity),
        "completed": orjson.dumps(dict(report.completed)).decode(),
        "circuits": orjson.dumps(circuits).decode() if circuits else None,
    }
    yield Step("worker_beat", params)


class Peer(NamedTuple):
    """What another worker has completed of a queue since its start. `sound`: it lives, and holds back no task there."""

    worker_id: int
    queue: str
    completed: int
    sound: bool


def peers(worker_id: int, queues: Sequence[str]) -> Op[list[Peer]]:
    """What all other workers have completed of these queues."""
    rows = yield Step("worker_peers", {"worker_id": worker_id, "queues": list(queues)})
    return [Peer(*row) for row in rows]


class Beat(NamedTuple):
    """A lease that is still ours.

    `extended`: it was, now; otherwise somebody locks its row: ask again soon. `cancelled`: its jobs that shall be cancelled.
    `superseded`: those for whose end a newer job of their key waits.
    """

    extended: bool
    cancelled: list[int]
    superseded: list[int]


def beat_leases(worker_id: int, queue: str, leases: Sequence[int], *, lease: float) -> Op[dict[int, Beat]]:
    """Extend leases of one queue; returns those that are still ours."""
    rows = yield Step("lease_beat", {"worker_id": worker_id, "queue": queue, "leases": Int8s(leases), "lease": lease})
    return {token: Beat(*facts) for token, *facts in rows}


def leave(worker_id: int) -> Op[None]:
    """The worker is gone of its own will."""
    yield Step("worker_leave", {"worker_id": worker_id})


def hello(channel: str, worker_id: int) -> Op[None]:
    """Say something to one's own listener."""
    yield Step("worker_hello", {"channel": channel, "worker_id": worker_id})


def prune() -> Op[None]:
    """Remove the rows of workers that were not seen for very long."""
    yield Step("worker_prune", {})


def schema_version() -> Op[tuple[str | None, str | None]]:
    """The revision of the schema as the migrations left it, and their note about older workers; for `version.runs_on`."""
    rows = yield Step("schema_version", {})
    return (rows[0][0], rows[0][1]) if rows else (None, None)

"""Which peers there are. `ALL` is the order in which they take their turns."""

from __future__ import annotations

from benchmarks.peers import (
    celery_peer,
    dramatiq_peer,
    graphile_peer,
    huey_peer,
    pgboss_peer,
    pgqueuer_peer,
    procrastinate_peer,
    redis_list,
    redis_streams,
    rq_peer,
)
from benchmarks.peers.base import Peer

ALL: tuple[Peer, ...] = (
    redis_streams.RedisStreams(),
    redis_streams.RedisStreams("redis-streams-1000", 1000, single=False),
    pgqueuer_peer.Pgqueuer(),
    dramatiq_peer.Dramatiq(),
    redis_list.RedisList(),
    procrastinate_peer.Procrastinate(),
    huey_peer.Huey(),
    rq_peer.Rq(),
    celery_peer.Celery(),
    graphile_peer.Graphile(),
    pgboss_peer.PgBoss(),
)

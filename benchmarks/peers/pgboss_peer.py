"""pg-boss on node: its fetch and complete in a loop, since its own worker polls at most twice a second."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import psycopg

from benchmarks import node
from benchmarks.peers.base import Session
from benchmarks.peers.graphile_peer import install, node_url
from benchmarks.peers.node_peer import NodePeer
from pgqueue.bench.errors import Miscount, Skipped
from pgqueue.bench.stage import query

PACKAGE, SCRIPT = "pg-boss", "pgboss.cjs"


class PgBossSession(Session):
    """Filled by its own program."""

    def __init__(self, url: str, connection: psycopg.Connection) -> None:
        self.postgres_url = url
        self.url = node_url(url)
        self._connection = connection
        install(SCRIPT, self.url)

    def enqueue_many(self, number: int) -> None:
        """insert, a thousand at a time."""
        environment = {**os.environ, **node.environment(self.url)}
        words = node.words(SCRIPT, "fill", str(number))
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise Miscount(f"enqueue failed: {done.stderr.strip()[-300:]}")

    def enqueue_one(self, number: int) -> object:
        """Not measured."""
        raise Skipped("its producer is another program")

    def empty(self) -> bool:
        """Everything is completed."""
        left = "SELECT NOT EXISTS (SELECT 1 FROM pgboss.job WHERE name = 'bench' AND state < 'completed')"
        return bool(query(self._connection, left)[0][0])

    def words(self) -> list[str]:
        """The script beside this file."""
        return node.words(SCRIPT)

    def environment(self) -> Mapping[str, str]:
        """The packages too."""
        return node.environment(self.url)


class PgBoss(NodePeer):
    """Only drain and bulk."""

    name = "pg-boss"
    distribution = "pg-boss"
    drain_jobs = 30_000
    single = False
    configuration: Mapping[str, str] = {"worker": "1 process, fetch and complete in batches of 1000, no polling pause"}
    session = PgBossSession

"""graphile-worker on node, with its local queue."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import orjson
import psycopg

from benchmarks import node
from benchmarks.peers.base import Session
from benchmarks.peers.node_peer import NodePeer
from pgqueue.bench.app import message
from pgqueue.bench.errors import Skipped
from pgqueue.bench.stage import query

PACKAGE, SCRIPT = "graphile-worker", "graphile_worker.cjs"
CHUNK = 5000
ADD_JOB = "SELECT graphile_worker.add_job('stamp', payload := %s::json)"
ADD_JOBS = (
    "SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(SELECT ROW('count', payload::json, NULL, NULL, NULL, NULL, NULL, "
    "NULL)::graphile_worker.job_spec FROM unnest(%b::text[]) AS given(payload)))"
)


class GraphileSession(Session):
    """A producer with one connection."""

    def __init__(self, url: str, connection: psycopg.Connection) -> None:
        self.postgres_url = url
        self.url = node_url(url)
        self._connection = connection
        install(SCRIPT, self.url)

    def enqueue_many(self, number: int) -> None:
        """add_jobs."""
        for begin in range(0, number, CHUNK):
            payloads = [orjson.dumps(message(n)).decode() for n in range(begin, min(number, begin + CHUNK))]
            self._connection.execute(ADD_JOBS, [payloads])

    def enqueue_one(self, number: int) -> object:
        """add_job."""
        return self._connection.execute(ADD_JOB, [orjson.dumps({"number": number}).decode()])

    def empty(self) -> bool:
        """Its table is."""
        return bool(query(self._connection, "SELECT NOT EXISTS (SELECT 1 FROM graphile_worker.jobs)")[0][0])

    def words(self) -> list[str]:
        """The script beside this file."""
        return node.words(SCRIPT)

    def environment(self) -> Mapping[str, str]:
        """The packages too."""
        return node.environment(self.url)


def node_url(url: str) -> str:
    """The same database in the words of node's pg."""
    from urllib.parse import quote

    parts = psycopg.conninfo.conninfo_to_dict(url)
    login = quote(str(parts.get("user") or "postgres"))
    if parts.get("password"):
        login += ":" + quote(str(parts["password"]), safe="")
    host = str(parts.get("host") or "localhost")
    if host.startswith("/"):
        return (
            f"socket://{login}@{host}?db={parts['dbname']}"
            if parts.get("port") in (None, "5432")
            else _by_port(login, host, parts)
        )
    return f"postgresql://{login}@{host}:{parts.get('port') or 5432}/{parts['dbname']}"


def _by_port(login: str, host: str, parts: Mapping[str, object]) -> str:
    from urllib.parse import quote

    return f"postgresql://{login}@localhost:{parts['port']}/{parts['dbname']}?host={quote(host, safe='')}"


def install(script: str, url: str) -> None:
    """Make a peer's tables."""
    done = subprocess.run(
        node.words(script, "install"), env=_environment(url), capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise Skipped(f"its schema cannot be made: {(done.stderr or done.stdout).strip()[-300:]}")


def _environment(url: str) -> dict[str, str]:
    import os

    return {**os.environ, **node.environment(url)}


class Graphile(NodePeer):
    """Enqueued by its documented SQL functions, over psycopg."""

    name = "graphile-worker"
    distribution = "graphile-worker"
    drain_jobs = 100_000
    configuration: Mapping[str, str] = {
        "worker": "1 process, concurrentJobs 24, maxPoolSize 25, localQueue 500, completeJobBatchDelay 0, LISTEN/NOTIFY",
        "enqueue": f"add_job and add_jobs in chunks of {CHUNK}, psycopg",
    }
    session = GraphileSession

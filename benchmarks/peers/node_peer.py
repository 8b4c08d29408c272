"""What the peers on node share: installed by npm, in a database of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from benchmarks import node
from benchmarks.peers.base import Peer, Session
from pgqueue.bench.stage import Stage


class NodePeer(Peer):
    """A peer whose worker is a node program; `distribution` is its npm package."""

    on_postgres = True
    session: Callable[[str, psycopg.Connection[Any]], Session]

    def missing(self) -> str | None:
        """Installs it with npm."""
        return node.missing(self.distribution)

    def settings(self) -> dict[str, str]:
        """With node's version."""
        return {"version": node.version(self.distribution), **self.configuration}

    @contextmanager
    def open(self, stage: Stage) -> Iterator[Session]:
        """A database with its schema."""
        with stage.database(ready=False) as url, psycopg.connect(url, autocommit=True) as connection:
            yield self.session(url, connection)

"""What the server counts: statements, written log, row versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from pgqueue.bench.stage import execute

JOB_TABLE = "pgqueue.job"


class Statements:
    """Counts the statements of one database: exactly where pg_stat_statements is loaded, else its transactions, which are
    as many where every statement commits by itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.exact = False
        with suppress(psycopg.Error):
            execute(url, "CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
            execute(url, "SELECT count(*) FROM pg_stat_statements")
            execute(
                url,
                "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET pg_stat_statements.track = ''top''', "
                "current_database()); END $$",
            )
            self.exact = True
        self._own = 0

    def read(self) -> float:
        """Statements so far, without those of this class."""
        if self.exact:
            text = (
                "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat_statements%' "
                "AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
            )
            return float(execute(self.url, text)[0][0])
        self._own += 1
        text = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        return float(execute(self.url, text)[0][0]) - self._own


@contextmanager
def statements(url: str) -> Iterator[list[float]]:
    """How many statements ran during the block: the list's only element, afterwards."""
    counter = Statements(url)
    found: list[float] = []
    before = counter.read()
    yield found
    found.append(counter.read() - before)


def log_position(url: str) -> float:
    """Bytes of write-ahead log since the server was made."""
    return float(execute(url, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")[0][0])


def row_versions(url: str) -> dict[str, float]:
    """Of the job table: rows updated, updated without touching an index (HOT), deleted, and dead at this moment."""
    rows = execute(
        url,
        "SELECT n_tup_upd, n_tup_hot_upd, n_tup_del, n_dead_tup FROM pg_stat_user_tables WHERE relid = %s::regclass",
        JOB_TABLE,
    )
    return dict(zip(("updated", "hot", "deleted", "dead"), map(float, rows[0]), strict=True))

"""The tables as SQLAlchemy metadata: for queries in a host's own SQLAlchemy code, and to find drift.

The migrations create the schema, this page only describes it; a test keeps the two equal. Nothing here imports Alembic.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Table,
    Text,
    literal_column,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB

from pgqueue.config import validate_schema
from pgqueue.tables_columns import call, name, time
from pgqueue.tables_schedules import schedule
from pgqueue.tables_topics import message, subscription, topic

VERSION_TABLE = "schema_version"

IncludeName = Callable[[str | None, str, Mapping[Any, Any]], bool]
"""What Alembic calls so; its own type has literals for the keys, and Alembic is not needed here."""

_PARTITION = re.compile(r"archive_(rest|[0-9]{8})|message_(rest|[0-9]+(_(rest|[0-9]+))?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The tables of one schema."""

    job: Table
    lease: Table
    worker: Table
    dead_letter: Table
    archive: Table
    queue: Table
    admission: Table
    lane: Table
    schedule: Table
    result: Table
    kept_task: Table
    progress: Table
    unique_window: Table
    topic: Table
    subscription: Table
    message: Table


@cache
def metadata_for(schema: str = "pgqueue") -> MetaData:
    """The metadata of all tables in `schema`, the same object at every call; ConfigurationError for an unusable name.

    It describes what the migrations made and is not meant for ``create_all``, which would know neither the function
    that rolls the archive nor its partitions.
    """
    metadata = MetaData(schema=validate_schema(schema))
    for define in (
        *(_job, _lease, _worker, _dead_letter, _archive, _queue, _admission, _lane, schedule),
        *(_result, _kept_task, _progress, _unique_window),
        *(topic, subscription, message),
    ):
        define(metadata)
    return metadata


@cache
def tables(schema: str = "pgqueue") -> Tables:
    """The tables in `schema`; ConfigurationError for an unusable name."""
    known = metadata_for(schema).tables
    return Tables(**{name: known[f"{schema}.{name}"] for name in Tables.__dataclass_fields__})


def is_partition(name: str) -> bool:
    """Whether `name` is the name of a partition of the archive or of messages."""
    return _PARTITION.fullmatch(name) is not None


def exclude_from_autogenerate(schema: str = "pgqueue", connection: Connection | None = None) -> IncludeName:
    """An `include_name` for the env.py of a host's own Alembic: everything except what pgqueue keeps in `schema`.

    With it, ``alembic revision --autogenerate`` of the host neither drops nor alters the tables of the queue, with and
    without ``include_schemas``, and wherever `schema` stands in the search_path. In "public", which the host may share, only
    pgqueue's own names are left out.

    `connection`: that of the comparison, needed only outside of an env.py, and only where `schema` is in the search_path.
    """
    ours = {table.name for table in metadata_for(schema).tables.values()} | {VERSION_TABLE}
    shared = schema == "public"

    def include_name(name: str | None, type_: str, parent_names: Mapping[Any, Any]) -> bool:
        if type_ == "schema":
            return shared or name != schema
        table = name if type_ == "table" else parent_names.get("table_name")
        known = table is not None and (table in ours or is_partition(table))
        where = parent_names.get("schema_name")
        # To Alembic None is the default schema, but what it finds there is whatever is visible by the search_path.
        if where is None:
            return not (known and (shared or _is_visible(connection, schema, str(table))))
        return where != schema or (shared and table is not None and not known)

    return include_name


def _is_visible(connection: Connection | None, schema: str, table: str) -> bool:
    """Whether `table`, without a schema, is the one in `schema`."""
    bind = connection or _alembics_connection()
    if bind is None:
        return False
    question = text(
        "SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = to_regclass(quote_ident(CAST(:name AS text))) AND n.nspname = CAST(:schema AS text))"
    )
    return bool(bind.execute(question, {"name": table, "schema": schema}).scalar_one())


def _alembics_connection() -> Connection | None:
    """That of the env.py which runs now. Its function is called from there, so Alembic is imported already."""
    context = sys.modules.get("alembic.context")
    try:
        bind: Connection | None = None if context is None else context.get_bind()
    except NameError:  # nothing runs
        return None
    return bind


def _job(metadata: MetaData) -> None:
    sequence = Sequence("job_id_seq", data_type=BigInteger, schema=metadata.schema, metadata=metadata)
    columns: list[Column[Any]] = [
        Column("id", BigInteger, sequence, server_default=sequence.next_value(), nullable=False),
        name("queue"),
        *call(),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("position", BigInteger, server_default=sequence.next_value()),
        time("run_at", nullable=True),
        Column("attempt", Integer, nullable=False, server_default=text("0")),
        Column("max_attempts", Integer, nullable=False, server_default=text("20")),
        Column("lost", Integer, nullable=False, server_default=text("0")),
        Column("lease_id", BigInteger),
        Column("cancel_requested", Boolean, nullable=False, server_default=text("false")),
        Column("timeout", Double),
        Column("retry", JSON),
        Column("headers", JSON),
        Column("errors", JSONB),
        time("created_at", now=True),
        *_keys(),
        Column("admitted", Boolean),
        Column("park", Boolean),
        time("expires_at", nullable=True),
        Column("next_key", Text(collation="C")),
        Column("next_mode", SmallInteger),
        time("next_at", nullable=True),
    ]
    job = Table("job", metadata, *columns, PrimaryKeyConstraint("id", "queue", name="job_pkey"))
    claimable = job.c.position.is_not(None)
    Index("job_claim", job.c.queue, job.c.priority.desc(), job.c.position, postgresql_where=claimable)
    Index("job_cancel", job.c.queue, job.c.id, postgresql_where=job.c.cancel_requested)
    _index_lanes(job)
    Index("job_due", job.c.queue, job.c.run_at, postgresql_where=job.c.run_at.is_not(None))
    Index("job_expiry", job.c.queue, job.c.expires_at, postgresql_where=job.c.expires_at.is_not(None))
    Index("job_next", job.c.queue, job.c.next_key, unique=True, postgresql_where=job.c.next_key.is_not(None))


def _keys() -> list[Column[Any]]:
    return [
        Column("unique_key", Text(collation="C")),
        Column("lane", Text(collation="C")),
        Column("lane_rank", SmallInteger),
        Column("lane_width", Integer),
    ]


def _index_lanes(job: Table) -> None:
    unique = job.c.unique_key.is_not(None)
    Index("job_unique", job.c.unique_key, job.c.queue, unique=True, postgresql_where=unique)
    waiting = job.c.lane.is_not(None) & job.c.admitted.is_(None) & job.c.run_at.is_(None)
    Index("job_lane_waiting", job.c.queue, job.c.lane, job.c.lane_rank, job.c.id, postgresql_where=waiting)
    Index("job_lane_admitted", job.c.lane, job.c.queue, postgresql_where=job.c.admitted)
    head = job.c.admitted & (job.c.lane >= literal_column("'o'")) & (job.c.lane < literal_column("'p'"))
    Index("job_lane_head", job.c.lane, job.c.queue, unique=True, postgresql_where=head)


def _admission(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        Column("id", BigInteger, Identity(always=True), nullable=False),
        name("queue"),
        name("lane"),
        time("due_at", nullable=True),
    ]
    Table("admission", metadata, *columns, PrimaryKeyConstraint("queue", "id", name="admission_pkey"))


def _lane(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        name("lane"),
        name("queue"),
        Column("width", Integer),
        time("parked_at", nullable=True),
        Column("parked_by", BigInteger),
        *_bucket(),
        time("wakes_at", nullable=True),
    ]
    Table("lane", metadata, *columns, PrimaryKeyConstraint("lane", "queue", name="lane_pkey"))


def _lease(metadata: MetaData) -> None:
    Sequence("lease_tie_seq", data_type=BigInteger, schema=metadata.schema, metadata=metadata)
    tie = f"nextval('\"{metadata.schema}\".lease_tie_seq')"
    token = text(f"((extract(epoch FROM clock_timestamp()) * 1000000)::bigint << 9) | ({tie} & 511)")
    columns: list[Column[Any]] = [
        Column("id", BigInteger, server_default=token, autoincrement=False, nullable=False),
        name("queue"),
        Column("worker_id", BigInteger),
        Column("job_ids", ARRAY(BigInteger), nullable=False),
        time("claimed_at"),
        time("expires_at"),
    ]
    lease = Table("lease", metadata, *columns, PrimaryKeyConstraint("id", "queue", name="lease_pkey"))
    Index("lease_expiry", lease.c.queue, lease.c.expires_at)


def _worker(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        Column("id", BigInteger, Identity(), nullable=False),
        Column("name", Text, nullable=False),
        Column("hostname", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("version", Text, nullable=False),
        Column("queues", ARRAY(Text), nullable=False),
        Column("concurrency", Integer, nullable=False),
        Column("lease_seconds", Double, nullable=False),
        time("started_at", now=True),
        time("seen_at", now=True),
        Column("completed", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
        Column("circuits", JSONB),
    ]
    Table("worker", metadata, *columns, PrimaryKeyConstraint("id", name="worker_pkey"))


def _dead_letter(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        Column("id", BigInteger, autoincrement=False, nullable=False),
        name("queue"),
        *call(),
        Column("priority", SmallInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("max_attempts", Integer, nullable=False),
        Column("lost", Integer, nullable=False),
        Column("timeout", Double),
        Column("retry", JSON),
        Column("headers", JSON),
        Column("errors", JSONB),
        time("created_at"),
        Column("reason", Text, nullable=False),
        time("died_at", now=True),
        *_keys(),
        Column("park", Boolean),
    ]
    dead = Table("dead_letter", metadata, *columns, PrimaryKeyConstraint("id", "queue", name="dead_letter_pkey"))
    Index("dead_letter_age", dead.c.queue, dead.c.died_at)


def _archive(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        Column("id", BigInteger, autoincrement=False, nullable=False),
        name("queue"),
        *call(),
        Column("priority", SmallInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("lost", Integer, nullable=False),
        Column("headers", JSON),
        Column("errors", JSONB),
        name("state"),
        Column("reason", Text),
        time("created_at"),
        time("finished_at"),
    ]
    key = PrimaryKeyConstraint("id", "queue", "finished_at", name="archive_pkey")
    Table("archive", metadata, *columns, key, postgresql_partition_by="RANGE (finished_at)")


def _queue(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        name("name"),
        time("paused_at", nullable=True),
        time("paused_until", nullable=True),
        Column("paused_tasks", JSONB),
        Column("ageing", Double),
        Column("ageing_mark", BigInteger),
        Column("ageing_next", BigInteger),
        Column("ageing_level", SmallInteger),
        time("aged_at", nullable=True),
        Column("most_running", Integer),
        *_bucket(),
        Column("limit_definition", Text),
        Column("limit_superseded", ARRAY(Text)),
        time("limit_affirmed_at", nullable=True),
    ]
    Table("queue", metadata, *columns, PrimaryKeyConstraint("name", name="queue_pkey"))


def _bucket() -> list[Column[Any]]:
    """A rate: so many a second, and how many of them are there at a moment."""
    return [
        Column("rate", Double),
        Column("burst", Integer),
        Column("tokens", Double),
        time("refilled_at", nullable=True),
    ]


def _result(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        Column("id", BigInteger, autoincrement=False, nullable=False),
        name("queue"),
        name("state"),
        Column("value", JSON),
        Column("error", Text),
        time("finished_at"),
        time("expires_at"),
    ]
    result = Table("result", metadata, *columns, PrimaryKeyConstraint("id", "queue", name="result_pkey"))
    Index("result_expiry", result.c.expires_at)


def _kept_task(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [Column("task", Text, nullable=False), Column("seconds", Double, nullable=False)]
    Table("kept_task", metadata, *columns, PrimaryKeyConstraint("task", name="kept_task_pkey"))


def _progress(metadata: MetaData) -> None:
    columns: list[Column[Any]] = [
        Column("id", BigInteger, autoincrement=False, nullable=False),
        name("queue"),
        Column("token", BigInteger, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("percent", Double),
        Column("message", Text, nullable=False),
        time("updated_at"),
    ]
    Table("progress", metadata, *columns, PrimaryKeyConstraint("id", "queue", name="progress_pkey"))


def _unique_window(metadata: MetaData) -> None:
    columns = (name("unique_key"), name("queue"), time("until"), Column("job_id", BigInteger, nullable=False))
    key = PrimaryKeyConstraint("unique_key", "queue", name="unique_window_pkey")
    window = Table("unique_window", metadata, *columns, key)
    Index("unique_window_end", window.c.queue, window.c.until)

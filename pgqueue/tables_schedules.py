"""The table of schedules, as `pgqueue.tables` describes the others."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON

from pgqueue.tables_columns import call, name, time


def schedule(metadata: MetaData) -> None:
    """Define it."""
    columns: list[Column[Any]] = [
        name("name"),
        Column("cron", Text),
        Column("every", Double),
        Column("tz", Text, nullable=False, server_default=text("'UTC'")),
        Column("missed", Text, nullable=False, server_default=text("'once'")),
        Column("grace", Double, nullable=False, server_default=text("60")),
        Column("overlap", Boolean, nullable=False, server_default=text("true")),
        Column("queue", Text(collation="C"), nullable=False, server_default=text("'default'")),
        *call(),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("max_attempts", Integer, nullable=False, server_default=text("20")),
        Column("timeout", Double),
        Column("retry", JSON),
        Column("headers", JSON),
        Column("definition", Text),
        Column("superseded", ARRAY(Text), nullable=False, server_default=text("'{}'")),
        time("affirmed_at", nullable=True),
        Column("version", BigInteger, nullable=False, server_default=text("1")),
        time("starts_at", now=True),
        time("ticked_to", now=True),
        Column("next_at", DateTime(timezone=True), server_default=text("clock_timestamp()")),
        time("paused_at", nullable=True),
        time("last_at", nullable=True),
        Column("last_job_id", BigInteger),
        Column("last_queue", Text(collation="C")),
        Column("expires_in", Double),
    ]
    table = Table("schedule", metadata, *columns, PrimaryKeyConstraint("name", name="schedule_pkey"))
    waiting = table.c.next_at.is_not(None) & table.c.paused_at.is_(None)
    Index("schedule_next", table.c.next_at, postgresql_where=waiting)

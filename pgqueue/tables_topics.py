"""The tables of topics, as `pgqueue.tables` describes the others."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
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
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB

from pgqueue.tables_columns import name, time


def topic(metadata: MetaData) -> None:
    """Define it."""
    columns: list[Column[Any]] = [
        name("name"),
        Column("number", BigInteger, Identity(always=True), nullable=False),
        Column("version", BigInteger, nullable=False, server_default=text("0")),
        Column("segment", BigInteger, nullable=False, server_default=text("1")),
        Column("keep_count", BigInteger),
        Column("keep_age", Double),
        Column("holds", Boolean, nullable=False, server_default=text("false")),
        Column("seen", Text, nullable=False, server_default=text("'1:1:'")),
        Column("settled", BigInteger, nullable=False, server_default=text("0")),
        Column("sizes", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
        time("looked_at", now=True),
        time("rolled_at", now=True),
        time("changed_at", now=True),
    ]
    Table("topic", metadata, *columns, PrimaryKeyConstraint("name", name="topic_pkey"))


def subscription(metadata: MetaData) -> None:
    """Define it."""
    columns: list[Column[Any]] = [
        *(name("topic"), name("name"), name("queue")),
        Column("task", Text, nullable=False),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("max_attempts", Integer, nullable=False, server_default=text("20")),
        Column("timeout", Double),
        Column("retry", JSON),
        Column("headers", JSON),
        Column("expires_in", Double),
        Column("ordered", Boolean, nullable=False, server_default=text("false")),
        Column("park", Boolean),
        Column("switches", ARRAY(BigInteger), nullable=False, server_default=text("'{}'::bigint[]")),
        Column("reading", Text),
        Column("done", Text),
        time("start_at", nullable=True),
        Column("replayed_to", BigInteger),
        Column("definition", Text),
        Column("superseded", ARRAY(Text), nullable=False, server_default=text("'{}'::text[]")),
        time("affirmed_at", nullable=True),
        time("created_at", now=True),
        time("gone_at", nullable=True),
    ]
    Table("subscription", metadata, *columns, PrimaryKeyConstraint("topic", "name", name="subscription_pkey"))


def message(metadata: MetaData) -> None:
    """Define it."""
    Sequence("message_id_seq", data_type=BigInteger, schema=metadata.schema, metadata=metadata)
    columns: list[Column[Any]] = [
        Column("id", BigInteger, autoincrement=False, nullable=False),
        name("topic"),
        Column("segment", BigInteger, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("xid", BigInteger, nullable=False),
        name("key", nullable=True),
        *(Column("args", JSON), Column("kwargs", JSON), Column("headers", JSON)),
        time("published_at"),
    ]
    key = PrimaryKeyConstraint("id", "topic", "segment", name="message_pkey")
    table = Table("message", metadata, *columns, key, postgresql_partition_by="LIST (topic)")
    Index("message_xid", table.c.xid, table.c.version)

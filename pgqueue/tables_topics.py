"""The tables of topics, as `pgqueue.tables` describes the others."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
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


def _name(name: str, *, nullable: bool = False) -> Column[Any]:
    return Column(name, Text(collation="C"), nullable=nullable)


def _time(name: str, *, nullable: bool = False, now: bool = False) -> Column[Any]:
    default = text("clock_timestamp()") if now else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=default)


def topic(metadata: MetaData) -> None:
    """Define it."""
    columns: list[Column[Any]] = [
        _name("name"),
        Column("number", BigInteger, Identity(always=True), nullable=False),
        Column("version", BigInteger, nullable=False, server_default=text("0")),
        Column("segment", BigInteger, nullable=False, server_default=text("1")),
        Column("keep_count", BigInteger),
        Column("keep_age", Double),
        Column("holds", Boolean, nullable=False, server_default=text("false")),
        Column("seen", Text, nullable=False, server_default=text("'1:1:'")),
        Column("settled", BigInteger, nullable=False, server_default=text("0")),
        Column("sizes", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
        _time("looked_at", now=True),
        _time("rolled_at", now=True),
        _time("changed_at", now=True),
    ]
    Table("topic", metadata, *columns, PrimaryKeyConstraint("name", name="topic_pkey"))


def subscription(metadata: MetaData) -> None:
    """Define it."""
    columns: list[Column[Any]] = [
        *(_name("topic"), _name("name"), _name("queue")),
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
        _time("start_at", nullable=True),
        Column("replayed_to", BigInteger),
        Column("definition", Text),
        Column("superseded", ARRAY(Text), nullable=False, server_default=text("'{}'::text[]")),
        _time("affirmed_at", nullable=True),
        _time("created_at", now=True),
        _time("gone_at", nullable=True),
    ]
    Table("subscription", metadata, *columns, PrimaryKeyConstraint("topic", "name", name="subscription_pkey"))


def message(metadata: MetaData) -> None:
    """Define it."""
    Sequence("message_id_seq", data_type=BigInteger, schema=metadata.schema, metadata=metadata)
    columns: list[Column[Any]] = [
        Column("id", BigInteger, autoincrement=False, nullable=False),
        _name("topic"),
        Column("segment", BigInteger, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("xid", BigInteger, nullable=False),
        _name("key", nullable=True),
        *(Column("args", JSON), Column("kwargs", JSON), Column("headers", JSON)),
        _time("published_at"),
    ]
    key = PrimaryKeyConstraint("id", "topic", "segment", name="message_pkey")
    table = Table("message", metadata, *columns, key, postgresql_partition_by="LIST (topic)")
    Index("message_xid", table.c.xid, table.c.version)

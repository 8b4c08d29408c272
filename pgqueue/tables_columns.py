"""Columns that several tables have, for the modules that `pgqueue.tables` is made of."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, DateTime, Text, text
from sqlalchemy.dialects.postgresql import JSON


def name(name: str, *, nullable: bool = False) -> Column[Any]:
    """A column that identifies or is looked up: compared byte by byte, whatever the collation of the database."""
    return Column(name, Text(collation="C"), nullable=nullable)


def time(name: str, *, nullable: bool = False, now: bool = False) -> Column[Any]:
    """A moment; `now`: by default that of the statement."""
    default = text("clock_timestamp()") if now else None
    return Column(name, DateTime(timezone=True), nullable=nullable, server_default=default)


def call() -> list[Column[Any]]:
    """What is to be called; the payload is json, not jsonb, so that what was enqueued comes back byte for byte."""
    return [Column("task", Text, nullable=False), Column("args", JSON), Column("kwargs", JSON)]

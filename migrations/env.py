"""How Alembic is run: by pgqueue.migrate, on a connection that is already in a transaction, or offline for a script.

There is no ini file, no logging configuration, and no `alembic_version`: the host's own Alembic is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alembic import context

from pgqueue.tables import VERSION_TABLE, metadata_for
from pgqueue.version import schema_note

schema: str = context.config.attributes["schema"]
metadata = metadata_for(schema)
tables = {table.name for table in metadata.tables.values()}


def include_name(name: str | None, type_: str, _parents: Mapping[str, Any]) -> bool:
    """Our schema and our tables only: neither the host's tables nor the partitions of the archive are compared."""
    if type_ == "schema":
        return name == schema
    return name in tables if type_ == "table" else True


def write_note(*, heads: set[Any], **_facts: Any) -> None:
    """Say which older workers run on the schema as it is now: what the revision declares, else none."""
    for head in heads:
        oldest = getattr(context.script.get_revision(head).module, "oldest_worker", head)
        table = f'"{schema}".{VERSION_TABLE}'
        context.execute(f"COMMENT ON TABLE {table} IS '{schema_note(head, oldest)}'")


options: dict[str, Any] = {
    "target_metadata": metadata,
    "version_table": VERSION_TABLE,
    "version_table_schema": schema,
    "include_schemas": True,
    "include_name": include_name,
    "pgqueue_schema": schema,
    "on_version_apply": write_note,
}

if context.is_offline_mode():
    # paramstyle: the default one would write every % of the script twice.
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},
        literal_binds=True,
        transactional_ddl=context.config.attributes.get("transaction", True),
        **options,
    )
    with context.begin_transaction():
        for statement in context.config.attributes["prologue"]:
            context.execute(statement)
        context.run_migrations()
else:
    context.configure(connection=context.config.attributes["connection"], **options)
    context.run_migrations()

"""The SQLAlchemy tables against the migrated schema, and against a host's own Alembic."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Integer, MetaData, Table, inspect, select

from pgqueue import migrate
from pgqueue.errors import ConfigurationError
from pgqueue.migrate_connection import transaction
from pgqueue.tables import Tables, exclude_from_autogenerate, is_partition, metadata_for, tables


def ours_only(name: str | None, type_: str, _parents: Mapping[str, Any]) -> bool:
    if type_ == "schema":
        return name == "pgqueue"
    return type_ != "table" or not is_partition(str(name))


def compare(dsn: str, metadata: MetaData, **options: Any) -> list[Any]:
    with transaction(dsn) as connection:
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), metadata))


def host_metadata() -> MetaData:
    """A host with a naming convention, whose table lies in the default schema."""
    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(column_0_label)s"})
    Table("upload", metadata, Column("id", Integer, primary_key=True))
    return metadata


def add_host(dsn: str) -> None:
    """What a host with its own Alembic has in the database."""
    with transaction(dsn) as connection:
        host_metadata().create_all(connection)
        connection.exec_driver_sql("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)")
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('host_revision')")


def test_metadata_and_migrations_describe_the_same_schema(database: str) -> None:
    options = {"include_schemas": True, "include_name": ours_only, "version_table": "schema_version"}
    assert compare(database, metadata_for(), version_table_schema="pgqueue", **options) == []


def test_columns_have_the_same_defaults_and_collations_in_both(database: str) -> None:
    with transaction(database) as connection:
        inspector = inspect(connection)
        for table in metadata_for().tables.values():
            for found in inspector.get_columns(table.name, schema="pgqueue"):
                column = table.c[found["name"]]
                has_default = found["default"] is not None or "identity" in found
                assert (column.server_default is not None) == has_default, column
                assert getattr(column.type, "collation", None) == getattr(found["type"], "collation", None), column


def test_rows_written_through_the_tables_get_the_defaults(database: str) -> None:
    known = tables()
    with transaction(database) as connection:
        connection.execute(known.job.insert().values(queue="q", task="t", args=[1]))
        job = connection.execute(select(known.job)).one()
        assert (job.args, job.priority, job.max_attempts, job.run_at) == ([1], 0, 20, None)
        assert job.position > job.id - 1
        values = {"queue": "q", "job_ids": [job.id], "claimed_at": job.created_at, "expires_at": job.created_at}
        claim = known.lease.insert().values(values).returning(known.lease.c.id)
        tokens = [connection.execute(claim).scalar_one() for _ in range(3)]
        assert tokens == sorted(set(tokens)), "a later claim has the larger token"


def test_tables_of_a_schema_are_built_once_and_named_after_it() -> None:
    assert metadata_for("other") is metadata_for("other")
    assert tables("other") is tables("other")
    for name in Tables.__dataclass_fields__:
        assert getattr(tables("other"), name).fullname == f"other.{name}"
    with pytest.raises(ConfigurationError):
        metadata_for("Not A Name")


def test_tables_do_not_import_alembic() -> None:
    program = "import sys, pgqueue.tables; sys.exit('alembic' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("schema", ["pgqueue", "public"])
def test_the_version_table_of_the_host_stays_untouched(empty_database: str, schema: str) -> None:
    add_host(empty_database)
    migrate.upgrade(empty_database, schema=schema)
    assert migrate.check(empty_database, schema).state == "current"
    migrate.to(empty_database, "base", schema=schema)
    with transaction(empty_database) as connection:
        rows = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars().all()
        assert rows == ["host_revision"]
        assert set(inspect(connection).get_table_names()) == {"upload", "alembic_version"}


@pytest.mark.parametrize("schema", ["pgqueue", "public"])
@pytest.mark.parametrize("include_schemas", [True, False])
def test_autogenerate_of_the_host_leaves_the_queue_alone(
    empty_database: str, schema: str, include_schemas: bool
) -> None:
    add_host(empty_database)
    migrate.upgrade(empty_database, schema=schema)
    without = compare(empty_database, host_metadata(), include_schemas=include_schemas)
    assert bool(without) == (include_schemas or schema == "public"), "what the helper is for"
    helper = exclude_from_autogenerate(schema)
    assert compare(empty_database, host_metadata(), include_schemas=include_schemas, include_name=helper) == []


def test_autogenerate_of_the_host_still_sees_what_is_the_hosts(empty_database: str) -> None:
    migrate.upgrade(empty_database, schema="public")
    helper = exclude_from_autogenerate("public")
    changes = compare(empty_database, host_metadata(), include_schemas=True, include_name=helper)
    assert [change[0] for change in changes] == ["add_table"]
    with transaction(empty_database) as connection:
        connection.exec_driver_sql("CREATE TABLE archive_of_the_host (id int)")
    changes = compare(empty_database, host_metadata(), include_schemas=True, include_name=helper)
    assert {change[0] for change in changes} == {"add_table", "remove_table"}

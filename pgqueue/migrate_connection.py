"""The connection under a migration: one transaction, and database errors turned into sentences.

The sentences name the database and never the password. What the server says is passed on but not interpreted: which
right is missing is asked from the catalogs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from pgqueue.config import validate_url
from pgqueue.drivers.pool import liveness, primary_only
from pgqueue.errors import ConfigurationError, DatabaseUnavailable, PgQueueError, SchemaError
from pgqueue.tables import VERSION_TABLE


class TableLocked(SchemaError):
    """Another session held a lock for longer than the wait was allowed to be."""


@contextmanager
def transaction(dsn: str, *, read_only: bool = False) -> Iterator[Connection]:
    """A connection of our own in one transaction that is committed at the end, and rolled back by any error."""
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(dsn, read_only=read_only),
        poolclass=NullPool,
        use_native_hstore=False,
    )
    with engine.begin() as connection:
        yield connection


@contextmanager
def translated_errors(dsn: str, schema: str) -> Iterator[None]:
    """Raise DatabaseUnavailable, SchemaError or ConfigurationError for what the block lets out of the database."""
    try:
        yield
    except (psycopg.Error, DBAPIError) as error:
        cause = database_error(error)
        if cause is None:
            raise
        raise _translated(cause, dsn, schema) from error


def database_error(error: BaseException) -> psycopg.Error | None:
    """The error of the driver, out of SQLAlchemy's wrapping."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return cause if isinstance(cause, psycopg.Error) else None


def describe(dsn: str) -> str:
    """Which database a DSN leads to, without user and password; ConfigurationError when it cannot be read."""
    validate_url(dsn)
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # The driver's own message would repeat the text, and with it the password.
        hint = "use postgresql://user:password@host:port/name or the keywords of libpq"
        raise ConfigurationError(f"the database URL cannot be read: {hint}") from None
    name = f"database {parts['dbname']!r}" if parts.get("dbname") else "the default database"
    host = f" on {parts['host']}" if parts.get("host") else ""
    return name + host + (f":{parts['port']}" if host and parts.get("port") else "")


def connect(dsn: str, *, read_only: bool = False) -> psycopg.Connection:
    """A connection of our own, which notices that the server is gone as those of clients do; ConfigurationError as above."""
    describe(dsn)
    # prepare_threshold: a pooler in transaction mode may run the next statement in a session that prepared nothing.
    options: dict[str, Any] = {"fallback_application_name": "pgqueue migrate", **liveness(dsn), **primary_only(dsn)}
    connection = psycopg.connect(dsn, prepare_threshold=None, **options)
    if read_only:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.read_only = True
    else:
        # A role may default to a stricter level; its snapshot would be older than the lock we waited for.
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def _translated(error: psycopg.Error, dsn: str, schema: str) -> PgQueueError:
    where = describe(dsn)
    if isinstance(error, (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)):
        return TableLocked(f"schema {schema!r} in {where} is locked by other sessions: {_said(error, dsn)}")
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return DatabaseUnavailable(f"{where} is read-only (a standby, or set so): migrate on the primary server.")
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return SchemaError(_missing_right(dsn, schema, where))
    if isinstance(error, psycopg.OperationalError):
        return DatabaseUnavailable(f"{where} cannot be used: {_said(error, dsn)}")
    return SchemaError(f"schema {schema!r} in {where} is as it was, the database refused: {_said(error, dsn)}")


def _said(error: psycopg.Error, dsn: str) -> str:
    message = error.diag.message_primary or " ".join(str(error).split()) or type(error).__name__
    password = conninfo_to_dict(dsn).get("password")
    return message.replace(str(password), "***") if password else message


def _missing_right(dsn: str, schema: str, where: str) -> str:
    """Which right on what, and the statement that gives it."""
    question = """
        SELECT quote_ident(current_user), quote_ident(current_database()), n.oid IS NOT NULL,
               has_database_privilege(current_database(), 'CREATE'), has_schema_privilege(n.oid, 'USAGE'),
               has_schema_privilege(n.oid, 'CREATE'), has_table_privilege(c.oid, 'SELECT')
        FROM (SELECT) AS one
        LEFT JOIN pg_namespace n ON n.nspname = %s
        LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = %s
    """
    try:
        with transaction(dsn, read_only=True) as connection:
            row = connection.exec_driver_sql(question, (schema, VERSION_TABLE)).one()
    except (psycopg.Error, DBAPIError):
        return f"a right is missing on schema {schema!r} in {where}"
    role, database, exists, may_make, may_use, may_fill, may_read = row
    head, name = f"role {role} in {where} lacks", f'"{schema}"'
    if not exists and not may_make:
        own = f"CREATE SCHEMA {name} AUTHORIZATION {role}"
        return f"{head} CREATE on the database: run GRANT CREATE ON DATABASE {database} TO {role}, or {own}"
    if exists and not may_use:
        return f"{head} USAGE on schema {name}: run GRANT USAGE ON SCHEMA {name} TO {role}"
    if may_read is False:
        return f"{head} SELECT on {name}.{VERSION_TABLE}: run GRANT SELECT ON {name}.{VERSION_TABLE} TO {role}"
    if exists and not may_fill:
        return f"{head} CREATE on schema {name}: run GRANT CREATE ON SCHEMA {name} TO {role}"
    return f"{head} ownership of an object in schema {name}: migrate as the role that owns its tables"

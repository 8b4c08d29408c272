"""The two loops that run an operation, and what turns a database's refusal into this library's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

from pgqueue.drivers.arrays import register
from pgqueue.errors import DatabaseUnavailable, SchemaError
from pgqueue.ops import Op
from pgqueue.sql import statements

T = TypeVar("T")
SyncConnection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

register()


def run(connection: SyncConnection, op: Op[T], schema: str) -> T:
    """Run `op` on a sync psycopg connection, through a cursor of our own: the caller's row factory does not matter."""
    texts = statements(schema)
    with schema_errors(schema), psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.format = psycopg.pq.Format.BINARY
        try:
            step = next(op)
            while True:
                try:
                    cursor.execute(texts[step.name], step.params)
                    rows = cursor.fetchall() if cursor.description is not None else []
                except psycopg.Error as error:
                    step = op.throw(error)
                else:
                    step = op.send(rows)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            op.close()


async def run_async(connection: AsyncConnection, op: Op[T], schema: str) -> T:
    """The same on an async psycopg connection."""
    texts = statements(schema)
    with schema_errors(schema):
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            cursor.format = psycopg.pq.Format.BINARY
            try:
                step = next(op)
                while True:
                    try:
                        await cursor.execute(texts[step.name], step.params)
                        rows = await cursor.fetchall() if cursor.description is not None else []
                    except psycopg.Error as error:
                        step = op.throw(error)
                    else:
                        step = op.send(rows)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            finally:
                op.close()


def whole(connection: SyncConnection, atomic: bool) -> AbstractContextManager[object]:
    """A transaction around several statements, only where there is none and every statement would commit by itself: in
    autocommit. Elsewhere it would be the caller's commit that we take into our hands."""
    return connection.transaction() if atomic and _commits_by_itself(connection) else nullcontext()


def whole_async(connection: AsyncConnection, atomic: bool) -> AbstractAsyncContextManager[object]:
    """The same on an async connection."""
    return connection.transaction() if atomic and _commits_by_itself(connection) else nullcontext()


def _commits_by_itself(connection: SyncConnection | AsyncConnection) -> bool:
    return connection.autocommit and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@contextmanager
def schema_errors(schema: str) -> Iterator[None]:
    """Say in one sentence that the schema is missing, old or out of reach; every other error passes as it is.

    The SQLSTATE decides, never the text of a message.
    """
    try:
        yield
    except (
        psycopg.errors.InvalidSchemaName,
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.UndefinedFunction,
    ) as error:
        raise SchemaError(
            f"schema {schema!r} is missing in this database or does not fit this version of pgqueue: run `pgqueue migrate`"
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise SchemaError(
            f"this database role has no right to do this in schema {schema!r}: {first_line(error)}"
        ) from error
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise DatabaseUnavailable(
            "this server accepts no writes (a standby, or set read-only): connect to the primary"
        ) from error


def first_line(error: psycopg.Error) -> str:
    """The server's own primary message, without its context; of a connection error the line that says what failed."""
    if error.diag.message_primary:
        return error.diag.message_primary
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "failed: " in line]
    return next(iter(said or lines), type(error).__name__)

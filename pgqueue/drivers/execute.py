"""The two loops that run an operation, and what turns a database's refusal into this library's words."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg.rows import tuple_row

from pgqueue.drivers.arrays import register
from pgqueue.errors import ConfigurationError, DatabaseUnavailable, SchemaError
from pgqueue.ops import Op, Rows, Step, Stream
from pgqueue.sql import statements
from pgqueue.sql.rights import rights_in_words

T = TypeVar("T")
SyncConnection = psycopg.Connection[Any]
AsyncConnection = psycopg.AsyncConnection[Any]

register()
IN_FLIGHT = 16


def run(connection: SyncConnection, op: Op[T], schema: str) -> T:
    """Run `op` on a sync psycopg connection, through a cursor of our own: the caller's row factory does not matter."""
    texts = statements(schema)
    cursor = _cursor(connection)
    try:
        step = next(op)
        while True:
            try:
                if isinstance(step, Stream):
                    rows = _stream(connection, step, texts)
                else:
                    cursor.execute(texts[step.name], step.params)
                    rows = cursor.fetchall() if _has_rows(cursor) else []
            except psycopg.Error as error:
                step = op.throw(error)
            else:
                step = op.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except psycopg.Error as error:
        said, cause = in_our_words(error, schema, step)
        if said is error:
            raise
        raise said from cause
    finally:
        op.close()
        cursor.close()


class Foreign(ABC):
    """An async connection of another driver than psycopg. Its errors are psycopg's all the same."""

    @property
    @abstractmethod
    def commits_by_itself(self) -> bool:
        """True where every statement commits alone."""

    @abstractmethod
    def transaction(self) -> AbstractAsyncContextManager[object]:
        """One around several statements; used where every statement commits alone."""

    @abstractmethod
    async def rows(self, step: Step, schema: str) -> Rows:
        """Run one statement; what it answers."""


async def run_async(connection: AsyncConnection | Foreign, op: Op[T], schema: str) -> T:
    """The same on an async connection."""
    if isinstance(connection, Foreign):
        return await _answered(op, schema, partial(_answer_foreign, connection, schema))
    texts = statements(schema)
    cursor = _async_cursor(connection)

    async def answer(step: Step | Stream) -> Rows:
        if isinstance(step, Stream):
            return await _stream_async(connection, step, texts)
        await cursor.execute(texts[step.name], step.params)
        return await cursor.fetchall() if _has_rows(cursor) else []

    try:
        return await _answered(op, schema, answer)
    finally:
        await cursor.close()


async def _answer_foreign(connection: Foreign, schema: str, step: Step | Stream) -> Rows:
    steps = step.steps if isinstance(step, Stream) else [step]
    return [row for one in steps for row in await connection.rows(one, schema)]


async def _answered(op: Op[T], schema: str, answer: Callable[[Step | Stream], Awaitable[Rows]]) -> T:
    try:
        step = next(op)
        while True:
            try:
                rows = await answer(step)
            except psycopg.Error as error:
                step = op.throw(error)
            else:
                step = op.send(rows)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except psycopg.Error as error:
        said, cause = in_our_words(error, schema, step)
        if said is error:
            raise
        raise said from cause
    finally:
        op.close()


def _stream(connection: SyncConnection, stream: Stream, texts: Mapping[str, bytes]) -> Rows:
    """In a pipeline where there is more than one statement: one that fails makes the server skip those behind it."""
    steps, only = _look_ahead(stream)
    rows: Rows = []
    with nullcontext() if only else connection.pipeline():
        for some in _few_at_a_time(steps):
            sent = []
            for step in some:
                cursor = _cursor(connection)
                cursor.execute(texts[step.name], step.params)
                _ask_for_the_answer(connection, only)
                sent.append((step, cursor))
            for step, cursor in sent:
                rows += [] if step.silent else cursor.fetchall()
                cursor.close()
    return rows


async def _stream_async(connection: AsyncConnection, stream: Stream, texts: Mapping[str, bytes]) -> Rows:
    """The same on an async connection."""
    steps, only = _look_ahead(stream)
    rows: Rows = []
    async with nullcontext() if only else connection.pipeline():
        for some in _few_at_a_time(steps):
            sent = []
            for step in some:
                cursor = _async_cursor(connection)
                await cursor.execute(texts[step.name], step.params)
                _ask_for_the_answer(connection, only)
                sent.append((step, cursor))
            for step, cursor in sent:
                rows += [] if step.silent else await cursor.fetchall()
                await cursor.close()
    return rows


def _look_ahead(stream: Stream) -> tuple[Iterator[Step], bool]:
    """The statements, and whether there is at most one, which needs no pipeline."""
    steps = iter(stream.steps)
    first = list(itertools.islice(steps, 2))
    return itertools.chain(first, steps), len(first) < 2


def _few_at_a_time(steps: Iterator[Step]) -> Iterator[Iterator[Step]]:
    """Bounds what is on its way, and with it the memory that a stream takes."""
    for step in steps:
        yield itertools.chain([step], itertools.islice(steps, IN_FLIGHT - 1))


def _ask_for_the_answer(connection: SyncConnection | AsyncConnection, only: bool) -> None:
    # Without this the server keeps its answers, and so an error, until the end of the pipeline.
    if not only:
        connection.pgconn.send_flush_request()
        connection.pgconn.flush()


def _cursor(connection: SyncConnection) -> psycopg.Cursor[tuple[Any, ...]]:
    cursor = psycopg.Cursor(connection, row_factory=tuple_row)
    cursor.format = psycopg.pq.Format.BINARY
    return cursor


def _async_cursor(connection: AsyncConnection) -> psycopg.AsyncCursor[tuple[Any, ...]]:
    cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
    cursor.format = psycopg.pq.Format.BINARY
    return cursor


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    # Not `description`, which makes a Python object of every column. No result yet: the caller's connection is in pipeline
    # mode, where fetching waits for it.
    result = cursor.pgresult
    return result is None or result.nfields > 0


def whole(connection: SyncConnection) -> AbstractContextManager[object]:
    """A transaction around several statements, only where there is none and every statement would commit by itself: in
    autocommit. Elsewhere it would be the caller's commit that we take into our hands."""
    return connection.transaction() if commits_by_itself(connection) else nullcontext()


def whole_async(connection: AsyncConnection | Foreign) -> AbstractAsyncContextManager[object]:
    """The same on an async connection."""
    return connection.transaction() if commits_by_itself(connection) else nullcontext()


def commits_by_itself(connection: SyncConnection | AsyncConnection | Foreign) -> bool:
    """True in autocommit, outside of any transaction block."""
    if isinstance(connection, Foreign):
        return connection.commits_by_itself
    return connection.autocommit and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def in_our_words(error: psycopg.Error, schema: str, step: Step | Stream) -> tuple[Exception, Exception | None]:
    """What is raised instead of a refusal by the server, and what is shown as its cause.

    A schema that is missing, old or out of reach is said in one sentence. Everything else stays what it is, but for what
    may repeat a payload: the DETAIL of a constraint is the whole row, and CONTEXT may hold parameters. The SQLSTATE
    decides, never the text of a message.
    """
    if isinstance(error, _NOT_OUR_SCHEMA):
        unfit = f"schema {schema!r} is missing in this database or does not fit this version of pgqueue"
        return SchemaError(f"{unfit}: run `pgqueue migrate`"), error
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return SchemaError(
            f"this database role has no right to do this in schema {schema!r}: {first_line(error)}{_needs(step)}"
        ), _without_detail(error)
    if isinstance(error, _NOT_OUR_SESSION):
        return ConfigurationError(
            "prepared statements do not survive on this connection, as behind a pooler in transaction mode: "
            "set prepare=False (PGQUEUE_PREPARE=off), or prepare_threshold=None on a connection of yours"
        ), error
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return DatabaseUnavailable(
            "this server accepts no writes (a standby, or set read-only): connect to the primary"
        ), error
    bare = _without_detail(error)
    return bare, None if bare is not error else error


def _needs(step: Step | Stream) -> str:
    if isinstance(step, Stream):  # the only statements that are streamed are those of a bulk enqueue
        step = Step("job_enqueue_many", {})
    needed = rights_in_words(step.name)
    return f"; {step.name} needs {needed}, as the roles of `pgqueue migrate --roles` have it" if needed else ""


def _without_detail(error: psycopg.Error) -> psycopg.Error:
    """The same class with the server's primary message alone, if it said more."""
    if not (error.diag.message_detail or error.diag.message_hint or error.diag.context):
        return error
    bare = type(error)(first_line(error))
    bare.sqlstate = error.sqlstate
    return bare


_NOT_OUR_SCHEMA = (
    psycopg.errors.InvalidSchemaName,
    psycopg.errors.UndefinedTable,
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
)

_NOT_OUR_SESSION = (psycopg.errors.InvalidSqlStatementName, psycopg.errors.DuplicatePreparedStatement)


def first_line(error: psycopg.Error) -> str:
    """The server's own primary message, without its context; of a connection error what failed, without the address, which
    is long enough to push it out of a log line."""
    if error.diag.message_primary:
        return error.diag.message_primary
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [" ".join(line.rsplit("failed: ", 1)[1].split()) for line in lines if "failed: " in line]
    return next(iter(said or lines), type(error).__name__)

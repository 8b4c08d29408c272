"""Pointing an application's own queue object to another database, or into one transaction, for the time of a block."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
    suppress,
)
from typing import Any, TypeVar

import psycopg

from pgqueue.async_client import AsyncPgQueue
from pgqueue.client import PgQueue
from pgqueue.core import Core
from pgqueue.drivers.execute import AsyncConnection, Foreign, SyncConnection, commits_by_itself, run, run_async
from pgqueue.drivers.pool import AsyncPool, SyncPool
from pgqueue.drivers.resolve import async_connection, check_async, sync_connection
from pgqueue.errors import ConfigurationError, PgQueueError, UnsupportedConnection
from pgqueue.ops import Op, Rows, Step, Stream, relayed
from pgqueue.task import BaseTask

T = TypeVar("T")
Queue = TypeVar("Queue", bound=Core)
REMEMBERED = ("_low_water", "_maintained", "_marks", "_limited")
"""What a queue object has learned of the database that it was used with."""
BACK_TO_DEFAULT = "SET LOCAL idle_in_transaction_session_timeout TO DEFAULT; SET LOCAL synchronous_commit TO DEFAULT"
OF_DJANGO = "this queue works on Django's connections: the database is that of Django's test runner"
AUTOCOMMIT = (
    "this connection is in autocommit, outside of a transaction: what is done there cannot be rolled back; begin a "
    "transaction first (psycopg: connection.transaction(), Django: transaction.atomic())"
)
NOT_ASYNC = (
    "pgqueue_app is an AsyncPgQueue, and pgqueue_connection is not asynchronous: override pgqueue_connection with an "
    "asynchronous connection that is rolled back (docs/testing.md has one), or use pgqueue_cloned"
)
_bound: weakref.WeakKeyDictionary[Core, Any] = weakref.WeakKeyDictionary()


@contextmanager
def pointed(app: Queue, url: str) -> Iterator[Queue]:
    """Let `app` work in the database at `url` during the block, and where it worked before afterwards.

    Its tasks, middleware and other settings stay what they are. The connections that it opens during the block are closed
    at the end; those of an AsyncPgQueue close themselves: ``await pq.close()`` before.
    """
    here = home_of(app)
    if hasattr(here, "_connection"):
        raise ConfigurationError(OF_DJANGO)
    settings = dataclasses.replace(here.settings, database_url=url, listen_url=None)
    pool = SyncPool(settings) if isinstance(here, PgQueue) else AsyncPool(settings)
    with replaced(here, {"settings": settings, "_pool": pool, "_hearing": None, **_nothing_remembered(here)}):
        try:
            yield app
        finally:
            if isinstance(here, PgQueue):
                here.close()


@contextmanager
def bound(app: Queue, using: Any) -> Iterator[Queue]:
    """Let all that `app` does without a `using` of its own happen on this connection, in its transaction, during the block.

    Nothing is committed and nothing is announced: roll back, and it never was. `using` as everywhere; ConfigurationError for
    a connection in autocommit.
    """
    here = home_of(app)
    inside = _AsyncInside(here, using) if isinstance(here, AsyncPgQueue) else _Inside(here, using)
    with replaced(here, _nothing_remembered(here)), running_by(here, inside.run):
        before = _bound.get(here)
        _bound[here] = using
        try:
            yield app
        finally:
            _bound.pop(here, None)
            if before is not None:
                _bound[here] = before


def home_of(app: Core) -> Core:
    """The object that has the connections: of a Flask extension that of the current application."""
    if not isinstance(app, Core):
        raise ConfigurationError(_no_queue(app))
    extension: Any = app
    home: Core = extension._queue() if hasattr(app, "for_app") else app
    return home


def _no_queue(given: object) -> str:
    if given is None:
        return "this needs the queue object, and got None: does the fixture pgqueue_app return it?"
    hint = f", not a task of it ({given.name})" if isinstance(given, BaseTask) else f", and got {given!r:.200}"
    return f"this needs the queue object, a PgQueue or an AsyncPgQueue{hint}"


def check_bindable(app: Core, using: Any) -> None:
    """ConfigurationError for an AsyncPgQueue and a connection that is not asynchronous, as that of the plugin is."""
    if isinstance(home_of(app), AsyncPgQueue):
        try:
            check_async(using)
        except UnsupportedConnection as error:
            raise ConfigurationError(NOT_ASYNC) from error


@contextmanager
def running_by(app: Core, run: Callable[..., Any]) -> Iterator[None]:
    """Let the operations of `app` be run by this. A Flask extension runs its own in the queue of the current application."""
    with replaced(app, {"run": run}):
        yield


def using_of(app: Core) -> Any:
    """The connection in whose transaction `app` works by itself: the one it is bound to, or Django's in an atomic block."""
    app = home_of(app)
    if app in _bound:
        return _bound[app]
    django = getattr(app, "_connection", None)
    if django is not None and django().in_atomic_block:
        return django()
    return None


@contextmanager
def replaced(app: Core, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Put these attributes into the object itself; what was there comes back, and so do the methods of its class."""
    before = {name: vars(app)[name] for name in attributes if name in vars(app)}
    for name, value in attributes.items():
        setattr(app, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(app, name, before[name])
            else:
                with suppress(AttributeError):
                    delattr(app, name)


def _nothing_remembered(app: Core) -> dict[str, Any]:
    return {name: type(vars(app)[name])() for name in REMEMBERED}


class Steps:
    """An operation without the BEGIN and COMMIT of its own that some have: the transaction is somebody else's.

    `disturbed`: it has set what holds until the end of the transaction, which was to be the end of the operation.
    """

    def __init__(self) -> None:
        self.disturbed = False

    def of(self, op: Op[T]) -> Op[T]:
        """The steps that are left."""
        return relayed(op, self._answer)

    def _answer(self, step: Step | Stream) -> Op[Rows]:
        if isinstance(step, Step):
            self.disturbed = self.disturbed or step.silent or bool(step.params.get("relaxed"))
            if step.silent:
                return []
        return (yield step)


class _Inside:
    """`run` of a queue that is bound."""

    def __init__(self, app: Core, using: Any) -> None:
        self._app = app
        self._original = app.run  # type: ignore[attr-defined]
        self._using = using

    def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """See PgQueue.run."""
        if using is not None:
            return self._original(op, using, atomic=atomic)  # type: ignore[no-any-return]
        connection = _begun(sync_connection(self._using))
        steps = Steps()
        # A savepoint: what the database refuses does not end the caller's transaction, as it would not on a connection
        # of our own.
        with getattr(self._using, "wrap_database_errors", nullcontext()), connection.transaction():
            answer = run(connection, steps.of(op), self._app.settings.schema)
        if steps.disturbed:
            connection.execute(BACK_TO_DEFAULT)
        return answer


class _AsyncInside:
    def __init__(self, app: AsyncPgQueue, using: Any) -> None:
        self._app = app
        self._original = app.run
        self._using = using
        self._one_at_a_time = asyncio.Lock()

    async def run(self, op: Op[T], using: Any = None, *, atomic: bool = False) -> T:
        """See AsyncPgQueue.run."""
        if using is not None:
            return await self._original(op, using, atomic=atomic)
        async with self._one_at_a_time:  # savepoints of two operations must not cross
            return await self._run(op)

    async def _run(self, op: Op[T]) -> T:
        connection = await _begun_async(await async_connection(self._using))
        steps = Steps()
        async with connection.transaction():
            answer = await run_async(connection, steps.of(op), self._app.settings.schema)
        if steps.disturbed:
            raw: Any = getattr(connection, "_raw", connection)
            await raw.execute(BACK_TO_DEFAULT)
        return answer


def _begun(connection: SyncConnection) -> SyncConnection:
    """In a transaction, so that a block in it is a savepoint and commits nothing; ConfigurationError in autocommit."""
    if commits_by_itself(connection):
        raise ConfigurationError(AUTOCOMMIT)
    if connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        connection.execute("SELECT 1")
    return connection


async def _begun_async(connection: AsyncConnection | Foreign) -> AsyncConnection | Foreign:
    if commits_by_itself(connection):
        raise ConfigurationError(AUTOCOMMIT)
    if isinstance(connection, Foreign):
        held: Any = connection
        if not held._raw.is_in_transaction():
            await held._connection.exec_driver_sql("SELECT 1")
    elif connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
        await connection.execute("SELECT 1")
    return connection


class OnePool:
    """Stands for a pool: the one connection there is."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def connection(self) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any]:
        """It stays open."""
        if self._connection is None:
            raise PgQueueError("this needs a connection of the other colour: give transaction(using=…) one")
        return nullcontext(self._connection)

    def close(self) -> None:
        """It belongs to somebody else."""


class OneAsyncPool(OnePool):
    """The same for an asynchronous one."""

    async def close(self) -> None:  # type: ignore[override]
        """See OnePool."""

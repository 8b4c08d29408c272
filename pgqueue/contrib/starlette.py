"""Starlette, and what is built on it: the queue opens and closes with the application, in its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import psycopg
from starlette.requests import HTTPConnection

from pgqueue.async_client import AsyncPgQueue
from pgqueue.client import PgQueue
from pgqueue.errors import ConfigurationError, SchemaError
from pgqueue.ops import worker as worker_ops
from pgqueue.version import SCHEMA_REVISION, __version__

__all__ = ["lifespan", "queue_of"]

AppT = TypeVar("AppT")
Inner = Callable[[AppT], AbstractAsyncContextManager[Mapping[str, Any] | None]]
STATE = "pgqueue"
TWO = (
    "lifespan(queue, inner) is for one queue, and inner brings another: open and close the second one in a lifespan of your "
    "own, and yield it under a name of its own"
)


def lifespan(
    queue: AsyncPgQueue | PgQueue, inner: Inner[Any] | None = None, *, check: bool = True
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """A lifespan for ``Starlette(lifespan=…)`` and ``FastAPI(lifespan=…)``; at its end the queue's connections are closed.

    `inner`: the application's own lifespan, entered within this one; what it yields is in the state too. `check`: at the
    start the database must answer, or DatabaseUnavailable, and hold a schema that is not older than this package, or
    SchemaError; False starts without asking. ConfigurationError where `inner` has a queue of its own in the state.
    """
    if not isinstance(queue, (AsyncPgQueue, PgQueue)):
        raise ConfigurationError(
            f"lifespan needs an AsyncPgQueue or a PgQueue, not a value of type {type(queue).__name__}"
        )

    @asynccontextmanager
    async def around(app: Any) -> AsyncIterator[dict[str, Any]]:
        state: dict[str, Any] = {STATE: queue}
        async with AsyncExitStack() as stack:
            stack.push_async_callback(_close, queue)
            if check:
                await _check(queue)
            if inner is not None:
                its_own = await stack.enter_async_context(inner(app))
                if its_own and STATE in its_own:
                    raise ConfigurationError(TWO)
                state |= its_own or {}
            yield state

    return around


def queue_of(connection: HTTPConnection) -> Any:
    """The queue of the application that serves this request or websocket; ConfigurationError where its lifespan has none."""
    queue = connection.scope.get("state", {}).get(STATE)
    if queue is None:
        raise ConfigurationError(
            "this application has no queue: give it lifespan=pgqueue.contrib.starlette.lifespan(…), and run it with its "
            "lifespan (a TestClient in a `with` block)"
        )
    return queue


async def _close(queue: AsyncPgQueue | PgQueue) -> None:
    if isinstance(queue, AsyncPgQueue):
        await queue.close()
    else:
        await asyncio.to_thread(queue.close)


async def _check(queue: AsyncPgQueue | PgQueue) -> None:
    try:
        if isinstance(queue, AsyncPgQueue):
            found, _ = await queue.run(worker_ops.schema_version())
        else:
            found, _ = await asyncio.to_thread(lambda: queue.run(worker_ops.schema_version()))
    except SchemaError as error:
        if isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
            return  # a producer may not look at revisions, and need not: it works on newer ones as well
        raise
    if found is None or found < SCHEMA_REVISION:
        raise SchemaError(
            f"schema {queue.settings.schema!r} is at revision {found}, this pgqueue {__version__} needs {SCHEMA_REVISION}: "
            "run `pgqueue migrate`"
        )

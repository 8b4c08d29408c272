"""Django's connections around a job, in the thread that runs it: usable before, in no transaction behind.

As around a request, `CONN_MAX_AGE`, `CONN_HEALTH_CHECKS` and the option `pool` decide what is closed and when.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Token
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import connections

logger = logging.getLogger("pgqueue.django")
_IDLE = 0
"""psycopg.pq.TransactionStatus.IDLE"""


def open_blocks() -> frozenset[str]:
    """The aliases that are in an atomic block already: a test that runs jobs in its own thread; left alone."""
    return frozenset(connection.alias for connection in _known() if connection.in_atomic_block)


def refresh(outer: frozenset[str] = frozenset()) -> None:
    """Close what is broken or too old, as at the start of a request, and forget the queries of the last job."""
    for connection in _known():
        if connection.alias not in outer:
            connection.queries_log.clear()
            connection.close_if_unusable_or_obsolete()


def left_open(outer: frozenset[str] = frozenset()) -> list[str]:
    """The aliases on which a transaction is open that is none of `outer`, and no habit of the settings (AUTOCOMMIT)."""
    return [
        one.alias
        for one in _known()
        if one.alias not in outer and one.settings_dict["AUTOCOMMIT"] and _in_transaction(one)
    ]


def tidy(outer: frozenset[str] = frozenset()) -> None:
    """Roll back what was left open, and close what is broken or too old, as at the end of a request. Never raises."""
    for connection in _known():
        if connection.alias in outer:
            continue
        try:
            if _in_transaction(connection):
                _discard(connection)
            else:
                connection.close_if_unusable_or_obsolete()
        except Exception:  # a connection that cannot even be closed must not change what became of the job
            logger.warning("connection %r could not be tidied up after a job", connection.alias, exc_info=True)
            _forget(connection.alias)
    _last.closer.left = [connection for connection in _known() if connection.connection is not None]


class _Closer:
    """Closes what `CONN_MAX_AGE` has left open behind the last job of a thread when that ends, not whenever its garbage is
    collected: behind a worker in a test the database is dropped."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def __del__(self) -> None:
        for connection in self.left:
            with suppress(Exception):
                connection.close()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.closer = _Closer()


_last = _OfThread()


class OwnThread:
    """The thread of one `async def` job for what it does in `sync_to_async`, the ORM included; there is none until then.

    Leaving waits for nothing: a function that hangs in that thread must not keep the event loop.
    """

    def __init__(self) -> None:
        self._context = ThreadSensitiveContext()
        self._token: Token[Any] | None = None

    async def __aenter__(self) -> OwnThread:
        self._token = SyncToAsync.thread_sensitive_context.set(self._context)
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._token is not None:
            SyncToAsync.thread_sensitive_context.reset(self._token)
        executor = SyncToAsync.context_to_thread_executor.pop(self._context, None)
        if executor is not None:
            executor.submit(_close_all)
            executor.shutdown(wait=False)

    async def left_open(self) -> list[str]:
        """The aliases on which a transaction is open in it."""
        executor: Executor | None = SyncToAsync.context_to_thread_executor.get(self._context)
        if executor is None:
            return []
        return await asyncio.get_running_loop().run_in_executor(executor, left_open)


def _known() -> list[Any]:
    """Those of this thread."""
    return list(connections.all(initialized_only=True))


def _in_transaction(connection: Any) -> bool:
    raw = connection.connection
    if raw is None:
        return bool(connection.in_atomic_block)
    if connection.in_atomic_block:
        return True
    # Begun by hand, with a plain BEGIN or with autocommit off: Django's own bookkeeping does not show it.
    status = getattr(getattr(raw, "pgconn", None), "transaction_status", _IDLE)
    return bool(status != _IDLE and not raw.closed)


def _discard(connection: Any) -> None:
    with suppress(Exception):
        connection.close()
    # A wrapper that was closed in an atomic block connects no more.
    _forget(connection.alias)


def _forget(alias: str) -> None:
    with suppress(AttributeError):
        del connections[alias]


def _close_all() -> None:
    for connection in _known():
        with suppress(Exception):
            connection.close()

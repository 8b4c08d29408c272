"""FastAPI: the lifespan of Starlette, and the queue as a dependency."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection

from pgqueue.async_client import AsyncPgQueue
from pgqueue.client import PgQueue
from pgqueue.contrib.starlette import lifespan, queue_of

__all__ = ["Queue", "SyncQueue", "get_queue", "lifespan"]


def get_queue(connection: HTTPConnection) -> Any:
    """The queue that the lifespan of this application was given; a dependency, to be overridden in tests."""
    return queue_of(connection)


Queue = Annotated[AsyncPgQueue, Depends(get_queue)]
"""What an endpoint annotates a parameter with: ``async def upload(queue: Queue)``."""

SyncQueue = Annotated[PgQueue, Depends(get_queue)]
"""The same for a lifespan of a PgQueue, which plain functions call in threads."""

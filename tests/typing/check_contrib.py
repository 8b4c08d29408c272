"""The integrations, read by mypy --strict and never run. An ignore that is not needed fails the check."""

from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any, assert_type

import flask
from alembic import context
from fastapi import Depends, FastAPI
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session
from starlette.applications import Starlette

import pgqueue
from pgqueue.config import Settings
from pgqueue.contrib import starlette
from pgqueue.contrib.fastapi import Queue, SyncQueue, lifespan
from pgqueue.contrib.flask import AppQueue, PgQueue
from pgqueue.tables import IncludeName, exclude_from_autogenerate, tables

pq = PgQueue(schema="jobs")
db = SQLAlchemy()
apq = pgqueue.AsyncPgQueue()


@pq.task(queue="images", max_attempts=3)
def shrink(upload_id: int, *, size: int = 256) -> str:
    return f"{upload_id} {size}"


@apq.task
async def shrink_async(upload_id: int) -> str:
    return str(upload_id)


def create_app() -> flask.Flask:
    app = flask.Flask(__name__)
    pq.init_app(app)
    assert_type(pq.for_app(app), AppQueue)
    assert_type(pq.settings, Settings)
    return app


def view(connection: Connection, session: Session, scoped: scoped_session[Session]) -> None:
    assert_type(shrink(1), str)
    assert_type(shrink.enqueue(1, size=5), int)
    assert_type(shrink.enqueue(1, using=db.session), int)
    for using in (connection, session, scoped, db.session):
        assert_type(shrink.options(using=using).enqueue(1, size=5), int)
    assert_type(shrink.options(using=session, delay=5).enqueue_many([(1,)], using=None), list[int])
    assert_type(pq.claim("images", using=session), list[pgqueue.Job])

    shrink.enqueue("one")  # type: ignore[call-overload]
    pq.enqeue("shrink")  # type: ignore[attr-defined]
    shrink.options(using=session).enqueue("one")  # type: ignore[call-overload]
    shrink.options(using=session).enqueue(1, sise=5)  # type: ignore[call-overload]


async def endpoint(queue: Queue, plain: SyncQueue, session: AsyncSession, connection: AsyncConnection) -> None:
    assert_type(await queue.enqueue("shrink", [1], using=session), int)
    assert_type(plain.enqueue("shrink", [1]), int)
    assert_type(await shrink_async.enqueue(1, using=connection), int)
    assert_type(await shrink_async.options(using=session).enqueue(1), int)

    await shrink_async.options(using=session).enqueue("one")  # type: ignore[call-overload]


def own(app: Any) -> AbstractAsyncContextManager[dict[str, str]]: ...  # type: ignore[empty-body]
def empty(app: FastAPI) -> AbstractAsyncContextManager[None]: ...  # type: ignore[empty-body]


async def session() -> AsyncSession: ...  # type: ignore[empty-body]


FastAPI(lifespan=lifespan(apq))
FastAPI(lifespan=lifespan(pgqueue.PgQueue(), empty, check=False))
Starlette(lifespan=starlette.lifespan(apq, own))
FastAPI(lifespan=lifespan("postgresql:///app"))  # type: ignore[arg-type]
Dependency = Annotated[AsyncSession, Depends(session)]
assert_type(exclude_from_autogenerate("jobs"), IncludeName)
context.configure(include_name=exclude_from_autogenerate())
tables("jobs").job.c.id.desc()

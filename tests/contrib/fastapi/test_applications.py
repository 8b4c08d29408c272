"""Starlette and FastAPI: the queue opens and closes with the application, and enqueues in the session of a request.

No annotations from the future here: FastAPI could not find the local names in them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import psycopg
import pytest
from fastapi import Depends, FastAPI, HTTPException, WebSocket
from fastapi.testclient import TestClient
from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import pgqueue
from pgqueue import migrate, roles
from pgqueue.contrib import fastapi as contrib
from pgqueue.contrib import starlette
from tests.callers import sqlalchemy_url
from tests.conftest import execute
from tests.logins import login, roles_of_test
from tests.waiting import wait_until

Admin = psycopg.Connection[Any]
PATIENCE = 30.0


def sessions_of(admin: Admin) -> int:
    """How many connections of queues are open."""
    row = admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'pgqueue'"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def client(database: str) -> Iterator[TestClient]:
    """An application with a session per request, of which one endpoint fails after its enqueue."""
    engine = create_async_engine(sqlalchemy_url(database), poolclass=NullPool)
    sessions = async_sessionmaker(engine)
    pq = pgqueue.AsyncPgQueue(database)
    app = FastAPI(lifespan=contrib.lifespan(pq))
    execute(database, "CREATE TABLE upload (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text)")

    @pq.task(queue="q")
    async def shrink(upload_id: int) -> None: ...

    async def open_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session

    @app.post("/uploads/{name}")
    async def upload(name: str, session: Annotated[AsyncSession, Depends(open_session)]) -> int:
        insert = text("INSERT INTO upload (name) VALUES (:name) RETURNING id")
        number = (await session.execute(insert, {"name": name})).scalar_one()
        await shrink.enqueue(number, using=session)
        if name == "bad":
            raise HTTPException(400)
        await session.commit()
        return int(number)

    @app.get("/status")
    async def status(queue: contrib.Queue) -> dict[str, int]:
        return {row.queue: row.ready for row in await queue.status()}

    @app.websocket("/live")
    async def live(socket: WebSocket, queue: contrib.Queue) -> None:
        await socket.accept()
        await socket.send_json([row.queue for row in await queue.status()])
        await socket.close()

    with TestClient(app) as opened:
        yield opened


def test_a_job_of_a_request_is_committed_or_rolled_back_with_the_rows_of_its_session(
    client: TestClient, admin: Admin
) -> None:
    assert client.post("/uploads/bad").status_code == 400
    number = client.post("/uploads/good").json()
    assert admin.execute("SELECT name FROM upload").fetchall() == [("good",)]
    assert admin.execute("SELECT args FROM pgqueue.job").fetchall() == [([number],)]


def test_the_queue_is_a_dependency_of_requests_and_of_websockets(client: TestClient) -> None:
    client.post("/uploads/good")
    assert client.get("/status").json() == {"q": 1}
    with client.websocket_connect("/live") as socket:
        assert socket.receive_json() == ["q"]


def test_the_end_of_the_application_closes_the_queue_and_the_next_start_opens_it_again(
    database: str, admin: Admin
) -> None:
    ends: list[str] = []

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, str]]:
        await pq.status()  # the queue is there already, and still there at the end
        yield {"colour": "blue"}
        await pq.status()
        ends.append("closed")

    pq = pgqueue.AsyncPgQueue(database)

    async def show(request: Request) -> PlainTextResponse:
        queue = starlette.queue_of(request)
        await asyncio.gather(*(queue.enqueue("work", [number]) for number in range(3)))
        return PlainTextResponse(f"{request.state.colour} {queue is pq}")

    app = Starlette(routes=[Route("/", show)], lifespan=starlette.lifespan(pq, own))
    for _ in range(2):  # each in an event loop of its own
        with TestClient(app) as client:
            assert client.get("/").text == "blue True"
            assert sessions_of(admin) > 0
        wait_until(lambda: sessions_of(admin) == 0, PATIENCE, "the server has noticed that all are closed")
    assert ends == ["closed", "closed"]


def test_a_queue_for_plain_functions_has_the_same_lifespan(database: str, admin: Admin) -> None:
    pq = pgqueue.PgQueue(database)
    app = FastAPI(lifespan=contrib.lifespan(pq))

    @app.post("/jobs")
    def enqueue(queue: contrib.SyncQueue) -> int:
        return queue.enqueue("work")

    with TestClient(app) as client:
        number = client.post("/jobs").json()
        assert sessions_of(admin) > 0
    wait_until(lambda: sessions_of(admin) == 0, PATIENCE, "the server has noticed that all are closed")
    assert admin.execute("SELECT id FROM pgqueue.job").fetchall() == [(number,)]


def test_a_start_without_a_fitting_schema_is_refused_with_what_to_do(empty_database: str, tmp_path: Any) -> None:
    pq = pgqueue.AsyncPgQueue(empty_database)
    app = Starlette(lifespan=starlette.lifespan(pq))

    def start() -> None:
        with TestClient(app):
            pass

    with pytest.raises(pgqueue.SchemaError, match="run `pgqueue migrate`"):
        start()
    with TestClient(Starlette(lifespan=starlette.lifespan(pq, check=False))):
        pass
    migrate.upgrade(empty_database, revision="0005")
    with pytest.raises(pgqueue.SchemaError, match=r"at revision 0005, this pgqueue .* run `pgqueue migrate`"):
        start()
    migrate.upgrade(empty_database)
    start()
    with (
        pytest.raises(pgqueue.DatabaseUnavailable),
        TestClient(Starlette(lifespan=starlette.lifespan(pgqueue.AsyncPgQueue("host=/nowhere connect_timeout=2")))),
    ):
        pass


def test_a_producer_that_may_not_look_at_revisions_can_start(database: str) -> None:
    with roles_of_test(database) as prefix:
        roles.create(database, prefix=prefix)
        with login(database, f"{prefix}_producer") as url:
            pq = pgqueue.AsyncPgQueue(url)

            async def root(request: Request) -> PlainTextResponse:
                return PlainTextResponse(str(await starlette.queue_of(request).enqueue("work")))

            app = Starlette(routes=[Route("/", root)], lifespan=starlette.lifespan(pq))
            with TestClient(app) as client:
                assert client.get("/").text.isdecimal()


def test_an_application_without_the_lifespan_says_what_is_missing(database: str) -> None:
    app = FastAPI()

    @app.get("/")
    async def root(queue: contrib.Queue) -> None: ...

    with pytest.raises(pgqueue.ConfigurationError, match="this application has no queue: give it lifespan="):
        TestClient(app).get("/")


def test_one_queue_serves_event_loops_one_after_another_and_refuses_two_at_once(database: str, admin: Admin) -> None:
    pq = pgqueue.AsyncPgQueue(database)
    for number in range(3):  # never closed, as between the tests of an application
        asyncio.run(pq.enqueue("work", [number]))
    assert admin.execute("SELECT args FROM pgqueue.job ORDER BY id").fetchall() == [([0],), ([1],), ([2],)]

    async def two_loops() -> None:
        await pq.enqueue("work", [3])
        with pytest.raises(pgqueue.ConfigurationError, match="another event loop, which still runs"):
            await asyncio.to_thread(asyncio.run, pq.enqueue("work", [4]))
        await pq.close()

    asyncio.run(two_loops())


def test_a_lifespan_without_a_queue_or_with_two_is_refused_with_what_to_do(database: str, admin: Admin) -> None:
    for wrong in (None, "postgresql:///", FastAPI()):
        with pytest.raises(pgqueue.ConfigurationError, match="lifespan needs an AsyncPgQueue or a PgQueue, not"):
            starlette.lifespan(wrong)  # type: ignore[arg-type]
    one, two = pgqueue.AsyncPgQueue(database), pgqueue.AsyncPgQueue(database)

    async def root(request: Request) -> PlainTextResponse:
        return PlainTextResponse(f"{starlette.queue_of(request) is one} {request.state.second is two}")

    twice = starlette.lifespan(one, starlette.lifespan(two))
    with (
        pytest.raises(pgqueue.ConfigurationError, match="is for one queue, and inner brings another: open and close"),
        TestClient(Starlette(lifespan=twice)),
    ):
        pass

    @asynccontextmanager
    async def own(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with two:
            yield {"second": two}

    with TestClient(Starlette(routes=[Route("/", root)], lifespan=starlette.lifespan(one, own))) as client:
        assert client.get("/").text == "True True"
    wait_until(lambda: sessions_of(admin) == 0, PATIENCE, "the server has noticed that all are closed")

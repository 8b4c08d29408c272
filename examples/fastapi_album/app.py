"""An album: people upload photographs, workers make thumbnails of them. FastAPI, SQLAlchemy's AsyncSession, pgqueue.

`uvicorn fastapi_album.app:app` serves the pages, `pgqueue worker --app fastapi_album.app:pq` makes the thumbnails.
"""

from __future__ import annotations

import asyncio
import html
import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Path, Response, UploadFile
from fastapi.responses import HTMLResponse, RedirectResponse
from PIL import Image, ImageOps
from sqlalchemy import BigInteger, ForeignKey, Select, and_, case, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import pgqueue
from pgqueue.contrib.fastapi import Queue, lifespan
from pgqueue.tables import tables

SIZE = 256
# Both are the same database: SQLAlchemy wants the name of the driver in the URL, and the queue must not have it.
DATABASE_URL = os.environ.get("PGQUEUE_DATABASE_URL", "postgresql:///album")
engine = create_async_engine(DATABASE_URL.replace("postgresql://", "postgresql+psycopg://", 1))
sessions = async_sessionmaker(engine, expire_on_commit=False)
pq = pgqueue.AsyncPgQueue(DATABASE_URL)


class Base(DeclarativeBase):
    """The models' base class."""


class Photo(Base):
    """A photograph as it was sent. `job_id` is the job that makes its thumbnail."""

    __tablename__ = "photo"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    picture: Mapped[bytes] = mapped_column(deferred=True)
    job_id: Mapped[int | None] = mapped_column(BigInteger)


class Thumbnail(Base):
    """The small picture; there is none while the job has not ended, and none if it failed."""

    __tablename__ = "thumbnail"

    photo_id: Mapped[int] = mapped_column(ForeignKey(Photo.id), primary_key=True)
    picture: Mapped[bytes]


@asynccontextmanager
async def own_tables(app: FastAPI) -> AsyncIterator[None]:
    """Make the tables of the album; those of the queue are made by `pgqueue migrate`."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan(pq, own_tables))


async def open_session() -> AsyncIterator[AsyncSession]:
    """A session per request."""
    async with sessions() as session:
        yield session


Session = Annotated[AsyncSession, Depends(open_session)]


@app.get("/", response_class=HTMLResponse)
async def index(session: Session) -> str:
    """Every photograph, and what has become of it."""
    figures = []
    for photo in await session.execute(listing()):
        name = html.escape(photo.name)
        picture = f'<img src="/photos/{photo.id}/thumbnail.jpg" alt="">' if photo.state == "ready" else photo.state
        figures.append(
            f'<figure data-id="{photo.id}" data-name="{name}" data-state="{photo.state}">{picture} {name}</figure>'
        )
    form = '<form action="/photos" method="post" enctype="multipart/form-data"><input type="file" name="photo"><button>'
    return "<!doctype html><title>Album</title>\n" + "\n".join([f"{form}Upload</button></form>", *figures])


@app.post("/photos")
async def upload(photo: UploadFile, session: Session) -> RedirectResponse:
    """Record a photograph and enqueue its job, in one transaction: neither is there without the other."""
    record = Photo(name=photo.filename or "unnamed", picture=await photo.read())
    session.add(record)
    await session.flush()  # the photo gets its id
    record.job_id = await make_thumbnail.options(using=session).enqueue(record.id)
    await session.commit()  # here, and not in the dependency: that ends after the answer was sent
    return RedirectResponse("/", 303)


@app.get("/photos/{photo_id}/thumbnail.jpg", response_class=Response)
async def thumbnail(photo_id: Annotated[int, Path(le=2**31 - 1)], session: Session) -> Response:
    """The small picture."""
    found = await session.get(Thumbnail, photo_id)
    if found is None:
        raise HTTPException(404)
    return Response(found.picture, media_type="image/jpeg")


@app.get("/status")
async def status(queue: Queue) -> dict[str, int]:
    """How much there is to do."""
    return {row.queue: row.ready + row.running for row in await queue.status()}


@pq.task(queue="album", max_attempts=2, retry=pgqueue.Fixed(0.2))
async def make_thumbnail(photo_id: int) -> None:
    """Make the thumbnail of one photograph.

    The block adds the completion of the job to the transaction: the thumbnail is written exactly once, whatever dies when.
    """
    async with sessions() as session:
        picture = await session.scalar(select(Photo.picture).where(Photo.id == photo_id))
        if picture is None:
            raise pgqueue.Discard("the photograph was deleted in the meantime")
        small = await asyncio.to_thread(shrunk, picture)  # Pillow would hold up every other job of this event loop
        async with pgqueue.current_job().transaction(using=session):
            await session.merge(Thumbnail(photo_id=photo_id, picture=small))
        await session.commit()


def listing() -> Select[Any]:
    """Id, name and state of every photograph: the queue's tables can be joined like any other."""
    job, dead = tables().job, tables().dead_letter
    state = case(
        (Thumbnail.photo_id.is_not(None), "ready"),
        (dead.c.id.is_not(None), "failed"),
        (job.c.id.is_not(None), "waiting"),
        else_="unknown",
    )
    return (
        select(Photo.id, Photo.name, state.label("state"))
        .outerjoin(Thumbnail, Thumbnail.photo_id == Photo.id)
        .outerjoin(job, and_(job.c.id == Photo.job_id, job.c.queue == "album"))
        .outerjoin(dead, and_(dead.c.id == Photo.job_id, dead.c.queue == "album"))
        .order_by(Photo.id)
    )


def shrunk(picture: bytes) -> bytes:
    """The middle of the picture, upright, as a square JPEG."""
    with Image.open(io.BytesIO(picture)) as image:
        ImageOps.exif_transpose(image, in_place=True)
        square = ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), Image.Resampling.LANCZOS)
    output = io.BytesIO()
    square.save(output, "JPEG", quality=90)
    return output.getvalue()

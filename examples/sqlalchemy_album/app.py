"""An album: people upload photographs, workers make thumbnails of them. Plain WSGI, SQLAlchemy with Alembic, pgqueue.

`python -m sqlalchemy_album.app` serves the pages, `pgqueue worker --app sqlalchemy_album.app:pq` makes the thumbnails.
"""

from __future__ import annotations

import html
import io
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import make_server

from PIL import Image, ImageOps
from sqlalchemy import Select, and_, case, event, select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapper

import pgqueue
from pgqueue.tables import tables
from sqlalchemy_album.models import DATABASE_URL, Photo, Session, Thumbnail

SIZE = 256
pq = pgqueue.PgQueue(DATABASE_URL)
Answer = tuple[str, str, bytes]
StartResponse = Callable[[str, list[tuple[str, str]]], object]


def site(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
    """The WSGI application: a session per request, which is gone after it."""
    try:
        status, kind, body = answer(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ)
    finally:
        Session.remove()
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def answer(method: str, path: str, environ: dict[str, Any]) -> Answer:
    """Status, content type and body."""
    match method, path.strip("/").split("/"):
        case "GET", [""]:
            return "200 OK", "text/html; charset=utf-8", page().encode()
        case "PUT", ["photos", name] if name:
            name = name.encode("latin-1").decode(errors="replace")  # how WSGI shows the bytes of a path
            upload(name, environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))
            return "201 Created", "text/plain", b"recorded\n"
        case "GET", ["photos", number, "thumbnail.jpg"] if re.fullmatch("[0-9]{1,9}", number):
            found = Session.get(Thumbnail, int(number))
            if found is not None:
                return "200 OK", "image/jpeg", found.picture
    return "404 Not Found", "text/plain", b"not found\n"


def upload(name: str, picture: bytes) -> None:
    """Record a photograph. Its job comes with it, in the same transaction: see `enqueue_thumbnail`."""
    Session.add(Photo(name=name, picture=picture))
    Session.commit()


@event.listens_for(Photo, "after_insert")
def enqueue_thumbnail(mapper: Mapper[Photo], connection: Connection, photo: Photo) -> None:
    """Whoever adds a photograph, here or in a script: `connection` is in the transaction of that insert."""
    job_id = make_thumbnail.options(using=connection).enqueue(photo.id)
    table = Photo.metadata.tables["photo"]
    connection.execute(table.update().where(table.c.id == photo.id).values(job_id=job_id))


@pq.task(queue="album", max_attempts=2, retry=pgqueue.Fixed(0.2))
def make_thumbnail(photo_id: int) -> None:
    """Make the thumbnail of one photograph.

    The block adds the completion of the job to the transaction: the thumbnail is written exactly once, whatever dies when.
    """
    with Session() as session:
        photo = session.get(Photo, photo_id)
        if photo is None:
            raise pgqueue.Discard("the photograph was deleted in the meantime")
        small = shrunk(photo.picture)
        with pgqueue.current_job().transaction(using=session):
            session.merge(Thumbnail(photo_id=photo_id, picture=small))
        session.commit()


def page() -> str:
    """Every photograph, and what has become of it."""
    figures = []
    for photo in Session.execute(listing()):
        name = html.escape(photo.name)
        picture = f'<img src="/photos/{photo.id}/thumbnail.jpg" alt="">' if photo.state == "ready" else photo.state
        figures.append(
            f'<figure data-id="{photo.id}" data-name="{name}" data-state="{photo.state}">{picture} {name}</figure>'
        )
    return "<!doctype html><title>Album</title>\n" + "\n".join(figures)


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


def main(port: int) -> None:
    """Serve until Ctrl-C."""
    with make_server("127.0.0.1", port, site) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8000)

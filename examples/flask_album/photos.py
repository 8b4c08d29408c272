"""A blueprint with its pages, its command and its task."""

from __future__ import annotations

import io
from typing import Any

from flask import Blueprint, abort, redirect, render_template, request, url_for
from PIL import Image, ImageOps
from sqlalchemy import Select, and_, case, select
from werkzeug.wrappers import Response

import pgqueue
from flask_album.extensions import Base, db, pq
from flask_album.models import Photo, Thumbnail
from pgqueue.tables import tables

SIZE = 256
blueprint = Blueprint("photos", __name__, cli_group=None)


@blueprint.cli.command("create-tables")
def create_tables() -> None:
    """Make the tables of the album; those of the queue are made by `flask pgqueue migrate`."""
    Base.metadata.create_all(db.engine)


@blueprint.get("/")
def index() -> str:
    """Every photograph, and what has become of it."""
    return render_template("index.html", photos=db.session.execute(listing()).all())


@blueprint.post("/photos")
def upload() -> Response:
    """Record a photograph and enqueue its job, in one transaction: neither is there without the other."""
    sent = request.files.get("photo")
    if sent is None or not sent.filename:
        abort(400, "which photo?")
    photo = Photo(name=sent.filename, picture=sent.read())
    db.session.add(photo)
    db.session.flush()  # the photo gets its id
    photo.job_id = make_thumbnail.options(using=db.session).enqueue(photo.id)
    db.session.commit()
    return redirect(url_for(".index"), 303)


@blueprint.get("/photos/<int(max=2147483647):photo_id>/thumbnail.jpg")
def thumbnail(photo_id: int) -> Response:
    """The small picture."""
    found = db.session.get(Thumbnail, photo_id) or abort(404)
    return Response(found.picture, content_type="image/jpeg")


@pq.task(queue="album", max_attempts=2, retry=pgqueue.Fixed(0.2))
def make_thumbnail(photo_id: int) -> None:
    """Make the thumbnail of one photograph.

    It runs in an application context of its own, so `db.session` belongs to this job alone and is gone after it. The block
    adds the completion of the job to the transaction: the thumbnail is written exactly once, whatever dies when.
    """
    photo = db.session.get(Photo, photo_id)
    if photo is None:
        raise pgqueue.Discard("the photograph was deleted in the meantime")
    small = shrunk(photo.picture)
    with pgqueue.current_job().transaction(using=db.session):
        db.session.merge(Thumbnail(photo_id=photo_id, picture=small))
    db.session.commit()


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

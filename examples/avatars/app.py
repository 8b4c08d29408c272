"""Avatars: people upload photographs, workers make thumbnails of them.

Three things to look at, most important first:

1. `upload` records a picture and enqueues its job in ONE transaction. Either both exist or neither does: no upload
   without a thumbnail because the process died in between, no job that looks for an upload that was rolled back.
2. `make_thumbnail` may run twice, because a worker can die after the work and before the word that it is done. So
   running it again has to give the same result: the file is replaced whole, the row is updated.
3. What it writes carries `token`, the fencing token of its claim. A worker that hung, lost its job to another one and
   wakes up late has an older token, and its write changes nothing.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import psycopg
from PIL import Image, ImageOps

import pgqueue

SIZE = 256
THUMBNAILS = Path(os.environ.get("AVATARS_THUMBNAILS", "thumbnails"))

# Where the queue is comes from the environment: PGQUEUE_DATABASE_URL, PGQUEUE_SCHEMA. Nothing is connected yet.
pq = pgqueue.PgQueue()

TABLES = """
    CREATE SCHEMA IF NOT EXISTS avatars_demo;

    CREATE TABLE IF NOT EXISTS avatars_demo.upload (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        name text NOT NULL,
        picture bytea NOT NULL,
        uploaded_at timestamptz NOT NULL DEFAULT now()
    );

    CREATE TABLE IF NOT EXISTS avatars_demo.thumbnail (
        upload_id bigint PRIMARY KEY REFERENCES avatars_demo.upload,
        file text NOT NULL,
        attempt integer NOT NULL,
        token bigint NOT NULL
    );
"""


def upload(connection: psycopg.Connection[Any], name: str, picture: bytes) -> int:
    """Record a picture and enqueue the job that makes its thumbnail, in one transaction; returns the upload's id."""
    with connection.transaction():
        [(upload_id,)] = connection.execute(
            "INSERT INTO avatars_demo.upload (name, picture) VALUES (%s, %s) RETURNING id", (name, picture)
        ).fetchall()
        # `using`: the job travels in the caller's transaction. Outside of this block nobody sees one without the other.
        make_thumbnail.enqueue(upload_id, using=connection)
    return int(upload_id)


@pq.task(queue="avatars", max_attempts=3, retry=pgqueue.Delays(0.3, 0.6))
def make_thumbnail(upload_id: int) -> None:
    """Make the thumbnail of one upload.

    There is no error handling here on purpose: whatever Pillow raises fails this attempt. It is tried again after 0.3
    and 0.6 seconds, and after the third attempt the job lies in the dead letters with the reason.
    """
    job = pgqueue.current_job()
    with connect() as connection:
        row = connection.execute("SELECT picture FROM avatars_demo.upload WHERE id = %s", (upload_id,)).fetchone()
        if row is None:
            raise pgqueue.Discard("the upload was deleted in the meantime")
        file = THUMBNAILS / f"{upload_id}.jpg"
        replace(file, thumbnail(row[0]))
        connection.execute(
            """
            INSERT INTO avatars_demo.thumbnail AS mine (upload_id, file, attempt, token) VALUES (%s, %s, %s, %s)
            ON CONFLICT (upload_id) DO UPDATE
            SET file = excluded.file, attempt = excluded.attempt, token = excluded.token
            WHERE mine.token < excluded.token
            """,
            (upload_id, str(file), job.attempt, job.token),
        )


def thumbnail(picture: bytes) -> bytes:
    """The middle of the picture, upright, as a square JPEG."""
    with Image.open(io.BytesIO(picture)) as image:
        ImageOps.exif_transpose(image, in_place=True)
        square = ImageOps.fit(image.convert("RGB"), (SIZE, SIZE), Image.Resampling.LANCZOS)
    output = io.BytesIO()
    square.save(output, "JPEG", quality=90)
    return output.getvalue()


def replace(file: Path, content: bytes) -> None:
    """Write the file whole or not at all: whoever is killed halfway leaves no half of a thumbnail behind."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}.{pgqueue.current_job().token}")
    unfinished.write_bytes(content)
    unfinished.replace(file)


def connect() -> psycopg.Connection[Any]:
    """A connection to the database of the queue. One per job is enough here; a larger app would keep a pool.

    Autocommit: no transaction stays open while Pillow works.
    """
    return psycopg.connect(pq.settings.database_url or "", autocommit=True)


def main(files: list[str]) -> None:
    """Upload the files named on the command line."""
    with connect() as connection:
        connection.execute(TABLES)
        for file in files:
            print(f"{file}: upload {upload(connection, Path(file).name, Path(file).read_bytes())}")


if __name__ == "__main__":
    main(sys.argv[1:])

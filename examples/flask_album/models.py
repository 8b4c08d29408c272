"""Two tables: what was uploaded, and what was made of it."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from flask_album.extensions import Base


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

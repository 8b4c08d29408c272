"""Two tables: what was uploaded, and what was made of it. They are made by this application's own Alembic."""

from __future__ import annotations

import os

import sqlalchemy
from sqlalchemy import BigInteger, ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, scoped_session, sessionmaker

# SQLAlchemy wants the name of the driver in the URL, and the queue must not have it.
DATABASE_URL = os.environ.get("PGQUEUE_DATABASE_URL", "postgresql:///album")
engine = sqlalchemy.create_engine(DATABASE_URL.replace("postgresql://", "postgresql+psycopg://", 1))
Session = scoped_session(sessionmaker(engine))


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

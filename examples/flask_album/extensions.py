"""What every part of the application imports. Neither object knows an application yet: `create_app` makes one."""

from __future__ import annotations

from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from pgqueue.contrib.flask import PgQueue


class Base(DeclarativeBase):
    """The models' base class."""


db = SQLAlchemy(metadata=Base.metadata)
pq = PgQueue()

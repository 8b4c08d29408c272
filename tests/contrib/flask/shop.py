"""Applications for tests: one object `pq` of the extension, any number of applications, and sessions of Flask-SQLAlchemy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgqueue.contrib.flask import PgQueue
from tests.callers import sqlalchemy_url


class Shop:
    """A fresh extension, its database object and a model, as a package of an application has them at module level."""

    def __init__(self) -> None:
        class Base(DeclarativeBase):
            """The models' base class."""

        class Order(Base):
            """A business row."""

            __tablename__ = "shop_order"

            id: Mapped[int] = mapped_column(primary_key=True)
            note: Mapped[str] = mapped_column(unique=True)

        self.Order = Order
        self.db = SQLAlchemy(metadata=Base.metadata)
        self.pq = PgQueue()
        self.blueprint = flask.Blueprint("orders", __name__)

    def app(self, database: str, name: str = "shop", **config: Any) -> flask.Flask:
        """An application on this database, with the business table in it."""
        app = flask.Flask(name)
        uri = sqlalchemy_url(database)
        app.config.from_mapping({"SQLALCHEMY_DATABASE_URI": uri, "TESTING": True, **config})
        self.db.init_app(app)
        self.pq.init_app(app)
        app.register_blueprint(self.blueprint)
        with app.app_context():
            self.db.create_all()
        return app

    def orders(self, app: flask.Flask) -> list[str]:
        """The notes of all orders, as a session of its own sees them."""
        with app.app_context():
            return [row.note for row in self.db.session.execute(text("SELECT note FROM shop_order ORDER BY id"))]


@contextmanager
def closing(*apps: flask.Flask) -> Iterator[None]:
    """What the applications have opened is closed at the end of the block."""
    try:
        yield
    finally:
        for app in apps:
            app.extensions["pgqueue"].close()
            with app.app_context():
                app.extensions["sqlalchemy"].engine.dispose()

"""An album: people upload photographs, workers make thumbnails of them. Flask, Flask-SQLAlchemy, pgqueue.

`flask --app flask_album run` serves the pages, `flask --app flask_album pgqueue worker` makes the thumbnails. Both call
`create_app`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask import Flask

from flask_album import photos
from flask_album.extensions import db, pq


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """An application; its configuration is that of the environment (FLASK_SQLALCHEMY_DATABASE_URI, FLASK_PGQUEUE_…)."""
    app = Flask(__name__)
    app.config.from_prefixed_env()
    app.config.from_mapping(config or {})
    db.init_app(app)
    pq.init_app(app)  # the database is that of SQLALCHEMY_DATABASE_URI, since PGQUEUE_DATABASE_URL says no other
    app.register_blueprint(photos.blueprint)
    return app

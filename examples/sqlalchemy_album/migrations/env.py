"""How Alembic runs here. One argument is about the queue: `include_name` keeps its tables out of autogenerate."""

from __future__ import annotations

from alembic import context

from pgqueue.tables import exclude_from_autogenerate
from sqlalchemy_album.models import Base, engine

with engine.connect() as connection:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_schemas=True,
        include_name=exclude_from_autogenerate(),
    )
    with context.begin_transaction():
        context.run_migrations()

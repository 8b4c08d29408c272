"""Photographs and their thumbnails."""

import sqlalchemy as sa
from alembic import op

revision = "first"
down_revision = None


def upgrade() -> None:
    """Make both tables."""
    op.create_table(
        "photo",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("picture", sa.LargeBinary, nullable=False),
        sa.Column("job_id", sa.BigInteger),
    )
    op.create_table(
        "thumbnail",
        sa.Column("photo_id", sa.Integer, sa.ForeignKey("photo.id"), primary_key=True),
        sa.Column("picture", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_table("thumbnail")
    op.drop_table("photo")

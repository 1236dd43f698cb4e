"""Removed uploads, which jobs stored at the same moment must not name."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "removed_uploads",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("removed_at", sa.BigInteger(), nullable=False),
    )

"""Bounds of each job's kept events."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("first_event_id", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("jobs", sa.Column("thinned_to", sa.Integer(), nullable=False, server_default="0"))

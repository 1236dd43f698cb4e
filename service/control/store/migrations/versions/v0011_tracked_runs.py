"""Runs in experiment trackers, and up to which event each is written."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "tracked_runs",
        sa.Column("job_number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
                  sa.ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("tracker", sa.String(16), primary_key=True),
        sa.Column("written_to", sa.Integer(), nullable=False),
        sa.Column("place", sa.Text()),
        sa.Column("trouble", sa.Text()),
    )  # fmt: skip

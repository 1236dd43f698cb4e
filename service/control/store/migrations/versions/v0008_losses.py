"""Times of each job's failures and cluster losses since its last progress."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("losses", sa.Text(), nullable=True))

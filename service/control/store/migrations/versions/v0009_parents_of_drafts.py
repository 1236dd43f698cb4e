"""Number of folders above a draft's that were created for it."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("drafts", sa.Column("num_parents", sa.Integer(), nullable=False, server_default="0"))

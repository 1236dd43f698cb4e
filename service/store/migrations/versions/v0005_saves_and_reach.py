"""What a job's run says of its checkpoints, and since when its cluster has not been reached."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("saves", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("unreachable_since", sa.BigInteger(), nullable=True))

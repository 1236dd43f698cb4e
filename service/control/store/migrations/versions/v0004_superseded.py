"""Mark on metrics that arrived after a newer attempt or worker group had begun."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("events", sa.Column("superseded", sa.String(length=4), nullable=True))

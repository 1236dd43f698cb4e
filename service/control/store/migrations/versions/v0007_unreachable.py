"""Index of the jobs marked with an unreachable cluster."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    condition = sa.text("unreachable_since IS NOT NULL")
    op.create_index(
        "ix_jobs_unreachable",
        "jobs",
        ["state", "number"],
        unique=False,
        sqlite_where=condition,
        postgresql_where=condition,
    )

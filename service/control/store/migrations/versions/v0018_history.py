"""Index of a job's events other than metrics, which its page lists."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    condition = sa.text("kind <> 'metric'")
    op.create_index(
        "ix_events_history",
        "events",
        ["job_number", "id"],
        unique=False,
        sqlite_where=condition,
        postgresql_where=condition,
    )

"""Last loss of each job, and an index of all that lists are filtered and sorted by."""

import json
import math

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
ROWS_AT_ONCE = 100
"""Jobs in memory at once: the last metric of a large model has a megabyte of expert loads."""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("loss", sa.Float(), nullable=True))
    jobs = sa.table("jobs", sa.column("number"), sa.column("last_metric"), sa.column("loss"))
    connection = op.get_bind()
    change = sa.update(jobs).where(jobs.c.number == sa.bindparam("job")).values(loss=sa.bindparam("loss"))
    query = sa.select(jobs.c.number, jobs.c.last_metric).where(jobs.c.last_metric.is_not(None))
    last_number = 0
    while metrics := connection.execute(
        query.where(jobs.c.number > last_number).order_by(jobs.c.number).limit(ROWS_AT_ONCE)
    ).all():
        losses = [{"job": number, "loss": loss} for number, text in metrics if (loss := _loss(text)) is not None]
        if losses:
            connection.execute(change, losses)
        last_number = metrics[-1][0]
    op.create_index(
        "ix_jobs_listing", "jobs", ["number", "id", "owner", "name", "state", "step", "num_steps", "loss"], unique=False
    )


def _loss(text: str) -> float | None:
    metric = json.loads(text)
    loss = metric.get("loss") if isinstance(metric, dict) else None
    if not isinstance(loss, int | float) or isinstance(loss, bool) or not math.isfinite(loss):
        return None
    return float(loss)

"""Webhooks, and the outbox of what they are sent."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.String(128), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("name", name=op.f("uq_webhooks_name")),
    )
    op.create_table(
        "deliveries",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(24), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("webhook_id", sa.String(16), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(16)),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.BigInteger(), nullable=False),
        sa.Column("queued_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.Column("last_attempt", sa.Text()),
        sa.UniqueConstraint("id", name=op.f("uq_deliveries_id")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_deliveries_webhook_id_number", "deliveries", ["webhook_id", "number"])
    condition = sa.text("state = 'pending'")
    op.create_index("ix_deliveries_due", "deliveries", ["webhook_id", "due_at"], sqlite_where=condition,
                    postgresql_where=condition)  # fmt: skip

"""Sweeps, their members and decisions."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.add_column("jobs", sa.Column("held", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("pause_at", sa.BigInteger()))
    op.create_table(
        "sweeps",
        sa.Column("number", number, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(18), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("rungs", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("request", sa.String(16)),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.UniqueConstraint("id", name="uq_sweeps_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_sweeps_state_number", "sweeps", ["state", "number"])
    op.create_index("uq_sweeps_key", "sweeps", ["owner", "idempotency_key"], unique=True)
    op.create_table(
        "sweep_members",
        sa.Column("sweep_number", number, sa.ForeignKey("sweeps.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("job_number", number, nullable=False),
        sa.Column("field_values", sa.Text(), nullable=False),
        sa.Column("rung", sa.Integer(), nullable=False),
        sa.Column("is_out", sa.Integer(), nullable=False),
        sa.Column("value", sa.Text()),
        sa.UniqueConstraint("job_id", name="uq_sweep_members_job_id"),
    )
    op.create_table(
        "sweep_decisions",
        sa.Column("sweep_number", number, sa.ForeignKey("sweeps.number", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.String(160), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
    )

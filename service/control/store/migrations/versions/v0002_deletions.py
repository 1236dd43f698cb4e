"""Table of deleted jobs, and idempotency keys that outlive their jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_KEYS_TO_JOBS = "fk_idempotency_keys_job_number"


def upgrade() -> None:
    op.create_table(
        "deletions",
        sa.Column("job_id", sa.String(length=16), nullable=False),
        sa.Column("job_number", _NUMBER, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("storage", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(length=160), nullable=False),
        sa.Column("requested_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_deletions")),
        sa.UniqueConstraint("job_number", name=op.f("uq_deletions_job_number")),
    )
    with op.batch_alter_table("idempotency_keys") as keys:
        keys.drop_constraint(op.f(_KEYS_TO_JOBS), type_="foreignkey")

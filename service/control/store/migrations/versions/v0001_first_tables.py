"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", _NUMBER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("storage", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.Column("queued_at", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=True),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("num_steps", sa.BigInteger(), nullable=False),
        sa.Column("last_metric", sa.Text(), nullable=True),
        sa.Column("last_event_id", sa.Integer(), nullable=False),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("request", sa.String(length=16), nullable=True),
        sa.Column("requested_at", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("launch", sa.String(length=16), nullable=True),
        sa.Column("token_hash", sa.String(length=64), nullable=True),
        sa.Column("gang", sa.Text(), nullable=True),
        sa.Column("dashboard_url", sa.Text(), nullable=True),
        sa.Column("unseen_since", sa.BigInteger(), nullable=True),
        sa.Column("stopped_at", sa.BigInteger(), nullable=True),
        sa.Column("retry_at", sa.BigInteger(), nullable=True),
        sa.Column("group_phase", sa.String(length=16), nullable=True),
        sa.Column("group_phase_at", sa.BigInteger(), nullable=True),
        sa.Column("group_reason", sa.Text(), nullable=True),
        sa.Column("unfit_for", sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("id", name=op.f("uq_jobs_id")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_jobs_state_number"), "jobs", ["state", "number"], unique=False)
    op.create_index(op.f("ix_jobs_state_queued_at_number"), "jobs", ["state", "queued_at", "number"], unique=False)
    op.create_table(
        "leases",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(length=160), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_leases")),
    )
    op.create_table(
        "events",
        sa.Column("job_number", _NUMBER, nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("actor", sa.String(length=160), nullable=False),
        sa.Column("group", sa.Integer(), nullable=True),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_events_job_number"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_number", "id", name=op.f("pk_events")),
    )
    op.create_index(
        op.f("ix_events_job_number_kind_step_id"), "events", ["job_number", "kind", "step", "id"], unique=False
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("owner", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("job_number", _NUMBER, nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_number"], ["jobs.number"], name=op.f("fk_idempotency_keys_job_number"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("owner", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "labels",
        sa.Column("job_number", _NUMBER, nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("value", sa.String(length=63), nullable=False),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name=op.f("fk_labels_job_number"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_number", "key", name=op.f("pk_labels")),
    )
    op.create_index(op.f("ix_labels_key_value_job_number"), "labels", ["key", "value", "job_number"], unique=False)
    op.create_table(
        "writers",
        sa.Column("job_number", _NUMBER, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("writer", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("group", sa.Integer(), nullable=True),
        sa.Column("next_seq", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_number"], ["jobs.number"], name=op.f("fk_writers_job_number"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_number", "attempt", "writer", name=op.f("pk_writers")),
    )

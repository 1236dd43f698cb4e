"""The tables. Times are microseconds since 1970 UTC."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite auto-increments only INTEGER


def _partial_index(condition: str) -> dict[str, Any]:
    """Options of a partial index, for each database."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


jobs = Table(
    "jobs",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),  # order of creation
    Column("id", String(16), nullable=False, unique=True),
    Column("version", Integer, nullable=False),  # of this row's format
    Column("owner", String(128), nullable=False),
    Column("name", String(63), nullable=False),
    Column("labels", Text, nullable=False),  # JSON; `labels` below is the index over it
    Column("spec", Text, nullable=False),  # JSON, as it was accepted
    Column("plan", Text),  # JSON; None until planned
    Column("storage", Text, nullable=False),  # fsspec URL of the job's folder
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("queued_at", BigInteger, nullable=False),  # order of the queue
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("step", BigInteger, nullable=False),
    Column("num_steps", BigInteger, nullable=False),
    Column("last_metric", Text),  # JSON
    Column("loss", Float),  # its loss, if that is finite
    Column("saves", Text),  # JSON: last committed checkpoint, and failures since
    Column("last_event_id", Integer, nullable=False),
    Column("first_event_id", Integer, nullable=False, server_default="1"),  # all events from here on are kept
    Column("thinned_to", Integer, nullable=False, server_default="0"),  # up to here, only permanent events are left
    Column("result", Text),  # JSON
    # Request that the run has not obeyed yet.
    Column("request", String(16)),
    Column("requested_at", BigInteger),
    # Current or last attempt.
    Column("attempt", Integer, nullable=False),  # 0 before the first
    Column("failures", Integer, nullable=False),  # counted by retry.max_failures, since the last progress
    Column("losses", Text),  # JSON: times of failures, and attempts lost with their cluster
    Column("launch", String(16)),  # None: nothing on the cluster; "due": may be there; "submitted": is there
    Column("token_hash", String(64)),
    Column("gang", Text),  # JSON: resources that the attempt holds
    Column("dashboard_url", Text),
    Column("unreachable_since", BigInteger),  # cluster silent since, as the job's reason says
    Column("unseen_since", BigInteger),  # cluster answers that the submission is unknown since
    Column("unconfirmed_since", BigInteger),  # recovered from storage at; not confirmed by the cluster yet
    Column("stopped_at", BigInteger),  # last forced stop of the driver
    Column("retry_at", BigInteger),  # earliest time of the next attempt
    Column("group_phase", String(16)),  # "running", "waiting" or "recovering", from the run
    Column("group_phase_at", BigInteger),  # by the run's clock: records may arrive out of order
    Column("group_reason", Text),
    # Of a member of a sweep.
    Column("held", Integer, nullable=False, server_default="0"),  # 1: its sweep has not started it yet
    Column("pause_at", BigInteger),  # step of its next rung
    # Fingerprint of the cluster that this job can never fit on.
    Column("unfit_for", String(64)),
    Index(None, "state", "queued_at", "number"),  # the queue
    Index(None, "state", "number"),  # pages of one state, newest first
    # All that lists are filtered and sorted by: SQLite would read whole rows, with their plans.
    Index("ix_jobs_listing", "number", "id", "owner", "name", "state", "step", "num_steps", "loss"),
    Index("ix_jobs_unreachable", "state", "number", **_partial_index("unreachable_since IS NOT NULL")),  # mostly empty
    sqlite_autoincrement=True,  # numbers are never reused, so cursors stay valid
)

labels = Table(
    "labels",
    metadata,
    Column("job_number", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("key", String(63), primary_key=True),
    Column("value", String(63), nullable=False),
    Index(None, "key", "value", "job_number"),
)

events = Table(
    "events",
    metadata,
    Column("job_number", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("id", Integer, primary_key=True),  # one sequence per job over all kinds, from 1, without gaps
    Column("version", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("time", BigInteger, nullable=False),
    Column("attempt", Integer),
    Column("actor", String(160), nullable=False),
    Column("group", Integer),  # worker group that recorded it
    Column("step", BigInteger),  # of metrics and checkpoints
    Column("superseded", String(4)),  # late metrics: superseded by a newer "run" or "step"
    Column("data", Text, nullable=False),  # JSON
    Index(None, "job_number", "kind", "step", "id"),
    Index("ix_events_history", "job_number", "id", **_partial_index("kind <> 'metric'")),  # few among many metrics
)

# A cache of `events`: backups leave it out.
curve_chunks = Table(
    "curve_chunks",
    metadata,
    Column("job_number", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("after_id", Integer, primary_key=True),  # the chunk has the metric events after this one
    Column("version", Integer, nullable=False),
    Column("to_id", Integer, nullable=False),  # up to this one
    Column("data", LargeBinary, nullable=False),  # NumPy archive of `JobCurves.packed`
)

writers = Table(
    "writers",
    metadata,
    Column("job_number", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("writer", String(32), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("group", Integer),  # None for the driver
    Column("next_seq", BigInteger, nullable=False),  # all records below are stored
)

tracked_runs = Table(
    "tracked_runs",
    metadata,
    Column("job_number", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("tracker", String(16), primary_key=True),
    Column("written_to", Integer, nullable=False),  # up to this event, the tracker has the job's records
    Column("place", Text),  # URL or folder of the run, once it is open
    Column("trouble", Text),  # why it cannot be written now
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String(128), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("fingerprint", String(64), nullable=False),  # of the request that first used the key
    Column("job_number", _Number, nullable=False),  # the job may be deleted; its key stays used
    Column("created_at", BigInteger, nullable=False),
)

sweeps = Table(
    "sweeps",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),  # order of creation
    Column("id", String(18), nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("owner", String(128), nullable=False),
    Column("name", String(63), nullable=False),
    Column("body", Text, nullable=False),  # JSON, as it was posted
    Column("metric", Text, nullable=False),
    Column("rungs", Text, nullable=False),  # JSON: steps, in order
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("request", String(16)),  # "cancel"
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("idempotency_key", String(255)),
    Column("fingerprint", String(64), nullable=False),  # of the posted body
    Index(None, "state", "number"),
    Index("uq_sweeps_key", "owner", "idempotency_key", unique=True),  # NULLs differ from one another
    sqlite_autoincrement=True,
)

sweep_members = Table(
    "sweep_members",
    metadata,
    Column("sweep_number", _Number, ForeignKey("sweeps.number", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),  # from 1, in the order of values
    Column("version", Integer, nullable=False),
    Column("job_id", String(16), nullable=False, unique=True),  # the job may be deleted
    Column("job_number", _Number, nullable=False),
    Column("field_values", Text, nullable=False),  # JSON by field
    Column("rung", Integer, nullable=False),  # rungs survived
    Column("is_out", Integer, nullable=False),  # 1: not among the best of its rung
    Column("value", Text),  # JSON: last value of the metric of a job that holds no resources, with its step
)

sweep_decisions = Table(
    "sweep_decisions",
    metadata,
    Column("sweep_number", _Number, ForeignKey("sweeps.number", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True),  # from 1
    Column("version", Integer, nullable=False),
    Column("time", BigInteger, nullable=False),
    Column("actor", String(160), nullable=False),
    Column("data", Text, nullable=False),  # JSON: kind, reason and members
)

deletions = Table(
    "deletions",
    metadata,
    Column("job_id", String(16), primary_key=True),
    Column("job_number", _Number, nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    Column("owner", String(128), nullable=False),
    Column("name", String(63), nullable=False),
    Column("storage", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("actor", String(160), nullable=False),
    Column("requested_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),  # None until files and rows are removed
)

drafts = Table(
    "drafts",
    metadata,
    Column("job_id", String(16), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("storage", Text, nullable=False),  # folder being filled
    Column("created_at", BigInteger, nullable=False),
    Column("num_parents", Integer, nullable=False, server_default="0"),  # folders above it created for it
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("holder", String(160), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("value", String(64), nullable=False),  # hexadecimal
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("name", String(63), nullable=False, unique=True),
    Column("owner", String(128), nullable=False),
    Column("source", String(16), nullable=False),  # "api" or "settings"
    Column("url", Text, nullable=False),
    Column("secret", String(128), nullable=False),
    Column("options", Text, nullable=False),  # JSON: WebhookOptions
    Column("created_at", BigInteger, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),  # order of the events
    Column("id", String(24), nullable=False, unique=True),
    Column("version", Integer, nullable=False),
    # No foreign key: a webhook that is removed meanwhile must not fail the change of a job that it is told of.
    Column("webhook_id", String(16), nullable=False),
    Column("type", String(32), nullable=False),
    Column("job_id", String(16)),  # None for tests
    Column("body", Text, nullable=False),  # as sent
    Column("created_at", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),  # "pending", "delivered" or "failed"
    Column("attempts", Integer, nullable=False),
    Column("due_at", BigInteger, nullable=False),  # earliest time of the next attempt
    Column("queued_at", BigInteger, nullable=False),  # given up some time after this
    Column("finished_at", BigInteger),
    Column("last_attempt", Text),  # JSON: DeliveryAttempt
    Index(None, "webhook_id", "number"),
    Index("ix_deliveries_due", "webhook_id", "due_at", **_partial_index("state = 'pending'")),
    sqlite_autoincrement=True,
)

removed_uploads = Table(
    "removed_uploads",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("removed_at", BigInteger, nullable=False),
)

"""The tables. Times are microseconds since 1970 UTC: every database orders and compares them alike."""

from typing import Any

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, MetaData, String, Table, Text, text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_Number = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER counts up by itself on SQLite


def _where(condition: str) -> dict[str, Any]:
    """Options that limit an index to the rows of which this holds, in the words of each database."""
    return {"sqlite_where": text(condition), "postgresql_where": text(condition)}


jobs = Table(
    "jobs",
    metadata,
    Column("number", _Number, primary_key=True, autoincrement=True),  # the order in which jobs came
    Column("id", String(16), nullable=False, unique=True),
    Column("version", Integer, nullable=False),  # of this row's format
    Column("owner", String(128), nullable=False),
    Column("name", String(63), nullable=False),
    Column("labels", Text, nullable=False),  # JSON; `labels` below is the index over it
    Column("spec", Text, nullable=False),  # JSON, as it was accepted
    Column("plan", Text),  # JSON; None while no cluster was seen
    Column("storage", Text, nullable=False),  # fsspec URL of the job's own folder
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("queued_at", BigInteger, nullable=False),  # first come, first served by this
    Column("started_at", BigInteger),
    Column("finished_at", BigInteger),
    Column("step", BigInteger, nullable=False),
    Column("num_steps", BigInteger, nullable=False),
    Column("last_metric", Text),  # JSON
    Column("saves", Text),  # JSON: the last checkpoint that was committed, and those that failed since
    Column("last_event_id", Integer, nullable=False),
    Column("first_event_id", Integer, nullable=False, server_default="1"),  # every event from here on is kept
    Column(
        "thinned_to", Integer, nullable=False, server_default="0"
    ),  # to here, only those that are kept for ever
    Column("result", Text),  # JSON
    # The request that the run has yet to obey.
    Column("request", String(16)),
    Column("requested_at", BigInteger),
    # The attempt now running, or the last one.
    Column("attempt", Integer, nullable=False),  # 0 before the first
    Column(
        "failures", Integer, nullable=False
    ),  # of retry.max_failures, over all attempts since the last checkpoint
    Column("losses", Text),  # JSON: when those were, and which attempts were lost with their cluster
    Column("launch", String(16)),  # None: nothing on the cluster; "due": may be there; "submitted": is there
    Column("token_hash", String(64)),
    Column("gang", Text),  # JSON: what the attempt holds of the cluster
    Column("dashboard_url", Text),
    Column("unreachable_since", BigInteger),  # the cluster has not answered since then, and the job says so
    Column("unseen_since", BigInteger),  # the cluster has said since then that it knows no such submission
    Column(
        "unconfirmed_since", BigInteger
    ),  # recovered from storage then; the cluster has not said yet that it runs
    Column("stopped_at", BigInteger),  # when its driver was last ended by force
    Column("retry_at", BigInteger),  # the next attempt comes no earlier
    Column("group_phase", String(16)),  # "running", "waiting" or "recovering", as the run itself says
    Column("group_phase_at", BigInteger),  # by the run's clock: news may arrive out of order
    Column("group_reason", Text),
    # The fingerprint of the cluster that this job can never fit; another cluster is another chance.
    Column("unfit_for", String(64)),
    Index(None, "state", "queued_at", "number"),  # the queue
    Index(None, "state", "number"),  # pages of one state, newest first
    Index(
        "ix_jobs_unreachable", "state", "number", **_where("unreachable_since IS NOT NULL")
    ),  # mostly empty
    sqlite_autoincrement=True,  # a number is never used twice, so a cursor never points at another job
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
    Column("id", Integer, primary_key=True),  # one sequence a job over all kinds, from 1, without gaps
    Column("version", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("time", BigInteger, nullable=False),
    Column("attempt", Integer),
    Column("actor", String(160), nullable=False),
    Column("group", Integer),  # of the worker group that recorded it
    Column("step", BigInteger),  # of metrics and checkpoints
    Column("superseded", String(4)),  # of metrics that came late: by a newer "run", or of this "step", too
    Column("data", Text, nullable=False),  # JSON
    Index(None, "job_number", "kind", "step", "id"),
)

writers = Table(
    "writers",
    metadata,
    Column("job_number", _Number, ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("writer", String(32), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("group", Integer),  # None for the driver
    Column("next_seq", BigInteger, nullable=False),  # every record below is stored
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("owner", String(128), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("fingerprint", String(64), nullable=False),  # of the request that first used the key
    Column("job_number", _Number, nullable=False),  # of a job that may be deleted: its key stays used
    Column("created_at", BigInteger, nullable=False),
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
    Column("finished_at", BigInteger),  # None while something of the job is left
)

drafts = Table(
    "drafts",
    metadata,
    Column("job_id", String(16), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("storage", Text, nullable=False),  # the folder that is being filled
    Column("created_at", BigInteger, nullable=False),
    Column("num_parents", Integer, nullable=False, server_default="0"),  # of those above it: made for it
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("holder", String(160), nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)

"""Launch and result of an attempt, both on the job's storage."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from moe.plan import Plan
from moe.spec import JobSpec

LAUNCH_VERSION = RESULT_VERSION = 1
FENCED_EXIT_CODE = 75
"""Exit code of a driver that ended at once, because its attempt had one already (`EX_TEMPFAIL` of sysexits.h)."""
CALIBRATION_MARK = "calibration: "
"""Prefix of the `Calibration` in the measuring process's output."""


class _LaunchFact(BaseModel):
    # The writer may be of an older or newer release, with fewer or more fields.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Launch(_LaunchFact):
    """All that a driver needs to run one attempt, in a private file."""

    version: int = LAUNCH_VERSION
    job_id: str
    attempt: int = Field(ge=1)
    spec: JobSpec
    plan: Plan
    trials: tuple[Plan, ...] = ()
    """Plans to run for a few steps each; the fastest replaces `plan`."""
    gpus_per_worker: int = Field(ge=0)
    """`resources.gpus_per_worker` with `auto` resolved."""
    pool: str = ""
    """Node pool on Kubernetes; "" on a standing Ray cluster."""
    owner: str = ""
    """Owner of the job, for labels and annotations."""
    instance: str = ""
    """Installation of the service that launches it, for labels; "" of an earlier release."""
    storage: str
    """fsspec URL of the job's folder."""
    cache: str
    """Local folder for prepared corpora, shared by jobs."""
    data_roots: tuple[str, ...] = ()
    """Folders for users' corpora, checked at the POST and by every reader."""
    allowed_code: tuple[str, ...] = ()
    """Functions of users' modules, checked at the POST and at import."""
    events_url: str
    """URL at which drivers and workers reach the control plane."""
    token: SecretStr
    """Authorizes posting records of this job and attempt, and nothing else."""
    max_failures: int = Field(ge=0)
    """Worker groups that this attempt may still restart."""
    failures_left: dict[str, int] = {}
    """The same for kinds of failure with a limit of their own."""
    group_start: int = Field(default=0, ge=0)
    """Number of this attempt's first worker group."""
    pause_at: int | None = Field(default=None, ge=1)
    """Step to pause at, where the job's sweep compares its members."""

    @property
    def submission_id(self) -> str:
        return submission_id(self.job_id, self.attempt)

    @field_serializer("token", when_used="json")
    def _token_in_clear(self, token: SecretStr) -> str:
        # Only the file holds the token; repr() and logs show asterisks.
        return token.get_secret_value()


class Result(_LaunchFact):
    """End of an attempt, written last by its driver: content of `result.json`."""

    version: int = RESULT_VERSION
    outcome: Literal["succeeded", "paused", "cancelled", "preempted", "failed"]
    """`preempted`: ended after a checkpoint, because a node or pod of it is about to end."""
    step: int = Field(ge=0)
    message: str = ""
    report: dict[str, Any] | None = None
    retryable: bool = True
    """False for a mistake in the data and a non-finite loss."""
    failure_kind: str = ""
    """`moe.spec.FailureKind` of the failure; "" if unknown."""


def submission_id(job_id: str, attempt: int) -> str:
    """Name of an attempt on the cluster, stable across crashes, so that nothing is launched twice."""
    return f"{job_id}-a{attempt}"


def parse_submission_id(submission_id: str) -> tuple[str, int] | None:
    """(job id, attempt) of a submission; None for another name."""
    job_id, _, attempt = submission_id.rpartition("-a")
    return (job_id, int(attempt)) if job_id and attempt.isdecimal() else None

"""Orders to a driver for its attempt, and its result at the end: both lie on the job's storage."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from moe.plan import Plan
from moe.spec import JobSpec

LAUNCH_VERSION = RESULT_VERSION = 1
CALIBRATION_MARK = "calibration: "
"""Prefix of a measured `Calibration` in the output of the process that measured it."""


class _LaunchFact(BaseModel):
    # An older or newer writer may know fewer or more fields than this reader.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Launch(_LaunchFact):
    """All that a driver needs to run one attempt: what its file on storage holds, readable by its owner only."""

    version: int = LAUNCH_VERSION
    job_id: str
    attempt: int = Field(ge=1)
    spec: JobSpec
    plan: Plan
    trials: tuple[Plan, ...] = ()
    """Plans to be run for a few steps each, of which the fastest takes the place of `plan`."""
    gpus_per_worker: int = Field(ge=0)
    """`resources.gpus_per_worker` with `auto` resolved."""
    storage: str
    """fsspec URL of the job's own folder."""
    cache: str
    """Local folder for prepared corpora, shared by jobs."""
    data_roots: tuple[str, ...] = ()
    """Folders for users' corpora: checked at the POST, and again by whoever reads them. None: no user's files."""
    allowed_code: tuple[str, ...] = ()
    """Functions of users' modules that may be called: checked at the POST, and again by whoever imports them."""
    events_url: str
    """The control plane, as drivers and workers reach it."""
    token: SecretStr
    """Admits records of this job and attempt, and nothing else."""
    max_failures: int = Field(ge=0)
    """Dead worker groups that this attempt may still make anew."""
    failures_left: dict[str, int] = {}
    """Likewise of each kind of failure that has a limit of its own."""
    group_start: int = Field(default=0, ge=0)
    """The number of this attempt's first worker group."""

    @property
    def submission_id(self) -> str:
        return submission_id(self.job_id, self.attempt)

    @field_serializer("token", when_used="json")
    def _token_in_clear(self, token: SecretStr) -> str:
        # The file is the one place where the token is written; repr() and logs show asterisks.
        return token.get_secret_value()


class Result(_LaunchFact):
    """The end of an attempt, written by its driver last: the content of `result.json`."""

    version: int = RESULT_VERSION
    outcome: Literal["succeeded", "paused", "cancelled", "failed"]
    step: int = Field(ge=0)
    message: str = ""
    report: dict[str, Any] | None = None
    retryable: bool = True
    """Whether another attempt could end otherwise; False for a mistake in the data or a non-finite loss."""
    failure_kind: str = ""
    """`moe.spec.FailureKind` of what failed; "" where nobody said."""


def submission_id(job_id: str, attempt: int) -> str:
    """The name of an attempt on the cluster: the same after any crash, so that nothing is launched twice."""
    return f"{job_id}-a{attempt}"

"""Interface to a cluster: facts, submissions by id, and their status.

A launcher decides nothing. Every call may block for seconds, may be repeated after a crash with the same arguments,
and raises `LauncherUnavailable` if the cluster is unreachable, which says nothing about its jobs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from moe.plan import Calibration
from moe.spec import ResourcesSpec
from service.control.launcher.offers import check_shared
from service.wire.launch import Launch

ClusterKind = Literal["own", "shared"]
"""A Ray cluster of the job's own on node pools, or the standing one."""


class LauncherUnavailable(Exception):
    """The cluster is unreachable; its jobs may still run, unless it `runs_nothing`."""

    def __init__(
        self, message: str, runs_nothing: bool = False, since: float | None = None, *, is_of_one_request: bool = False
    ) -> None:
        super().__init__(message)
        self.runs_nothing = runs_nothing
        """Whether the processes that run jobs are known to be dead."""
        self.since = since
        """Time since which it is unreachable, if known."""
        self.is_of_one_request = is_of_one_request
        """Whether only a request about this submission failed, while the cluster is observed."""


class LaunchRefusal(Exception):
    """The cluster rejected this submission; a retry would not help."""


class CalibrationUnsupported(Exception):
    """This kind of cluster is not measured; the message says what to do."""


class LaunchPostponed(Exception):
    """The cluster cannot take this submission now, by a rule that others may stop breaking: a quota."""


class _ClusterFact(BaseModel):
    # The writer may be of an older or newer release, with fewer or more fields.
    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeFacts(_ClusterFact):
    """A living node of the cluster, with its total resources."""

    id: str
    ip: str
    cpus: float
    gpus: float = 0
    memory_bytes: int
    accelerator: str | None = None
    """Type of the accelerators in the cluster's terms: "H100", "A100-40G"."""
    accelerator_memory_bytes: int | None = None
    """Memory of one accelerator, if known."""
    pool: str = ""
    """Node pool on Kubernetes, whose nodes a gang takes whole; "" on a standing Ray cluster."""
    exclusive: bool = False
    """Whether a gang takes the whole node even if it needs only a part."""
    price_per_hour: float | None = None
    """Price of the node, in the operator's currency."""


class ClusterFacts(_ClusterFact):
    """Nodes of the cluster and their calibration."""

    nodes: tuple[NodeFacts, ...]
    calibrations: tuple[Calibration, ...] = ()
    """Measurements of its devices, one per kind."""
    default_cluster: ClusterKind = "shared"
    """Cluster of jobs that name none."""

    @property
    def clusters(self) -> frozenset[ClusterKind]:
        """Kinds of clusters that have nodes."""
        return frozenset("own" if node.pool else "shared" for node in self.nodes)

    def cluster_of(self, resources: ResourcesSpec) -> ClusterKind:
        """Kind of cluster that a job with these resources runs on."""
        return resources.cluster or self.default_cluster

    def for_job(self, resources: ResourcesSpec) -> "ClusterFacts":
        """Facts of the nodes that a job with these resources may run on."""
        is_own = self.cluster_of(resources) == "own"
        return self.model_copy(update={"nodes": tuple(node for node in self.nodes if bool(node.pool) == is_own)})

    @property
    def accelerators(self) -> str | None:
        """All accelerator types, joined by "+"."""
        return "+".join(sorted({node.accelerator for node in self.nodes if node.accelerator})) or None

    def of_pool(self, pool: str) -> "ClusterFacts":
        """Facts of one node pool."""
        return self.model_copy(update={"nodes": tuple(node for node in self.nodes if node.pool == pool)})

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)


class Observation(_ClusterFact):
    """The cluster's report on one submission."""

    status: Literal["unknown", "pending", "running", "succeeded", "failed", "stopped"]
    """`unknown`: the cluster answered, and does not know the submission."""
    forgotten: bool = False
    """Whether an unknown submission ran on a cluster since replaced, so that it cannot reappear."""
    message: str = ""
    """Reason of its end, in one line."""
    waiting: str = ""
    """Reason why a pending submission waits, or trouble of a running one, in one line; "" for none."""
    output: str = ""
    """Last output of a failed submission's driver, including before its own log."""
    released: bool = True
    """False while an ended submission still has processes that hold resources."""
    preempted: bool = False
    """Whether it ended because its driver's node or its cluster was preempted or drained."""
    lost: bool = False
    """Whether it ended because its cluster was lost, which is no failure of the job."""
    refused: bool = False
    """Whether the cluster will never run it as submitted."""
    queued: bool = False
    """Whether a pending submission waits in the cluster's own queue."""

    @property
    def has_ended(self) -> bool:
        return self.status in ("succeeded", "failed", "stopped")


@dataclass(frozen=True)
class Submission:
    """An attempt of which the cluster has objects."""

    submission_id: str
    has_ended: bool


class Launcher(ABC):
    """A cluster that runs drivers."""

    @abstractmethod
    def cluster(self) -> ClusterFacts:
        """Living nodes and their resources. Raises LauncherUnavailable."""

    def check(self, resources: ResourcesSpec) -> None:
        """Check that the operator offers these resources. Raises SpecError."""
        check_shared(resources)

    def by_kind(self) -> Mapping[ClusterKind, "Launcher"]:
        """Launchers by kind of cluster. The default kind, for jobs that name none, comes first."""
        return {"shared": self}

    def of_pool(self, pool: str | None) -> "Launcher":
        """Launcher of the attempts on this node pool, or on the standing cluster (""); all of them if None."""
        if pool is None:
            return self
        return self.by_kind().get("own" if pool else "shared", self)

    @abstractmethod
    def submit(self, launch: Launch) -> None:
        """Start the attempt's driver, unless its submission id is known; writes the launch to storage first. Raises
        LauncherUnavailable (outcome unknown), OSError (storage not writable now), LaunchPostponed (not started, may be
        later), LaunchRefusal (will never start)."""

    @abstractmethod
    def observe(self, submission_id: str) -> Observation:
        """Status of a submission. Raises LauncherUnavailable."""

    @abstractmethod
    def stop(self, submission_id: str) -> None:
        """Stop a submission by force, if it runs. Raises LauncherUnavailable."""

    @abstractmethod
    def calibrate(self) -> Calibration:
        """Measure some devices and links, in seconds to minutes. Raises LauncherUnavailable,
        CalibrationUnsupported, LaunchRefusal if that fails."""

    @abstractmethod
    def dashboard_url(self, submission_id: str) -> str | None:
        """Web page about this submission, or None."""

    def queue_of(self, resources: ResourcesSpec) -> str:
        """Queue of the cluster that admits jobs with these resources; "" if this service admits them."""
        return ""

    def forget_job(self, job_id: str) -> None:  # noqa: B027 - most clusters keep nothing
        """Delete the objects of an ended job that the cluster still has. Raises LauncherUnavailable."""

    def submissions(self, instance: str) -> Sequence[Submission]:
        """Attempts of this installation of which the cluster still has objects, if it can list them. Raises
        LauncherUnavailable."""
        return ()

    def on_change(self, wake: Callable[[], None]) -> None:  # noqa: B027 - most launchers only answer
        """Call `wake`, from any thread, whenever an observation may have changed."""

    def close(self) -> None:  # noqa: B027 - most launchers hold nothing open
        """Close connections. Submissions continue."""

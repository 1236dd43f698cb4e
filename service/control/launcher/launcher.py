"""A cluster as the control plane sees it: facts, submissions by id, and what became of each.

A launcher never decides: it carries out one call and reports what it observed. Every call may block for
seconds, may be repeated after a crash with the same arguments, and raises `LauncherUnavailable` when the
cluster cannot be reached, which says nothing about the jobs on it.
"""

from abc import ABC, abstractmethod
from typing import Literal

from pydantic import BaseModel, ConfigDict

from moe.plan import Calibration
from service.wire.launch import Launch


class LauncherUnavailable(Exception):
    """The cluster cannot be reached now; its jobs may be well, unless it `runs_nothing`."""

    def __init__(self, message: str, runs_nothing: bool = False) -> None:
        super().__init__(message)
        self.runs_nothing = runs_nothing
        """Whether what jobs run on is known to be dead."""


class LaunchRefusal(Exception):
    """The cluster answered, and will not take this submission; trying again would not help."""


class _ClusterFact(BaseModel):
    # An older or newer writer may know fewer or more fields than this reader.
    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeFacts(_ClusterFact):
    """A living node of the cluster, with its whole resources, used or not."""

    id: str
    ip: str
    cpus: float
    gpus: float = 0
    memory_bytes: int
    accelerator: str | None = None
    """Name of the accelerators, as the cluster gives it: "H100", "A100-40G"; None without any."""
    accelerator_memory_bytes: int | None = None
    """Memory of one accelerator, where the cluster knows it."""


class ClusterFacts(_ClusterFact):
    """Resources of the cluster in all."""

    nodes: tuple[NodeFacts, ...]
    calibrations: tuple[Calibration, ...] = ()
    """Measurements of its devices, of each kind."""

    @property
    def accelerators(self) -> str | None:
        """Names of its accelerators, all kinds of them."""
        return "+".join(sorted({node.accelerator for node in self.nodes if node.accelerator})) or None

    @property
    def cpus(self) -> float:
        return sum(node.cpus for node in self.nodes)

    @property
    def gpus(self) -> float:
        return sum(node.gpus for node in self.nodes)


class Observation(_ClusterFact):
    """The cluster's report of one submission."""

    status: Literal["unknown", "pending", "running", "succeeded", "failed", "stopped"]
    """`unknown`: the cluster was reached and knows no such submission."""
    forgotten: bool = False
    """Whether an unknown submission ran on a cluster that has been replaced since, so that it cannot appear again."""
    message: str = ""
    """Reason of its end, in a line."""
    output: str = ""
    """Last lines that the driver of a failed submission printed, also before it could keep a log of its own."""
    released: bool = True
    """False while an ended submission still has processes that hold resources."""
    preempted: bool = False
    """Whether it ended because its driver's node was preempted."""

    @property
    def has_ended(self) -> bool:
        return self.status in ("succeeded", "failed", "stopped")


class Launcher(ABC):
    """A place where drivers run."""

    @abstractmethod
    def cluster(self) -> ClusterFacts:
        """The living nodes and what they have. Raises LauncherUnavailable."""

    @abstractmethod
    def submit(self, launch: Launch) -> None:
        """Starts the attempt's driver, once: a submission id that is already known is left as it is.

        Writes the launch to storage before. Raises LauncherUnavailable (nothing is known to have happened), OSError
        (the job's storage cannot be written now), LaunchRefusal (this launch will never start).
        """

    @abstractmethod
    def observe(self, submission_id: str) -> Observation:
        """Looks at what became of a submission. Raises LauncherUnavailable."""

    @abstractmethod
    def stop(self, submission_id: str) -> None:
        """Ends a submission by force, if it is there and runs. Raises LauncherUnavailable."""

    @abstractmethod
    def calibrate(self) -> Calibration:
        """Measures now what a few of the cluster's devices and links reach: some seconds to minutes. Raises
        LauncherUnavailable, and LaunchRefusal where it could not be measured."""

    @abstractmethod
    def dashboard_url(self, submission_id: str) -> str | None:
        """A page for people about this submission, or None."""

    def close(self) -> None:  # noqa: B027 - most launchers hold nothing open
        """Lets go of connections. Submissions go on."""

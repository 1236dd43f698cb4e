"""Facts about one attempt's objects on Kubernetes, parsed leniently: fields may be missing or of other types.

Sources of the fields: `RayJobStatus` and `RayClusterStatus` of KubeRay 1.7 (`ray.io/v1`), `PodStatus` and `Event` of
Kubernetes (`v1`), `WorkloadStatus` of Kueue (`kueue.x-k8s.io`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
NODE_TYPE_LABEL = "ray.io/node-type"
"""KubeRay's label of pods: `head` or `worker`."""


@dataclass(frozen=True)
class Condition:
    """A condition of an object's status."""

    status: str = ""
    """`True`, `False` or `Unknown`."""
    reason: str = ""
    message: str = ""

    @property
    def is_true(self) -> bool:
        return self.status == "True"


Conditions = Mapping[str, Condition]
"""Conditions by type."""


@dataclass(frozen=True)
class RayJobFacts:
    """Fields of a RayJob's spec and status that show the state of its attempt."""

    name: str
    created_s: float | None = None
    """Unix time of its creation."""
    is_deleting: bool = False
    is_suspended: bool = False
    """`spec.suspend`."""
    queue: str = ""
    """Kueue's LocalQueue, "" without one."""
    deployment_status: str = ""
    """`status.jobDeploymentStatus`: "" before the operator's first look."""
    job_status: str = ""
    """`status.jobStatus`: that of the Ray job, "" before its submission."""
    reason: str = ""
    message: str = ""
    """The Ray job's message, with the end of its driver's log if that failed."""
    dashboard_url: str = ""
    """Address of the head's dashboard inside the Kubernetes cluster, without a scheme."""

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> "RayJobFacts":
        metadata, spec, status = (_mapping(resource.get(key)) for key in ("metadata", "spec", "status"))
        return cls(
            name=_text(metadata.get("name")),
            created_s=_unix_time(metadata.get("creationTimestamp")),
            is_deleting=bool(metadata.get("deletionTimestamp")),
            is_suspended=spec.get("suspend") is True,
            queue=_text(_mapping(metadata.get("labels")).get(QUEUE_LABEL)),
            deployment_status=_text(status.get("jobDeploymentStatus")),
            job_status=_text(status.get("jobStatus")),
            reason=_text(status.get("reason")),
            message=_text(status.get("message")),
            dashboard_url=_text(status.get("dashboardURL")),
        )


@dataclass(frozen=True)
class RayClusterFacts:
    """The RayCluster of a RayJob."""

    name: str
    is_deleting: bool = False
    state: str = ""
    """`status.state`: `ready`, `suspended`, `failed` or ""."""
    reason: str = ""
    conditions: Conditions = field(default_factory=dict)

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> "RayClusterFacts":
        metadata, status = _mapping(resource.get("metadata")), _mapping(resource.get("status"))
        return cls(
            name=_text(metadata.get("name")),
            is_deleting=bool(metadata.get("deletionTimestamp")),
            state=_text(status.get("state")),
            reason=_text(status.get("reason")),
            conditions=_conditions(status),
        )


@dataclass(frozen=True)
class Termination:
    """End of a container."""

    exit_code: int
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class ContainerFacts:
    """A container of a pod."""

    name: str
    image: str = ""
    is_init: bool = False
    is_ready: bool = False
    num_restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    termination: Termination | None = None
    """The end of its last process, also if another one runs now."""
    has_ended: bool = False
    """Whether that process is the current one."""
    memory_limit: str = ""
    """As Kubernetes writes quantities: `64Gi`."""


@dataclass(frozen=True)
class PodFacts:
    """A pod of the Ray cluster."""

    name: str
    node: str = ""
    """Name of its node, "" before it is scheduled."""
    is_head: bool = False
    is_deleting: bool = False
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: Conditions = field(default_factory=dict)
    containers: Sequence[ContainerFacts] = ()
    """Init containers first."""

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> "PodFacts":
        metadata, spec, status = (_mapping(resource.get(key)) for key in ("metadata", "spec", "status"))
        return cls(
            name=_text(metadata.get("name")),
            node=_text(spec.get("nodeName")),
            is_head=_mapping(metadata.get("labels")).get(NODE_TYPE_LABEL) == "head",
            is_deleting=bool(metadata.get("deletionTimestamp")),
            phase=_text(status.get("phase")),
            reason=_text(status.get("reason")),
            message=_text(status.get("message")),
            conditions=_conditions(status),
            containers=tuple(_containers(spec, status)),
        )

    @property
    def is_ready(self) -> bool:
        return self.conditions.get("Ready", Condition()).is_true and not self.is_deleting


@dataclass(frozen=True)
class EventFacts:
    """An event about one of the attempt's objects."""

    kind: str
    """Kind of that object: `Pod`, `RayCluster`, `RayJob`."""
    name: str
    reason: str
    message: str
    is_warning: bool = False
    last_s: float = 0.0
    """Unix time at which it last happened."""

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> "EventFacts":
        regarding = _mapping(resource.get("involvedObject") or resource.get("regarding"))
        series = _mapping(resource.get("series"))
        times = (
            series.get("lastObservedTime"), resource.get("lastTimestamp"), resource.get("eventTime"),
            resource.get("firstTimestamp"), _mapping(resource.get("metadata")).get("creationTimestamp"),
        )  # fmt: skip
        return cls(
            kind=_text(regarding.get("kind")),
            name=_text(regarding.get("name")),
            reason=_text(resource.get("reason")),
            message=_text(resource.get("message") or resource.get("note")),
            is_warning=resource.get("type") == "Warning",
            last_s=next((time_s for time_s in map(_unix_time, times) if time_s is not None), 0.0),
        )


@dataclass(frozen=True)
class WorkloadFacts:
    """Kueue's Workload of a RayJob."""

    name: str
    queue: str = ""
    is_active: bool = True
    conditions: Conditions = field(default_factory=dict)
    checks: Mapping[str, Condition] = field(default_factory=dict)
    """Admission checks by name; `status` is `Pending`, `Ready`, `Retry` or `Rejected`."""

    @classmethod
    def parse(cls, resource: Mapping[str, Any]) -> "WorkloadFacts":
        metadata, spec, status = (_mapping(resource.get(key)) for key in ("metadata", "spec", "status"))
        return cls(
            name=_text(metadata.get("name")),
            queue=_text(spec.get("queueName")),
            is_active=spec.get("active") is not False,
            conditions=_conditions(status),
            checks={
                _text(check.get("name")): Condition(_text(check.get("state")), "", _text(check.get("message")))
                for check in _mappings(status.get("admissionChecks"))
            },
        )


@dataclass(frozen=True)
class AttemptFacts:
    """All observed facts about one attempt, at one time."""

    now_s: float
    ray_job: RayJobFacts | None = None
    ray_cluster: RayClusterFacts | None = None
    pods: Sequence[PodFacts] = ()
    events: Sequence[EventFacts] = ()
    workload: WorkloadFacts | None = None
    was_seen: bool = False
    """Whether its RayJob was observed before, so that a missing one was deleted."""


def _containers(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[ContainerFacts]:
    for specs_key, statuses_key in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
        statuses = {_text(container.get("name")): container for container in _mappings(status.get(statuses_key))}
        specs = {_text(container.get("name")): container for container in _mappings(spec.get(specs_key))}
        for name in [*specs, *(name for name in statuses if name not in specs)]:
            yield _container(name, statuses_key.startswith("init"), specs.get(name, {}), statuses.get(name, {}))


def _container(name: str, is_init: bool, spec: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerFacts:
    state = _mapping(status.get("state"))
    waiting, ended = _mapping(state.get("waiting")), _mapping(state.get("terminated"))
    earlier = _mapping(_mapping(status.get("lastState")).get("terminated"))
    end = ended or earlier
    limits = _mapping(_mapping(spec.get("resources")).get("limits"))
    return ContainerFacts(
        name=name,
        image=_text(spec.get("image") or status.get("image")),
        is_init=is_init,
        is_ready=status.get("ready") is True,
        num_restarts=_integer(status.get("restartCount")),
        waiting_reason=_text(waiting.get("reason")),
        waiting_message=_text(waiting.get("message")),
        termination=Termination(_integer(end.get("exitCode")), _text(end.get("reason")), _text(end.get("message")))
        if end
        else None,
        has_ended=bool(ended),
        memory_limit=_text(limits.get("memory")),
    )


def _conditions(status: Mapping[str, Any]) -> Conditions:
    return {
        _text(condition.get("type")): Condition(
            _text(condition.get("status")), _text(condition.get("reason")), _text(condition.get("message"))
        )
        for condition in _mappings(status.get("conditions"))
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, int | float) else ""


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _unix_time(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return None

"""Settings of the launcher `kuberay`: `SHARDYARD_KUBERAY_*`."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from moe.spec.errors import RuleError
from moe.storage.home import expand_home
from service.node_pool import DnsLabel, LabelName, Namespace, NodePool, ObjectName, PodMemory
from service.quantities import Cores

_GIB = 1024**3
_MIN_HEAD_CPUS = 0.1


def _absolute(path: str) -> str:
    if not path.startswith("/") or path.rstrip("/") == "":
        raise RuleError("invalid_value", "must be an absolute path of a folder", "write it as /storage")
    return path.rstrip("/")


def _present(name: str) -> str:
    if not name.strip():
        raise RuleError("empty", "must not be empty", "omit it for its default, or name one")
    return name


def _head_cpus(cores: float) -> float:
    if cores < _MIN_HEAD_CPUS:
        raise RuleError("out_of_range", "must be at least 100m, or Ray does not start in time", "write it as 2")
    return cores


MountPath = Annotated[str, AfterValidator(_absolute)]


class KubeRaySettings(BaseModel):
    """The operator's settings of jobs with a RayCluster of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespace: Namespace = ""
    """Namespace of the jobs' objects; by default the credentials' own."""
    kubeconfig: Path | None = None
    """File with the API server's address and credentials; by default the service account of the control plane's pod."""
    context: str = ""
    """Context in `kubeconfig`; by default its current one."""

    image: Annotated[str, Field(pattern=r"^\S*$")] = ""
    """Image of head and workers: the control plane's own. Required."""
    image_pull_secrets: tuple[DnsLabel, ...] = ()
    python: Annotated[str, AfterValidator(_present)] = "python"
    """Python in the image that runs drivers."""
    service_account: Annotated[ObjectName, AfterValidator(_present)] = "ray"
    """Service account of head and workers, whose token is not mounted."""
    token_secret: ObjectName = ""
    """Secret with Ray's token in the key `auth_token`; by default KubeRay makes one for each cluster, so that no job
    can reach another's."""

    pools: tuple[NodePool, ...] = ()
    """Node pools, the preferred one first. Required."""
    head_cpus: Annotated[Cores, AfterValidator(_head_cpus)] = 2.0
    head_memory: PodMemory = 8 * _GIB
    head_node_selector: dict[str, str] = {}

    queue: LabelName = ""
    """Kueue's LocalQueue of jobs that name none; without one, Kueue is not used."""
    queues: tuple[DnsLabel, ...] = ()
    """Further LocalQueues that jobs may name."""
    priority_class: LabelName = ""
    """Kueue's WorkloadPriorityClass of jobs that name none."""
    priority_classes: tuple[DnsLabel, ...] = ()
    """Further WorkloadPriorityClasses that jobs may name."""

    pod_template_file: Path | None = None
    """YAML file of a PodTemplate's `metadata` and `spec` that every pod of a job is merged with."""
    pod_template: dict[str, Any] = {}
    """The content of `pod_template_file`, or given directly."""
    allow_pod_templates: bool = False
    """Whether jobs may bring a pod template of their own (`resources.pod_template`)."""
    template_secrets: tuple[ObjectName, ...] = ()
    """Secrets that jobs' pod templates may use. The control plane's own tokens are in the same namespace."""
    template_claims: tuple[ObjectName, ...] = ()
    """Claims that jobs' pod templates may mount."""
    template_keys: tuple[str, ...] = ()
    """Labels and annotations that jobs' pod templates may set, by name, or by prefix with a final '/'. Network
    policies, attached networks and cloud identities go by them."""

    storage_claim: ObjectName = "storage"
    """Claim (ReadWriteMany) of jobs, checkpoints and caches; empty with an object store."""
    storage_path: MountPath = "/storage"
    """Folder at which the claim is mounted, as in the control plane."""
    storage_secret: ObjectName = ""
    """Secret of environment variables with the object store's credentials; none with a workload identity."""

    ttl_s: int = Field(default=30, ge=0, le=86_400)
    """Time after a job's end for which KubeRay keeps its cluster."""
    termination_grace_s: int = Field(default=300, ge=1, le=86_400)
    """Time for a pod that is evicted to write a checkpoint."""

    shared_cluster: DnsLabel = "ray"
    """RayCluster of jobs with `resources.cluster: shared`."""
    shared_token_secret: DnsLabel = "ray-token"
    """Secret with the shared cluster's token in the key `auth_token`; the control plane reads it, too."""
    warm_nodes: int = Field(default=0, ge=0, le=100_000)
    """Nodes of the shared cluster, which this service then creates. They wait idle for a quick start, cost as much as
    busy ones, and are not available to jobs' own clusters."""
    warm_pool: str = ""
    """Pool of the warm nodes; by default the first."""

    @model_validator(mode="before")
    @classmethod
    def _read_pod_template(cls, values: Any) -> Any:
        """Fill in `pod_template` from its file."""
        if not isinstance(values, dict) or not values.get("pod_template_file"):
            return values
        if values.get("pod_template"):
            raise RuleError("conflict", "has both pod_template and pod_template_file", "omit one")
        path = Path(str(values["pod_template_file"]))
        try:
            template = yaml.safe_load(expand_home(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise RuleError("unreadable", f"has a pod_template_file (={str(path)!r}) that cannot be read: {reason}",
                            "name a readable YAML file") from None  # fmt: skip
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise RuleError("invalid_syntax", f"has a pod_template_file (={str(path)!r}) that is no YAML: {reason}",
                            "correct it") from None  # fmt: skip
        if not isinstance(template, dict):
            raise RuleError("wrong_type", f"has a pod_template_file (={str(path)!r}) that is no mapping",
                            "write metadata and spec in it")  # fmt: skip
        return {**values, "pod_template": template}

    @model_validator(mode="after")
    def _check_pools(self) -> "KubeRaySettings":
        names = [pool.name for pool in self.pools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RuleError("duplicate", f"has pools of the same name (={twice[0]!r})", "rename one")
        if self.warm_pool and self.warm_pool not in names:
            raise RuleError("not_a_choice", f"has a warm_pool (={self.warm_pool!r}) that pools do not have",
                            f"use one of {', '.join(names) or 'its names'}")  # fmt: skip
        if self.warm_nodes:
            if not self.pools:
                raise RuleError("missing", f"has warm_nodes (={self.warm_nodes}) and no pools", "describe the pools")
            if self.warm_nodes > (most := self.warm_node_pool.nodes):
                raise RuleError("out_of_range", f"has warm_nodes (={self.warm_nodes}) above the nodes of pool "
                                f"{self.warm_node_pool.name} (={most})", f"use at most {most}")  # fmt: skip
            if not self.job_pools:
                raise RuleError("out_of_range", f"has warm_nodes (={self.warm_nodes}) that leave no node to jobs' own "
                                "clusters", "lower it, or raise the pool's nodes")  # fmt: skip
        if self.priority_class and not self.queue:
            raise RuleError("requires", f"has a priority_class (={self.priority_class!r}) without a queue",
                            "name the queue; Kueue alone knows its priority classes")  # fmt: skip
        return self

    @property
    def job_pools(self) -> tuple[NodePool, ...]:
        """Pools without the warm nodes, which jobs' own clusters leave alone."""
        if not self.warm_nodes:
            return self.pools
        warm = self.warm_node_pool
        rest = {pool.name: pool.nodes - (self.warm_nodes if pool is warm else 0) for pool in self.pools}
        return tuple(pool.model_copy(update={"nodes": rest[pool.name]}) for pool in self.pools if rest[pool.name])

    @property
    def warm_node_pool(self) -> NodePool:
        """Pool of the warm nodes."""
        return next((pool for pool in self.pools if pool.name == self.warm_pool), self.pools[0])

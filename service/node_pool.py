"""Node pool: equal nodes of a Kubernetes cluster, as the operator describes them."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from moe.spec.errors import RuleError
from service.quantities import Cores, MemoryBytes

_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def _dns_label(name: str) -> str:
    if not _DNS_LABEL.fullmatch(name):
        raise RuleError("invalid_value", "must be a DNS label", "use at most 63 lower-case letters, digits and '-'")
    return name


def _namespace(name: str) -> str:
    return name and _dns_label(name)


def _object_name(name: str) -> str:
    if name and not _DNS_SUBDOMAIN.fullmatch(name):
        raise RuleError("invalid_value", "must be the name of a Kubernetes object",
                        "use at most 253 lower-case letters, digits, '-' and '.'")  # fmt: skip
    return name


def _label_name(name: str) -> str:
    if name and not (len(name) <= 63 and _DNS_SUBDOMAIN.fullmatch(name)):
        raise RuleError("invalid_value", "must be the name of a Kubernetes object, and the value of a label",
                        "use at most 63 lower-case letters, digits, '-' and '.'")  # fmt: skip
    return name


def _resource_name(name: str) -> str:
    if not _RESOURCE.fullmatch(name):
        raise RuleError("invalid_value", "must be the name of a resource", "write it as nvidia.com/gpu")
    return name


DnsLabel = Annotated[str, AfterValidator(_dns_label)]
Namespace = Annotated[str, AfterValidator(_namespace)]
"""Name of a namespace, or empty for the credentials' own."""
ObjectName = Annotated[str, AfterValidator(_object_name)]
"""Name of a Kubernetes object, or empty for none."""
LabelName = Annotated[str, AfterValidator(_label_name)]
"""Name of a Kubernetes object that labels have as their value, or empty for none."""
ResourceName = Annotated[str, AfterValidator(_resource_name)]
MIN_SHARED_MEMORY_BYTES = 64 * 1024**2
MIN_POD_MEMORY_BYTES = 512 * 1024**2
"""Least memory of a pod in which Ray starts."""


def _pod_memory(size_bytes: int) -> int:
    if size_bytes < MIN_POD_MEMORY_BYTES:
        raise RuleError("out_of_range", "must be at least 512Mi, which Ray takes by itself", "write it as 16Gi")
    return size_bytes


PodMemory = Annotated[MemoryBytes, AfterValidator(_pod_memory)]
"""Memory of a pod, at least what Ray takes."""


class Toleration(BaseModel):
    """Toleration of a pod, as Kubernetes has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    tolerationSeconds: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check_operator(self) -> "Toleration":
        if self.operator == "Exists" and self.value:
            raise RuleError("conflict", "has a value beside operator Exists", "omit value, or use operator Equal")
        if self.operator == "Equal" and not self.key:
            raise RuleError("missing", "has operator Equal and no key", "name the key, or use operator Exists")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise RuleError("conflict", "has tolerationSeconds without effect NoExecute", "omit it")
        return self

    def to_manifest(self) -> dict[str, Any]:
        return {name: value for name, value in self.model_dump().items() if value not in ("", None)}


class NodePool(BaseModel):
    """Equal nodes that a job's worker pods are placed on: one pod a node."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: DnsLabel
    nodes: int = Field(ge=1, le=100_000)
    """Most nodes that jobs may use together."""
    gpus_per_node: int = Field(default=8, ge=0, le=128)
    cpus_per_node: Cores
    """Cores that a pod may request: the node's allocatable ones less those of daemon sets."""
    memory: PodMemory
    """Memory that a pod may request, less that of daemon sets."""
    shared_memory: MemoryBytes | None = None
    """Size of `/dev/shm` in a pod with all of a node, part of `memory`; by default a quarter of it."""
    accelerator: str = Field(default="", max_length=63)
    """Type of the GPUs: H100, A100-40G."""
    accelerator_memory: MemoryBytes | None = None
    """Memory of one GPU; by default that of the type."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    resources: dict[ResourceName, str] = {}
    """Further resources of a pod, such as {"rdma/hca_shared_devices_a": "1"}."""
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    runtime_class: ObjectName = ""
    annotations: dict[str, str] = {}
    """Annotations of pods, such as k8s.v1.cni.cncf.io/networks of an SR-IOV attachment."""
    config_map: ObjectName = ""
    """ConfigMap of environment variables, such as NCCL's."""
    host_network: bool = False
    """Whether pods use the node's network; Pod Security `restricted` and `baseline` refuse it."""
    lock_memory: bool = False
    """Whether containers have the capability IPC_LOCK, for RDMA; Pod Security `restricted` refuses it."""
    topology: str = ""
    """Node label of the topology domain that a job's pods share under Kueue: cloud.google.com/gce-topology-block."""
    topology_mode: Literal["required", "preferred"] = "required"
    node_price_per_hour: float | None = Field(default=None, gt=0, le=1e9, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_sizes(self) -> "NodePool":
        if self.gpus_per_node and self.cpus_per_node < self.gpus_per_node:
            raise RuleError(
                "out_of_range",
                f"has cpus_per_node (={self.cpus_per_node:g}) below gpus_per_node (={self.gpus_per_node})",
                "a worker needs a core beside its GPU: raise cpus_per_node",
            )
        if self.cpus_per_node < 1:
            raise RuleError("out_of_range", f"has cpus_per_node (={self.cpus_per_node:g}) below 1", "raise it")
        if self.shared_memory is not None and not MIN_SHARED_MEMORY_BYTES <= self.shared_memory <= self.memory:
            raise RuleError("out_of_range", f"has shared_memory (={self.shared_memory}) outside 64Mi and its memory",
                            f"use at most {self.memory}")  # fmt: skip
        if not self.gpus_per_node and self.accelerator:
            raise RuleError("conflict", "names an accelerator with gpus_per_node 0", "omit accelerator")
        if self.gpu_resource in self.resources:
            raise RuleError("duplicate", f"has {self.gpu_resource} in resources", "gpus_per_node requests it: omit it")
        return self

    @property
    def shared_memory_bytes(self) -> int:
        """Size of `/dev/shm` in a pod with all of a node."""
        return self.shared_memory or max(min(MIN_SHARED_MEMORY_BYTES, self.memory), self.memory // 4)

"""Arguments of `sharding.plan`, checked before anything is captured; the default cluster."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.parallel import json_collectives
from moe.parallel.accelerator import accelerator, has_gpu
from moe.plan.cluster.cluster import Cluster, parse_cluster
from moe.plan.cluster.device_names import find_device, unknown_gpu
from moe.sharding.hints.hints import Hint
from moe.sharding.placement import MAX_AXES
from moe.sharding.solve.progress import PlanningProgress
from moe.spec import Problem, ProblemCode, SpecError, spec_error
from moe.spec.files import read_plain


@dataclass(frozen=True, eq=False)
class ShardingRequest:
    """The arguments of `sharding.plan`. Raises SpecError for invalid ones. The module and the sample are checked when
    the module is captured."""

    model: nn.Module
    sample: Sequence[Any]
    cluster: Cluster
    hints: Mapping[str, Hint]
    loss: Callable[[Any], Tensor] | None
    mesh: Mapping[str, int] | None
    replicate: Sequence[str]
    optimizer_slots: int
    search: bool
    micro_batches: int | None
    recompute: bool | None
    progress: PlanningProgress = field(default_factory=PlanningProgress)

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise SpecError(problems)

    def _problems(self) -> Iterator[Problem]:
        if not isinstance(self.hints, Mapping):
            rule, remedy = "must be a dict of placements by name", 'use {"first.weight": sharding.Split(0)}'
            yield Problem("wrong_type", "hints", _kind(self.hints), rule, remedy)
        for name, hint in self.hints.items() if isinstance(self.hints, Mapping) else ():
            if not isinstance(hint, Hint):
                yield Problem(
                    "wrong_type", f"hints[{name!r}]", hint, "is not a hint", "use Split, Replicate, Shard or Devices"
                )
            if not isinstance(name, str):
                rule, remedy = "is not a name", "use the name or pattern of parameters, buffers or inputs"
                yield Problem("wrong_type", f"hints[{name!r}]", _kind(name), rule, remedy)
        if self.loss is not None and not callable(self.loss):
            rule = "must be a function of the module's output"
            remedy = "pass a function that returns the loss, or omit it if the module returns the loss"
            yield Problem("wrong_type", "loss", _kind(self.loss), rule, remedy)
        if self.mesh is not None and not _is_mesh(self.mesh):
            rule = "must have one to three named axes with sizes of at least 1"
            remedy = 'use mesh={"data": 2, "model": 2}'
            yield Problem("out_of_range" if _has_mesh_types(self.mesh) else "wrong_type", "mesh",
                          dict(self.mesh) if isinstance(self.mesh, Mapping) else self.mesh, rule, remedy)  # fmt: skip
        if isinstance(self.replicate, str) or not all(isinstance(operator, str) for operator in self.replicate):
            rule, remedy = "must be a list of operator names", 'use replicate=["aten.polar.default"]'
            yield Problem("wrong_type", "replicate", self.replicate, rule, remedy)
        remedy = "use the number of optimizer values per trained value, such as 2 for Adam"
        yield from whole_number_problems("optimizer_slots", self.optimizer_slots, 0, remedy)
        if self.micro_batches is not None:
            remedy = "use 1 or more, or omit it"
            yield from whole_number_problems("micro_batches", self.micro_batches, 1, remedy)
        if self.recompute is not None and not isinstance(self.recompute, bool):
            yield Problem("wrong_type", "recompute", self.recompute, "must be True or False", "use either, or omit it")


def whole_number_problems(path: str, value: Any, minimum: int, remedy: str) -> Iterator[Problem]:
    """Problem of an argument that is not a whole number of at least `minimum`."""
    if type(value) is not int or value < minimum:
        code: ProblemCode = "out_of_range" if type(value) is int else "wrong_type"
        yield Problem(code, path, value, f"must be a whole number of at least {minimum}", remedy)


def _is_mesh(mesh: Any) -> bool:
    return _has_mesh_types(mesh) and 1 <= len(mesh) <= MAX_AXES and all(mesh) and min(mesh.values(), default=0) >= 1


def _has_mesh_types(mesh: Any) -> bool:
    return (
        isinstance(mesh, Mapping)
        and all(isinstance(axis, str) for axis in mesh)
        and all(type(size) is int for size in mesh.values())
    )


def _kind(value: Any) -> str:
    return type(value).__name__


def resolve_cluster(cluster: Any) -> Cluster:
    """The given cluster, or the one that a file describes; without either, one device of this machine's kind for each
    rank. Raises SpecError."""
    if cluster is None:
        return own_cluster()
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | Path):
        rule = "must be a Cluster or the path of a cluster file"
        remedy = "pass moe.plan.Cluster(num_nodes=1, devices_per_node=4)"
        raise spec_error("wrong_type", "cluster", _kind(cluster), rule, remedy)
    try:
        return parse_cluster(read_plain(cluster))
    except OSError as error:
        rule, remedy = f"cannot be read ({error.strerror})", "pass the path of a cluster file or a moe.plan.Cluster"
        raise spec_error("unreadable", "cluster", str(cluster), rule, remedy) from None


def own_cluster() -> Cluster:
    """GPUs, if this machine has them and the default process group, if any, connects them; otherwise CPU cores."""
    ranks = json_collectives.world_size()
    if not has_gpu() or not _joins_gpus():
        return parse_cluster({"num_nodes": 1, "devices_per_node": ranks})
    name = accelerator("cuda").name or ""
    memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return parse_cluster(cluster_of_gpus(name, memory_bytes, torch.cuda.device_count(), ranks))


def cluster_of_gpus(name: str, memory_bytes: int, num_gpus: int, num_ranks: int) -> dict[str, Any]:
    """The cluster of `num_ranks` ranks on machines with `num_gpus` GPUs each, as plain values."""
    per_node = math.gcd(num_gpus, num_ranks)
    device = find_device(name) or unknown_gpu(name, memory_bytes).model_dump(exclude_none=True)
    return {"num_nodes": num_ranks // per_node, "devices_per_node": per_node, "device": device,
            "memory_bytes": memory_bytes}  # fmt: skip


def _joins_gpus() -> bool:
    """Whether collectives of GPU tensors use NCCL; gloo would copy them through the host."""
    return not dist.is_initialized() or "nccl" in str(dist.get_backend_config())

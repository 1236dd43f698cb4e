"""The cluster of the ranks that are running: one device of this machine's kind for each."""

import math
from typing import Any

import torch
import torch.distributed as dist

from moe.parallel import plain_collectives
from moe.parallel.accelerator import accelerator, has_gpu
from moe.plan.cluster.cluster import Cluster, one_cluster_of
from moe.plan.cluster.device_names import device_named, unknown_gpu


def own_cluster() -> Cluster:
    """GPUs, if this machine has them and the default process group, if any, connects them; otherwise CPU cores."""
    ranks = plain_collectives.world_size()
    if not has_gpu() or not _joins_gpus():
        return one_cluster_of({"num_nodes": 1, "devices_per_node": ranks})
    name = accelerator("cuda").name or ""
    memory_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return one_cluster_of(cluster_of_gpus(name, memory_bytes, torch.cuda.device_count(), ranks))


def cluster_of_gpus(name: str, memory_bytes: int, num_gpus: int, num_ranks: int) -> dict[str, Any]:
    """The cluster of `num_ranks` ranks on machines with `num_gpus` GPUs each, as plain values."""
    per_node = math.gcd(num_gpus, num_ranks)
    device = device_named(name) or unknown_gpu(name, memory_bytes).model_dump(exclude_none=True)
    return {"num_nodes": num_ranks // per_node, "devices_per_node": per_node, "device": device,
            "memory_bytes": memory_bytes}  # fmt: skip


def _joins_gpus() -> bool:
    """Whether collectives of GPU tensors use NCCL; gloo would copy them through the host."""
    return not dist.is_initialized() or "nccl" in str(dist.get_backend_config())

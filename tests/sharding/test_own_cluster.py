"""Without a cluster, a plan is for the present devices: GPU names and memory as torch reports them."""

import pytest
import torch

from moe.plan import Cluster
from moe.sharding.solve.request import cluster_of_gpus, resolve_cluster

GIB = 1 << 30


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_are_known_by_torchs_names(name: str, device: str):
    cluster = Cluster.model_validate(cluster_of_gpus(name, 79 * GIB, 8, 16))
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.device) == (2, 8, device)
    assert cluster.memory_bytes == 79 * GIB
    assert cluster.calibrated_device.kind == "cuda"


def test_an_unknown_gpu_is_named_as_such():
    cluster = Cluster.model_validate(cluster_of_gpus("NVIDIA Future 1", 24 * GIB, 1, 1))
    assert "unknown GPU NVIDIA Future 1" in cluster.model_dump_json()
    assert cluster.calibrated_device.kind == "cuda"


@pytest.mark.parametrize(("num_gpus", "num_ranks", "shape"), [(8, 4, (1, 4)), (4, 8, (2, 4)), (8, 12, (3, 4))])
def test_ranks_are_spread_over_machines(num_gpus: int, num_ranks: int, shape: tuple[int, int]):
    cluster = Cluster.model_validate(cluster_of_gpus("NVIDIA H100", 79 * GIB, num_gpus, num_ranks))
    assert (cluster.num_nodes, cluster.devices_per_node) == shape


def test_without_gpus_devices_are_cores():
    cluster = resolve_cluster(None)
    assert cluster.calibrated_device.kind == ("cuda" if torch.cuda.is_available() else "cpu")

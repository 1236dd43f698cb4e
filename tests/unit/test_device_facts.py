"""Devices described by their data sheets, and plans on devices that were never measured."""

import math

import pytest

from moe.plan import DEVICES, Cluster, cluster_of, plan_job
from moe.plan.cluster.device_names import find_device
from moe.plan.cluster.measured import MEASURED
from moe.spec import ProblemCode
from service.control.launcher.launcher import ClusterFacts, NodeFacts
from service.control.scheduling.planning import plan_for, planning_cluster
from tests.refusals import expect_problem
from tests.unit.test_verdict import language_job

H100 = {"name": "like-h100", "memory_bytes": 80 * 2**30, "bfloat16_flops_per_s": 989e12, "fp8_flops_per_s": 1979e12,
        "memory_bytes_per_s": 3.35e12, "link_bytes_per_s": 450e9}  # fmt: skip
SPEC = language_job("qwen3-30b-a3b", 8)
UNMEASURED = ["mi300x", "mi355x", "h20", "h800", "l40s", "rtx-4090", "rtx-5090", "a10g"]
GIB = 2**30


def on(device: object) -> Cluster:
    return Cluster.model_validate({"num_nodes": 1, "devices_per_node": 8, "device": device})


def test_the_facts_of_a_measured_device_plan_as_it_does_and_survive_json() -> None:
    """Except for the fused exchange, which our software does not use."""
    cluster = on(H100)
    by_facts, by_name = plan_job(SPEC, cluster, top=1), plan_job(SPEC, on("h100"), top=1)
    assert (by_facts.candidate, by_facts.memory) == (by_name.candidate, by_name.memory)
    assert by_facts.predicted.step_s == pytest.approx(by_name.predicted.step_s, rel=1e-3)
    assert by_facts.utilization == pytest.approx(by_name.utilization, rel=1e-3)
    assert by_facts.device_type == "like-h100"
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster
    assert cluster.sized_for(3).device_facts == cluster.exactly(4).device_facts == cluster.device_facts
    assert "device_facts" not in on("h100").model_dump(mode="json")
    assert cluster.memory_bytes == 80 * GIB


@pytest.mark.parametrize(
    ("device", "code", "path"),
    [
        ({**H100, "memory_bytes": 0}, "out_of_range", "cluster.device.memory_bytes"),
        ({**H100, "link_bytes_per_s": None}, "wrong_type", "cluster.device.link_bytes_per_s"),
        ({**H100, "flops": 1}, "unknown_key", "cluster.device.flops"),
        ("x100", "not_a_choice", "cluster.device"),
    ],
)  # fmt: skip
def test_invalid_facts_and_unknown_names_are_refused(device: object, code: ProblemCode, path: str) -> None:
    with expect_problem(code, path):
        cluster_of({"num_nodes": 1, "devices_per_node": 8, "device": device})


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", UNMEASURED)
def test_a_plan_says_that_its_device_was_never_measured(name: str) -> None:
    device = DEVICES[name]
    plan = plan_job(language_job("olmoe-1b-7b", 64), Cluster(num_nodes=8, devices_per_node=8, device=name), top=1)
    assert any(f"kernels of {name} were never measured" in reason for reason in plan.reasons)
    assert plan.utilization is not None
    assert 0 < plan.utilization < 1
    flops_per_s = device.kernels.products["bfloat16"].achieved_flops_per_s(8192)
    assert flops_per_s < 0.95 * device.peak_flops_per_s["bfloat16"]
    for number in (device.memory_bytes_per_s, device.kernels.ring.bytes_per_s, device.across_nodes_bytes_per_s):
        assert 0 < number < math.inf


def test_measured_and_unmeasured_devices_are_told_apart() -> None:
    assert {name for name, device in DEVICES.items() if device.priced_by} == set(UNMEASURED)
    assert not set(UNMEASURED) & set(MEASURED)


def nodes(*accelerators: str | None) -> ClusterFacts:
    return ClusterFacts(
        nodes=tuple(
            NodeFacts(id=f"n{index}", ip=f"10.0.0.{index}", cpus=64, gpus=8, memory_bytes=2**40, accelerator=name,
                      accelerator_memory_bytes=80 * GIB)
            for index, name in enumerate(accelerators)
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("accelerators", "device"),
    [
        ("H100", "h100"), ("H200", "h200"), ("H20", "h20"), ("H800", "h800"), ("A100", "a100-80"),
        ("A100-40G", "a100-40"), ("A100-80G", "a100-80"), ("GB200", "gb200"), ("B200", "b200"), ("L40S", "l40s"),
        ("A10G", "a10g"), ("AMD-Instinct-MI300X-OAM", "mi300x"), ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("H100,A100", "a100-80"), ("A100,H100", "a100-80"), ("H100,T4", "unknown GPU T4"),  # the slowest decides
    ],
)  # fmt: skip
def test_accelerators_are_planned_as_what_they_are(accelerators: str, device: str) -> None:
    cluster = planning_cluster(SPEC, nodes(*accelerators.split(",")))
    assert cluster is not None
    assert (cluster.device, cluster.device_facts is None) == (device, "unknown" not in device)


@pytest.mark.parametrize("accelerator", ["G", "T4", "L4", "A10", "L40", "B2000", "H20X", "Gaudi-3", None])
def test_an_unknown_gpu_is_never_planned_silently_as_another(accelerator: str | None) -> None:
    cluster, plan = planning_cluster(SPEC, nodes(accelerator)), plan_for(SPEC, nodes(accelerator))
    assert cluster is not None
    assert plan is not None
    assert plan.device_type == cluster.device == f"unknown GPU {accelerator or ''}".strip()
    assert cluster.memory_bytes == 80 * GIB
    assert any("were never measured: priced with the rates of a100-80" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("product", "device"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 5090 D v2", None), ("NVIDIA GeForce RTX 3090", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None), ("NVIDIA L40S", "l40s"), ("NVIDIA A10G", "a10g"),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", None), ("Tesla V100-SXM2-16GB", "v100"), ("Tesla T4", None),
    ],
)  # fmt: skip
def test_names_that_ray_reports_are_recognized(product: str, device: str | None) -> None:
    """Ray's own function derives them from NVML's names."""
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    assert find_device(NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(product) or "") == device


def test_names_that_ray_reports_of_amd_are_recognized_and_an_a100_by_its_memory() -> None:
    from ray._private.accelerators.amd_gpu import amd_product_dict

    devices = {name: device for name in amd_product_dict.values() if (device := find_device(name))}
    assert devices == {"AMD-Instinct-MI300X-OAM": "mi300x", "AMD-Instinct-MI300X-HF": "mi300x",
                       "AMD-Instinct-MI355X-OAM": "mi355x"}  # fmt: skip
    assert find_device("A100", 40 * GIB) == "a100-40"  # Ray calls both A100
    assert find_device("A100", 79 * GIB) == find_device("A100") == "a100-80"

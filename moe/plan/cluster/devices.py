"""Rates and memory of one device of each type. Every constant has its source beside it."""

from dataclasses import dataclass
from math import inf
from typing import Any

_GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """Rates of one device. Peaks are the vendor's for dense arithmetic; `efficiency` and what follows it is what large
    models were seen to reach."""

    kind: str
    """`cpu` or `cuda`, as torch names it; `tpu` can be planned for but not run on."""
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    """By dtype of the operands of matrix products; a dtype that it lacks is not there."""
    efficiency: float
    """Share of the peak that a large matrix product reaches."""
    attention_efficiency: float
    """The same for fused attention, forward and backward together."""
    half_rows: float
    """Rows of a matrix product at which it reaches half of `efficiency`: rows / (rows + half_rows) of it."""
    expert_half_rows: float
    """The same of products of many experts at once, in rows of each."""
    layer_s: float
    """Seconds of a layer, forward and backward, that no amount of work shortens: launches, synchronisation, and the
    counts of routing that the host waits for."""
    expert_s: float
    """The same of each of a rank's experts in a layer: products that are launched one after the other."""
    devices_per_node: int
    """That fast links join."""
    within_node_bytes_per_s: float
    """One direction, each device."""
    across_nodes_bytes_per_s: float
    """One direction, each device's share of its node's adapters."""
    link_efficiency: float
    """Share of the rate within a node that large collectives reach."""
    across_efficiency: float
    """The same across nodes."""
    latency_s: float
    """Of one step of a collective within a node."""
    across_latency_s: float
    overlap: float
    """Share of gathers and reductions that hides behind arithmetic, where there is enough of it."""
    exchange_overlap: float
    """The same of all-to-alls, behind other rows' arithmetic."""
    decoded_per_s: float = inf
    """Numbers of a frozen base that are decoded a second from 8 or 4 bits, where memory takes them as fast."""
    fixed_shapes: bool = False
    """Whether as many rows travel in every step, so that nobody asks how many will come."""
    torus: bool = False
    """Whether links join neighbours on a two-dimensional torus, as large as the cluster."""


# Matrix products. Peaks: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM, DGX B200 and GB200 NVL72, without
#   sparsity; float32 is TF32 on tensor cores. `efficiency`: the largest measured share of the bfloat16 peak, from the
#   "maximum achievable matmul FLOPS" of ml-engineering (S. Bekman): A100 271 of 312, H100 794 of 989, H200 835 of 989,
#   B200 1745 of 2250; GB200 as B200. TPU v3: 420 TFLOP/s a board of 8 cores (Google Cloud's system architecture).
# Attention. FlashAttention-2 (arXiv 2307.08691) reaches 0.6 to 0.7 forward and backward on A100; FlashAttention-3
#   (arXiv 2407.08608) 0.55 to 0.65 on H100; that of B200 is taken to be the same share.
# Memory and links. NVIDIA's data sheets: HBM; NVLink a direction; one 200 Gb/s (A100) or 400 Gb/s adapter a GPU. GB200
#   NVL72: 72 GPUs in a domain. TPU v3: 900 GB/s a chip of two cores; links of 656 Gb/s, both ways together (Jouppi et
#   al., CACM 2020).
# `link_efficiency`: nccl-tests' bus bandwidth of large messages, 370 of 450 GB/s within an H100 node. Latencies: a
#   ring's steps in NCCL's own tuning model (src/graph/tuning.cc), simple protocol.
# `expert_half_rows`, `layer_s`, `expert_s`, `overlap` and `exchange_overlap`: fitted, on the rows that docs/planner.md
#   names; `expert_s` of GB200 apart, whose published runs replay CUDA graphs.
# `half_rows`: of dense products, which are at nine tenths with a few thousand rows.

_NVIDIA: dict[str, Any] = {
    "kind": "cuda", "devices_per_node": 8, "link_efficiency": 0.82, "across_efficiency": 0.93,
    "latency_s": 3.4e-6, "across_latency_s": 1.4e-5, "overlap": 0.95, "exchange_overlap": 0.32,
    "layer_s": 4e-4, "expert_s": 2.5e-4,
}  # fmt: skip
_HOPPER: dict[str, Any] = {
    **_NVIDIA, "attention_efficiency": 0.5, "half_rows": 256, "expert_half_rows": 384,
    "flops_per_s": {"float32": 494e12, "bfloat16": 989e12, "float64": 67e12, "fp8": 1979e12},
    "within_node_bytes_per_s": 450e9, "across_nodes_bytes_per_s": 50e9,
}  # fmt: skip
_BLACKWELL: dict[str, Any] = {
    **_NVIDIA, "attention_efficiency": 0.5, "half_rows": 512, "expert_half_rows": 384, "efficiency": 0.775,
    "memory_bytes_per_s": 8e12, "within_node_bytes_per_s": 900e9, "across_nodes_bytes_per_s": 50e9,
}  # fmt: skip

DEVICES: dict[str, Device] = {
    # One core of an AMD EPYC (Zen 5), and gloo over loopback while both cores are busy, as `shardyard calibrate`
    # measured them in a busy hour: to rank layouts by. Machines differ by a factor of a few; calibrate yours.
    # `decoded_per_s`: bitsandbytes on one thread takes 2 to 7 ms for a million numbers of int8 or nf4.
    "cpu": Device(
        kind="cpu", memory_bytes=8 * _GIB, memory_bytes_per_s=24e9,
        flops_per_s={"float32": 85e9, "bfloat16": 200e9, "float64": 42e9},
        efficiency=1.0, attention_efficiency=0.6, half_rows=6, expert_half_rows=12, layer_s=5e-3, expert_s=0.0,
        devices_per_node=2, within_node_bytes_per_s=0.4e9, across_nodes_bytes_per_s=0.4e9,
        link_efficiency=1.0, across_efficiency=1.0, latency_s=3e-3, across_latency_s=3e-3,
        overlap=0.0, exchange_overlap=0.0, decoded_per_s=2e8,
    ),
    "a100-80": Device(
        **{
            **_NVIDIA, "memory_bytes": 80 * _GIB, "memory_bytes_per_s": 2.0e12,
            "flops_per_s": {"float32": 156e12, "bfloat16": 312e12, "float64": 19.5e12},
            "efficiency": 0.87, "attention_efficiency": 0.6, "half_rows": 128, "expert_half_rows": 192,
            "within_node_bytes_per_s": 300e9, "across_nodes_bytes_per_s": 25e9,
        }
    ),
    "h100": Device(**_HOPPER, memory_bytes=80 * _GIB, memory_bytes_per_s=3.35e12, efficiency=0.80),
    "h200": Device(**_HOPPER, memory_bytes=141 * _GIB, memory_bytes_per_s=4.8e12, efficiency=0.84),
    "b200": Device(
        **_BLACKWELL, memory_bytes=180 * _GIB,
        flops_per_s={"float32": 1125e12, "bfloat16": 2250e12, "float64": 37e12, "fp8": 4500e12},
    ),
    "gb200": Device(
        **{**_BLACKWELL, "devices_per_node": 72, "expert_s": 1e-4}, memory_bytes=186 * _GIB,
        flops_per_s={"float32": 1250e12, "bfloat16": 2500e12, "float64": 40e12, "fp8": 5000e12},
    ),
    # One core of the paper's machine, float32 by single passes of its bfloat16 units. `latency_s`, of a hop on the
    # torus, lies where all-to-all is near the 16% and 36% that the paper gives for 128 and 2,048 cores; `efficiency`
    # was fitted on the row of 512 experts and 36 layers of its Table 3, both `half_rows` with it.
    "tpu-v3": Device(
        kind="tpu", memory_bytes=16 * _GIB, memory_bytes_per_s=450e9,
        flops_per_s={"float32": 52.5e12, "bfloat16": 52.5e12},
        efficiency=0.87, attention_efficiency=0.3, half_rows=2048, expert_half_rows=2048, layer_s=5e-4, expert_s=0.0,
        devices_per_node=8, within_node_bytes_per_s=41e9, across_nodes_bytes_per_s=41e9,
        link_efficiency=0.82, across_efficiency=0.82, latency_s=1.25e-4, across_latency_s=1.25e-4,
        overlap=0.0, exchange_overlap=0.0, torus=True, fixed_shapes=True,
    ),
}  # fmt: skip

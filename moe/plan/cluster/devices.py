"""Device types: memory, links, and kernel constants. Every figure has its source next to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from moe.plan.cluster.kernels import CollectiveCost, FusedAttention, GroupedExperts, Kernels, MatrixProducts
from moe.plan.cluster.measured import MEASURED

_GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """Hardware and kernels of a device; software is in `moe.plan.software`."""

    kind: str
    """`cpu` or `cuda`, as torch names it; `tpu` can be planned for but not run on."""
    memory_bytes: int
    memory_bytes_per_s: float
    kernels: Kernels
    devices_per_node: int
    across_nodes_bytes_per_s: float
    """Each device's share of the node's adapters, one direction, for large collectives."""
    across_latency_s: float
    """Per collective step across nodes."""
    host_link_bytes_per_s: float = inf
    """To host memory, one direction."""
    host_bytes_per_s: float = inf
    """Each device's share of host memory bandwidth."""
    layer_s: float | None = None
    """Host seconds per layer, forward and backward, if measured with the device; for GPUs, `moe.plan.software` has
    them."""
    decoded_per_s: float = inf
    """Elements dequantized per second, if not bound by memory."""
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Dense data-sheet peak by dtype, for MFU; empty for CPUs."""
    priced_by: str = ""
    """Source of unmeasured kernel rates, in words."""
    fixed_shapes: bool = False
    """Whether dispatch has constant row counts, so that none are exchanged."""
    torus: bool = False
    """Whether links form a 2D torus as large as the cluster."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(self.kernels.products)


def plain_kernels(
    flops_per_s: dict[str, float], memory_bytes_per_s: float, attention_flops_per_s: float, link_bytes_per_s: float,
    latency_s: float, half_rows: float, expert_half_rows: float,
) -> Kernels:  # fmt: skip
    """Kernels known only by rates: products reach half at `half_rows`, permutation is memory-bound, all steps have
    equal latency."""
    width = {"float32": 4.0, "float64": 8.0}
    products, experts = {}, {}
    for dtype, rate in flops_per_s.items():
        item_bytes = width.get(dtype, 2.0)
        products[dtype] = MatrixProducts(
            rate, memory_bytes_per_s, item_bytes=item_bytes, output_bytes=item_bytes, half_rows=half_rows
        )
        item_s = item_bytes / memory_bytes_per_s
        experts[dtype] = GroupedExperts(
            rate, item_bytes=item_bytes, row_s=4 * item_s, hidden_s=2 * item_s, half_rows=expert_half_rows, tile=1
        )
    attention = FusedAttention(attention_flops_per_s, block=0, backward=2.5)
    return Kernels(
        products=products, experts=experts, attention={256: attention},
        ring=CollectiveCost(link_bytes_per_s, step_s=latency_s),
        all_to_all=CollectiveCost(link_bytes_per_s, doubling_s=latency_s), attention_dtype="float32",
    )  # fmt: skip


# NVIDIA kernels: `measured.json`. Memory size: NVIDIA's data sheets; memory bandwidth: as reached by
#   large products. Links across nodes: one adapter per GPU, 200 Gb/s (A100) or 400 Gb/s (all later ones), of which
#   nccl-tests reaches 93% with large messages. B300 and GB300 can have 800 Gb/s, but published gpt-oss runs on eight
#   nodes of B300 are no faster than on B200; a cluster file may set `across_share: 2`. GB200 and GB300 NVL72: 72 GPUs
#   per NVLink domain. Step latency across nodes: of a ring in NCCL's tuning model, simple protocol
#   (src/graph/tuning.cc). Host link: PCIe 4 (A100) or 5, or Grace's NVLink-C2C, as reached by large copies. Host
#   memory bandwidth: an eighth of a two-socket server, or half of a Grace, from data sheets.
# Dense peaks: A100 312 TFLOP/s in bfloat16, H100 SXM and H200 989, HGX B200 and B300 2,250, GB200 and GB300 NVL72
#   2,500; half as much in TF32, twice as much in fp8 (half of the sparse rates in NVIDIA's data sheets).
# V100 was not measured: 0.85 of its data-sheet peaks (15.7 TFLOP/s in float32, 0.9 TB/s), 0.7 of its links' 150 GB/s,
#   and 0.6 for attention, as for A100. Its tensor cores support float16 only, which no job trains in.
# A100-40 has the kernels of A100-80, with 1.555 of 2.039 TB/s.


def _nvidia(
    name: str,
    memory_gib: int,
    peak_tflops: float,
    per_node: int = 8,
    across_gb_per_s: float = 50.0,
    kernels: Kernels | None = None,
    host_link_gb_per_s: float = 50.0,
    host_gb_per_s: float = 60.0,
) -> Device:
    constants = kernels or MEASURED[name]
    peaks = {"bfloat16": 1e12 * peak_tflops, "float32": 0.5e12 * peak_tflops}  # in TF32
    if "fp8" in constants.products:
        peaks["fp8"] = 2e12 * peak_tflops
    return Device(
        kind="cuda", memory_bytes=memory_gib * _GIB, memory_bytes_per_s=constants.products["bfloat16"].bytes_per_s,
        kernels=constants, devices_per_node=per_node, across_nodes_bytes_per_s=0.93e9 * across_gb_per_s,
        across_latency_s=1.4e-5, host_link_bytes_per_s=1e9 * host_link_gb_per_s,
        host_bytes_per_s=1e9 * host_gb_per_s, peak_flops_per_s=peaks,
    )  # fmt: skip


def _with_memory(kernels: Kernels, share: float) -> Kernels:
    """Kernels of a device with `share` times the memory bandwidth."""
    products = {
        dtype: replace(kernel, bytes_per_s=share * kernel.bytes_per_s) for dtype, kernel in kernels.products.items()
    }
    experts = {
        dtype: replace(
            kernel,
            bytes_per_s=share * kernel.bytes_per_s,
            row_s=kernel.row_s / share,
            hidden_s=kernel.hidden_s / share,
            token_s=kernel.token_s / share,
        )
        for dtype, kernel in kernels.experts.items()
    }
    return replace(kernels, products=products, experts=experts)


_H100_LINK = 450e9
_H100_MEMORY, _H100_FLOPS, _H100_FP8_FLOPS = 3.35e12, 989e12, 1979e12


def device_by_data_sheet(
    source: str, memory_bytes: int, bfloat16_flops_per_s: float, fp8_flops_per_s: float | None,
    memory_bytes_per_s: float, link_bytes_per_s: float, across_nodes_bytes_per_s: float, efficiency: float = 1.0,
) -> Device:  # fmt: skip
    """GPU from data-sheet rates, as efficient as H100 (products times `efficiency`), without a fused dispatch
    kernel."""
    h100, memory = MEASURED["h100"], memory_bytes_per_s / _H100_MEMORY
    ratios = {"bfloat16": bfloat16_flops_per_s / _H100_FLOPS * efficiency}
    if fp8_flops_per_s is not None:
        ratios["fp8"] = fp8_flops_per_s / _H100_FP8_FLOPS * efficiency
    ratios["float32"] = ratios["float64"] = ratios["bfloat16"]
    slower = _with_memory(h100, memory)
    products = {
        dtype: replace(slower.products[dtype], flops_per_s=ratio * slower.products[dtype].flops_per_s,
                       quantise_s=slower.products[dtype].quantise_s / memory)
        for dtype, ratio in ratios.items()
    }  # fmt: skip
    experts = {
        dtype: replace(slower.experts[dtype], flops_per_s=ratio * slower.experts[dtype].flops_per_s)
        for dtype, ratio in ratios.items()
    }
    attention = {
        widths: replace(
            kernel, flops_per_s=ratios["bfloat16"] * kernel.flops_per_s, chain_s=kernel.chain_s / min(1.0, memory),
            query_s=kernel.query_s / memory, key_s=kernel.key_s / memory,
            window_query_s=kernel.window_query_s / memory, window_key_s=kernel.window_key_s / memory,
        )
        for widths, kernel in h100.attention.items()
    }  # fmt: skip
    link = link_bytes_per_s / _H100_LINK
    ring, all_to_all = (
        replace(
            cost,
            bytes_per_s=link * cost.bytes_per_s,
            own_bytes_per_s=max(link * cost.bytes_per_s, memory * cost.own_bytes_per_s),
        )
        for cost in (h100.ring, h100.all_to_all)
    )
    kernels = replace(
        slower, products=products, experts=experts, attention=attention, ring=ring, all_to_all=all_to_all, exchange=None
    )
    peaks = {"bfloat16": bfloat16_flops_per_s, "float32": bfloat16_flops_per_s / 2}
    if fp8_flops_per_s is not None:
        peaks["fp8"] = fp8_flops_per_s
    return Device(
        kind="cuda", memory_bytes=memory_bytes, memory_bytes_per_s=kernels.products["bfloat16"].bytes_per_s,
        kernels=kernels, devices_per_node=8, across_nodes_bytes_per_s=0.93 * across_nodes_bytes_per_s,
        across_latency_s=1.4e-5, host_link_bytes_per_s=50e9, host_bytes_per_s=60e9, peak_flops_per_s=peaks,
        priced_by=source,
    )  # fmt: skip


_SHEET = "the rates of its data sheet, of which H100's kernels reach as much"
_AMD_SHEET, _AMD_REACHED = "the rates of its data sheet, of products less than half", 0.45 / 0.85
"""Share of the data sheet's rates that kernels reach. MI300X reaches 54% in bfloat16 in its best product, 708 TFLOP/s,
and 49% in fp8 (AMD, ROCm blogs, "Measuring Max-Achievable FLOPs - Part 2"). In the products of DeepSeek-V3, MI325X
reaches 74% of its best (616 of 831 TFLOP/s; the same, "Understanding TAF"), which would be 40% here. 45% is between;
H100 reaches 85% (`measured.json`). No figures were found for MI355X."""
_PCIE_4, _PCIE_5 = 32e9, 64e9
"""Bandwidth of sixteen lanes, one direction."""


def _by_sheet(
    memory_gib: int, tflops: float, fp8_tflops: float | None, memory_gb_per_s: float, link_bytes_per_s: float,
    across_gb_per_s: float = 50.0, efficiency: float = 1.0, source: str = _SHEET,
) -> Device:  # fmt: skip
    fp8 = None if fp8_tflops is None else 1e12 * fp8_tflops
    return device_by_data_sheet(source, memory_gib * _GIB, 1e12 * tflops, fp8, 1e9 * memory_gb_per_s, link_bytes_per_s,
                      1e9 * across_gb_per_s, efficiency)  # fmt: skip


DEVICES: dict[str, Device] = {
    # One core of an AMD EPYC (Zen 5), and gloo over loopback with both cores busy, measured by `shardyard calibrate`
    # under load. Good enough to rank layouts; machines differ by a factor of a few, so calibrate yours.
    # `decoded_per_s`: bitsandbytes takes 2 to 7 ms for a million int8 or nf4 elements on one thread.
    "cpu": Device(
        kind="cpu", memory_bytes=8 * _GIB, memory_bytes_per_s=24e9,
        kernels=plain_kernels(
            {"float32": 85e9, "bfloat16": 200e9, "float64": 42e9}, 24e9, 0.6 * 85e9, 0.4e9, 3e-3, 6, 12
        ),
        devices_per_node=2, across_nodes_bytes_per_s=0.4e9, across_latency_s=3e-3, layer_s=5e-3, decoded_per_s=2e8,
    ),
    "v100": Device(
        kind="cuda", memory_bytes=32 * _GIB, memory_bytes_per_s=0.77e12,
        kernels=plain_kernels(
            {"float32": 13.3e12, "float64": 6.6e12}, 0.77e12, 9.4e12, 105e9, 1e-5, half_rows=32, expert_half_rows=32
        ),
        devices_per_node=8, across_nodes_bytes_per_s=0.93 * 12.5e9, across_latency_s=1.4e-5,
        host_link_bytes_per_s=12e9, host_bytes_per_s=25e9, peak_flops_per_s={"float32": 15.7e12, "float64": 7.8e12},
    ),
    "a100-40": _nvidia(
        "a100-40", 40, 312, across_gb_per_s=25, host_link_gb_per_s=25, host_gb_per_s=40,
        kernels=_with_memory(MEASURED["a100-80"], 1.555 / 2.039),
    ),
    "a100-80": _nvidia("a100-80", 80, 312, across_gb_per_s=25, host_link_gb_per_s=25, host_gb_per_s=40),
    "h100": _nvidia("h100", 80, 989),
    "h200": _nvidia("h200", 141, 989),
    "b200": _nvidia("b200", 180, 2250),
    "gb200": _nvidia("gb200", 186, 2500, per_node=72, host_link_gb_per_s=400, host_gb_per_s=220),
    "b300": _nvidia("b300", 270, 2250),
    "gb300": _nvidia("gb300", 277, 2500, per_node=72, host_link_gb_per_s=400, host_gb_per_s=220),
    # Not measured; priced by data sheets, dense rates, one direction. H800 and H20: Hopper's kernels, links of 400
    # and 900 GB/s both ways (NVIDIA's sheets, as listed by FeiFeiBear's LLMRoofline and LLM-Prof). L40S: 362 and 733
    # TFLOP/s (NVIDIA's sheet: 362.05 and 733, twice that with sparsity), 864 GB/s, 16 lanes of PCIe 4. GeForce RTX
    # 4090: 165.2 in bfloat16 and 330.3 in fp8 with float32 accumulation (the paper's first edition had 660.6, with
    # float16 accumulation), 1,008 GB/s (NVIDIA, Ada GPU Architecture 2.1, appendix A). RTX 5090: 209.5 and 419, 1,792
    # GB/s (NVIDIA, RTX Blackwell GPU Architecture, table 3). A10G: 70 TFLOP/s, where the A10 has 125, and 600 GB/s
    # (NVIDIA's sheet for AWS, 17 February 2022, as quoted by three sources; one measured 66.6 TFLOP/s in a square
    # matrix product of size 8,192); ECC leaves 22 of its 24 GB. MI300X: 1,307.4 and 2,614.9 TFLOP/s, 5.3 TB/s, seven
    # links of 128 GB/s both ways (AMD's sheet). MI355X: 2,516.6 and 5,033.2, 8 TB/s, seven of 153.6 (AMD's sheet
    # LE-92703-00 of October 2025, as quoted by others; 1,024 matrix cores at 2.4 GHz give the same). Network adapters
    # of PCIe cards are those of cloud nodes: 400 Gb/s per node of eight L40S, 100 for others.
    "h800": _by_sheet(80, 989, 1979, 3350, 200e9),
    "h20": _by_sheet(96, 148, 296, 4000, 450e9),
    "l40s": _by_sheet(48, 362, 733, 864, _PCIE_4, across_gb_per_s=6.25),
    "rtx-4090": _by_sheet(24, 165.2, 330.3, 1008, _PCIE_4, across_gb_per_s=1.56),
    "rtx-5090": _by_sheet(32, 209.5, 419, 1792, _PCIE_5, across_gb_per_s=1.56),
    "a10g": _by_sheet(22, 70, None, 600, _PCIE_4, across_gb_per_s=1.56),
    "mi300x": _by_sheet(192, 1307, 2615, 5300, 7 * 64e9, efficiency=_AMD_REACHED, source=_AMD_SHEET),
    "mi355x": _by_sheet(288, 2517, 5033, 8000, 7 * 76.8e9, efficiency=_AMD_REACHED, source=_AMD_SHEET),
    # One core of the GShard paper's machine, with float32 in a single pass of its bfloat16 units: 420 TFLOP/s per board
    # of 8 cores, 900 GB/s per chip of 2 (Google Cloud's system architecture); links of 656 Gb/s, both directions
    # together (Jouppi et al., CACM 2020), of which 82% are reached. The latency of a torus hop puts all-to-all near the
    # 16% and 36% that the paper gives for 128 and 2,048 cores. The rate, 0.87 of the peak, and both `half_rows` were
    # fitted to the row of 512 experts and 36 layers in its Table 3.
    "tpu-v3": Device(
        kind="tpu", memory_bytes=16 * _GIB, memory_bytes_per_s=450e9,
        kernels=plain_kernels(
            {"float32": 0.87 * 52.5e12, "bfloat16": 0.87 * 52.5e12}, 450e9, 0.3 * 52.5e12, 0.82 * 41e9, 1.25e-4, 2048,
            2048,
        ),
        devices_per_node=8, across_nodes_bytes_per_s=0.82 * 41e9, across_latency_s=1.25e-4, layer_s=5e-4,
        peak_flops_per_s={"float32": 52.5e12, "bfloat16": 52.5e12}, torus=True, fixed_shapes=True,
    ),
}  # fmt: skip

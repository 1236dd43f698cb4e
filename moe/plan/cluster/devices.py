"""Devices of each type: memory, links, and the constants of their kernels. Every figure has its source beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from moe.plan.cluster.kernels import Collective, FusedAttention, GroupedExperts, Kernels, MatrixProducts
from moe.plan.cluster.measured import MEASURED

_GIB = 1024**3


@dataclass(frozen=True)
class Device:
    """One device, as its hardware and its kernels are; what runs them is `moe.plan.software`."""

    kind: str
    """`cpu` or `cuda`, as torch names it; `tpu` can be planned for but not run on."""
    memory_bytes: int
    memory_bytes_per_s: float
    kernels: Kernels
    devices_per_node: int
    """That fast links join."""
    across_nodes_bytes_per_s: float
    """One direction, each device's share of its node's adapters, as large collectives reach it."""
    across_latency_s: float
    """Seconds of one step of a collective across nodes."""
    host_link_bytes_per_s: float = inf
    """Rate to the host's memory, or back."""
    host_bytes_per_s: float = inf
    """The device's share of the rate of the host's memory."""
    layer_s: float | None = None
    """Seconds of a layer, forward and backward, that no amount of work shortens, where it was measured with the device;
    of GPUs the software says it."""
    decoded_per_s: float = inf
    """Numbers of a frozen base that are decoded a second from 8 or 4 bits, where memory takes them as fast."""
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Dense rates of the data sheet by dtype, which utilisation is a share of; none of CPUs."""
    fixed_shapes: bool = False
    """Whether as many rows travel in every step, so that nobody asks how many will come."""
    torus: bool = False
    """Whether links join neighbours on a two-dimensional torus, as large as the cluster."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes that it multiplies in."""
        return tuple(self.kernels.products)


def plain_kernels(
    flops_per_s: dict[str, float], memory_bytes_per_s: float, attention_flops_per_s: float, link_bytes_per_s: float,
    latency_s: float, half_rows: float, expert_half_rows: float,
) -> Kernels:  # fmt: skip
    """Kernels of which rates alone are known: products reach half of theirs with so many rows, rows are permuted at the
    memory's rate, and a collective's steps take the same time each."""
    width = {"float32": 4.0, "float64": 8.0}
    products, experts = {}, {}
    for dtype, rate in flops_per_s.items():
        each = width.get(dtype, 2.0)
        products[dtype] = MatrixProducts(
            rate, memory_bytes_per_s, item_bytes=each, output_bytes=each, half_rows=half_rows
        )
        moved = each / memory_bytes_per_s
        experts[dtype] = GroupedExperts(
            rate, item_bytes=each, row_s=4 * moved, hidden_s=2 * moved, half_rows=expert_half_rows, tile=1
        )
    attention = FusedAttention(attention_flops_per_s, block=0, backward=2.5)
    return Kernels(
        products=products, experts=experts, attention={256: attention},
        ring=Collective(link_bytes_per_s, step_s=latency_s),
        all_to_all=Collective(link_bytes_per_s, doubling_s=latency_s), attention_dtype="float32",
    )  # fmt: skip


# Kernels of NVIDIA's devices: `measured.py`, with its source. Memory: NVIDIA's data sheets; its rate as large products
#   reached it. Links across nodes: one adapter of 200 Gb/s (A100) or 400 Gb/s (all later ones) a GPU, 93% of which
#   nccl-tests' large messages reach. B300 and GB300 can have 800 Gb/s, but what was published of gpt-oss over eight
#   nodes of B300 is no faster than over B200's; a cluster file may say so (`across_share: 2`). GB200 and GB300 NVL72:
#   72 GPUs in a domain. Latency of a step across nodes: a ring's in NCCL's own tuning model, simple protocol
#   (src/graph/tuning.cc). To the host: PCIe of generation 4 (A100) or 5, NVLink-C2C of Grace, as large copies reach
#   them; of its memory an eighth of a two-socket server's, or half of a Grace's, as its data sheets have it.
# Dense peaks: A100 312 TFLOP/s in bfloat16, H100 SXM and H200 989, HGX B200 and B300 2,250, GB200 and GB300 NVL72
#   2,500; half of it in TF32, twice as much in fp8 (NVIDIA's data sheets, which count sparse products: half of these).
# V100 was not measured: 0.85 of the peaks of its data sheet (15.7 TFLOP/s in float32, 0.9 TB/s), 0.7 of its links'
#   150 GB/s, and 0.6 for attention, as of A100. Its tensor cores multiply float16 alone, which no job trains in.
# A100-40 has the A100-80's kernels, with 1.555 of 2.039 TB/s.


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
    of = kernels or MEASURED[name]
    peaks = {"bfloat16": 1e12 * peak_tflops, "float32": 0.5e12 * peak_tflops}  # in TF32
    if "fp8" in of.products:
        peaks["fp8"] = 2e12 * peak_tflops
    return Device(
        kind="cuda", memory_bytes=memory_gib * _GIB, memory_bytes_per_s=of.products["bfloat16"].bytes_per_s,
        kernels=of, devices_per_node=per_node, across_nodes_bytes_per_s=0.93e9 * across_gb_per_s,
        across_latency_s=1.4e-5, host_link_bytes_per_s=1e9 * host_link_gb_per_s,
        host_bytes_per_s=1e9 * host_gb_per_s, peak_flops_per_s=peaks,
    )  # fmt: skip


def _with_memory(of: Kernels, share: float) -> Kernels:
    """Kernels of a device with memory of another rate."""
    products = {
        dtype: replace(each, bytes_per_s=share * each.bytes_per_s) for dtype, each in of.products.items()
    }
    experts = {
        dtype: replace(
            each, bytes_per_s=share * each.bytes_per_s, row_s=each.row_s / share, hidden_s=each.hidden_s / share,
            token_s=each.token_s / share,
        )
        for dtype, each in of.experts.items()
    }  # fmt: skip
    return replace(of, products=products, experts=experts)


DEVICES: dict[str, Device] = {
    # One core of an AMD EPYC (Zen 5), and gloo over loopback while both cores are busy, as `shardyard calibrate`
    # measured them in a busy hour: to rank layouts by. Machines differ by a factor of a few; calibrate yours.
    # `decoded_per_s`: bitsandbytes on one thread takes 2 to 7 ms for a million numbers of int8 or nf4.
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
    # One core of the paper's machine, float32 by single passes of its bfloat16 units: 420 TFLOP/s and 900 GB/s a board
    # of 8 cores and a chip of two (Google Cloud's system architecture); links of 656 Gb/s, both ways together (Jouppi
    # et al., CACM 2020), 82% of which are reached. The latency, of a hop on the torus, lies where all-to-all is near
    # the 16% and 36% that the paper gives for 128 and 2,048 cores; the rate, 0.87 of the peak, was fitted on the row
    # of 512 experts and 36 layers of its Table 3, both `half_rows` with it.
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

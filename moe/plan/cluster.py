"""What there is to run on, and what one device of each type can do."""

from dataclasses import dataclass

from moe.spec.base import Count, Spec
from moe.spec.errors import Problem, SpecError


class Cluster(Spec):
    """The devices of a cluster, all of one type: facts that a plan is made for."""

    num_nodes: Count
    devices_per_node: Count
    device: str = "cpu"
    """A name in `DEVICES`; on `cpu` a device is one core."""
    memory_bytes: Count
    """Memory of one device."""

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def traits(self) -> "Device":
        if self.device not in DEVICES:
            raise SpecError(
                Problem(
                    "cluster.device",
                    self.device,
                    "is not a device type that is known here",
                    f"use one of {', '.join(DEVICES)}",
                )
            )
        return DEVICES[self.device]


@dataclass(frozen=True)
class Device:
    """Rates of one device, in the vendor's figures for dense arithmetic; `efficiency` is what models reach."""

    kind: str
    """`cpu` or `cuda`, as torch names it; `tpu` can be planned for but not run on."""
    memory_bytes: int
    float32_flops_per_s: float
    bfloat16_flops_per_s: float
    efficiency: float
    within_node_bytes_per_s: float
    across_nodes_bytes_per_s: float
    latency_s: float


_GIB = 1024**3
DEVICES: dict[str, Device] = {
    # One core of a server processor, and gloo over loopback: orders of magnitude, to rank layouts by. Machines
    # differ by a factor of a few.
    "cpu": Device("cpu", 8 * _GIB, 60e9, 30e9, 0.5, 1.5e9, 1e9, 2e-4),
    # NVIDIA's data sheets. float32 is TF32 on tensor cores. One 400 Gb/s (A100: 200 Gb/s) adapter a GPU.
    "a100-80": Device("cuda", 80 * _GIB, 156e12, 312e12, 0.4, 300e9, 25e9, 2e-5),
    "h100": Device("cuda", 80 * _GIB, 494e12, 989e12, 0.4, 450e9, 50e9, 2e-5),
    "h200": Device("cuda", 141 * _GIB, 494e12, 989e12, 0.4, 450e9, 50e9, 2e-5),
    "b200": Device("cuda", 180 * _GIB, 1125e12, 2250e12, 0.4, 900e9, 50e9, 2e-5),
    # One core of the paper's machine: 16 GiB, 420 TFLOP/s a board of 8 cores, links of 70 GB/s a direction.
    "tpu-v3": Device("tpu", 16 * _GIB, 52e12, 52e12, 0.4, 70e9, 70e9, 1e-5),
}

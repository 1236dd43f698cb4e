"""Data-sheet figures of a device type that is not in the table."""

from pydantic import Field

from moe.plan.cluster.devices import Device, device_by_data_sheet
from moe.spec.base import Count, Rate, Spec, Text


class DeviceFacts(Spec):
    """Data-sheet figures of a GPU, given as a cluster's `device` in place of a name."""

    name: Text = Field(default="unnamed", min_length=1, max_length=64)
    memory_bytes: Count
    bfloat16_flops_per_s: Rate
    """Dense matrix products: half of the rate that data sheets give with sparsity."""
    memory_bytes_per_s: Rate
    link_bytes_per_s: Rate
    """Links of a device within its node, in one direction: half of the rate that data sheets give for both."""
    fp8_flops_per_s: Rate | None = None
    """Dense matrix products in fp8; None where the device has no fp8."""
    across_nodes_bytes_per_s: Rate = 50e9
    """Network adapters of a device, in one direction; one of 400 Gb/s when left out."""
    assumed_as: Text | None = None
    """The device type whose rates are assumed, where the device's own are not known."""

    def device(self) -> Device:
        """The device. Its kernels are taken to reach the same share of its rates as those of H100 do of H100's."""
        source = "the rates given, of which H100's kernels reach as much"
        if self.assumed_as is not None:
            source = f"the rates of {self.assumed_as}, since nothing is known of its own"
        return device_by_data_sheet(
            source, self.memory_bytes, self.bfloat16_flops_per_s, self.fp8_flops_per_s, self.memory_bytes_per_s,
            self.link_bytes_per_s, self.across_nodes_bytes_per_s,
        )  # fmt: skip

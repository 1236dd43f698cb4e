"""Data-sheet figures of a device type outside the table."""

from pydantic import Field

from moe.plan.cluster.devices import Device, device_by_data_sheet
from moe.spec.base import Count, Rate, Spec, Text


class DeviceFacts(Spec):
    """Data-sheet figures of a GPU, in place of a device name."""

    name: Text = Field(default="unnamed", min_length=1, max_length=64)
    memory_bytes: Count
    bfloat16_flops_per_s: Rate
    """Dense: half of the data-sheet rate with sparsity."""
    memory_bytes_per_s: Rate
    link_bytes_per_s: Rate
    """Within the node, one direction: half of the bidirectional data-sheet rate."""
    fp8_flops_per_s: Rate | None = None
    """Dense; None without fp8."""
    across_nodes_bytes_per_s: Rate = 50e9
    """Network adapters of a device, one direction; default: one of 400 Gb/s."""
    assumed_as: Text | None = None
    """Device type whose rates are assumed, if its own are unknown."""

    def device(self) -> Device:
        """The device, with kernels as efficient as H100's relative to the data sheet."""
        source = "the rates given, of which H100's kernels reach as much"
        if self.assumed_as is not None:
            source = f"the rates of {self.assumed_as}, since nothing is known of its own"
        return device_by_data_sheet(
            source, self.memory_bytes, self.bfloat16_flops_per_s, self.fp8_flops_per_s, self.memory_bytes_per_s,
            self.link_bytes_per_s, self.across_nodes_bytes_per_s,
        )  # fmt: skip
